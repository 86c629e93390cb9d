"""The common parts of the answers of dialects."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Generic, TypeVar

import msgspec

from ...chat import MessageDelta, ToolCallDelta
from ...client.engine_client import Delta, Sequence
from ...client.sequence_io import TOKENS_AT_ONCE
from ..chats.answer import ChatAnswer, ChatChoice
from ..generation import raise_if_failed
from ..logprobs import Json
from ..streaming.event_stream import ChunkEncoder

AnswerT = TypeVar("AnswerT", bound=ChatAnswer)


class CallCollector:
    """Joins the pieces of tool calls, for formats whose calls are always complete."""

    def __init__(self) -> None:
        self._open: ToolCallDelta | None = None
        self._arguments: list[str] = []

    def add(self, pieces: list[ToolCallDelta], *, is_end: bool) -> list[ToolCallDelta]:
        """Return the calls that these pieces complete. At the end of the answer, every call is complete."""
        complete: list[ToolCallDelta] = []
        for piece in pieces:
            if self._open is not None and piece.index == self._open.index:
                self._arguments.append(piece.arguments)
            else:
                complete += self._finish()
                self._open, self._arguments = piece, [piece.arguments]
        return complete + self._finish() if is_end else complete

    def _finish(self) -> list[ToolCallDelta]:
        call, self._open = self._open, None
        if call is None:
            return []
        return [msgspec.structs.replace(call, arguments="".join(self._arguments))]


def decode_input(arguments: str) -> Json:
    """Return the decoded arguments of a call, or {} if they are not an object."""
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


class DialectChunks(ChunkEncoder, Generic[AnswerT]):
    """Writes the stream of an answer with one choice."""

    def __init__(self, answer: AnswerT) -> None:
        self.answer = answer
        self.choice: ChatChoice = answer.choices[0]
        # The order of text and calls within one delta is lost. So if both are possible, each token is a separate delta.
        self._max_tokens = 1 if answer.request.tools else TOKENS_AT_ONCE

    def read(self, sequence: Sequence) -> Delta:
        """Return the new output of a sequence. Raise APIError if the sequence failed."""
        delta = sequence.read_some(self._max_tokens)
        raise_if_failed(delta)
        return delta


class BlockChunks(DialectChunks[AnswerT]):
    """Writes the events of a message: its start, its content blocks one after another, and its end."""

    def __init__(self, answer: AnswerT) -> None:
        super().__init__(answer)
        self._has_begun = False
        # The type of the open block, and the number of its call or its own; "" if none is open.
        self._open: tuple[str, int] = ("", 0)

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output."""
        delta = self.read(sequence)
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            self._begin(events)
        self._write(self.choice.read(delta), delta, events)
        if delta.finish_reason is not None:
            self._close(events)
            self._end(delta, events)
        return b"".join(events)

    @abstractmethod
    def _begin(self, events: list[bytes]) -> None:
        """Write the start of the message."""

    @abstractmethod
    def _write(self, message: MessageDelta, delta: Delta, events: list[bytes]) -> None:
        """Write new output, and the ends and starts of blocks between it."""

    @abstractmethod
    def _close(self, events: list[bytes]) -> None:
        """Write the end of the open block, if there is one."""

    @abstractmethod
    def _end(self, delta: Delta, events: list[bytes]) -> None:
        """Write the end of the message."""
