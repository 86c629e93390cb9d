"""The common part of the streams of dialects."""

from __future__ import annotations

from ...client.engine_client import Delta, Sequence
from ...client.sequence_io import TOKENS_AT_ONCE
from ..generation import raise_if_failed
from ..routes.chat_completions import ChatAnswer, ChatChoice
from ..streaming.event_stream import ChunkEncoder


class DialectChunks(ChunkEncoder):
    """Writes the stream of an answer with one choice."""

    def __init__(self, answer: ChatAnswer) -> None:
        self.answer = answer
        self.choice: ChatChoice = answer.choices[0]
        # The order of text and calls within one delta is lost. So if both are possible, each token is a separate delta.
        self._max_tokens = 1 if answer.request.tools else TOKENS_AT_ONCE

    def read(self, sequence: Sequence) -> Delta:
        """Return the new output of a sequence.

        Raises:
            APIError: The sequence failed.
        """
        delta = sequence.read_some(self._max_tokens)
        raise_if_failed(delta)
        return delta
