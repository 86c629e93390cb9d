"""The events of a stream, as far as completions and chat completions share them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Generic, TypeVar

import msgspec

from ..engine_client import Sequence
from .answer import Answer
from .event_stream import event
from .logprobs import Json

_encode = msgspec.json.Encoder().encode


AnswerT = TypeVar("AnswerT", bound=Answer[Any])


class Chunks(ABC, Generic[AnswerT]):
    """Writes the chunks of an answer, with usage as the request asks for it.

    Where a piece of text is all that is new (`is_plain`) it goes through templates that are made once for a request: in
    its choice it stands between `before` and `after`.
    """

    __slots__ = (
        "_answer",
        "_continuous_usage",
        "_heads",
        "_include_usage",
        "_is_plain",
        "_tail",
    )

    def __init__(
        self,
        answer: AnswerT,
        num_choices: int,
        *,
        is_plain: bool,
        before: bytes,
        after: bytes,
    ) -> None:
        self._answer = answer
        options = answer.request.stream_options
        self._include_usage = bool(options and options.include_usage)
        self._continuous_usage = bool(
            self._include_usage and options and options.continuous_usage_stats
        )
        self._is_plain = is_plain and not self._continuous_usage
        envelope = b"data: " + _encode(answer.envelope)[:-1]
        self._heads = [
            b'%b,"choices":[{"index":%d,%b' % (envelope, index, before)
            for index in range(num_choices)
        ]
        self._tail = _plain_tail(after, self._include_usage)

    def encode(self, news: list[Sequence]) -> bytes:
        """Events of what is new of these sequences. Raises APIError."""
        if len(news) == 1:
            return self._encode_news(news[0])
        return b"".join(map(self._encode_news, news))

    def _encode_news(self, sequence: Sequence) -> bytes:
        if not self._is_plain or sequence.finish_reason is not None:
            return self._render(sequence)
        text = sequence.read_text()
        if not text:
            return b""
        return b"".join((self._heads[sequence.position], _encode(text), self._tail))

    @abstractmethod
    def _render(self, sequence: Sequence) -> bytes:
        """Events of what a template does not fit. Raises APIError for a sequence that failed."""

    def chunk(self, choice: Json, **more: object) -> bytes:
        chunk = self._answer.envelope | {"choices": [choice]} | more
        if self._include_usage:
            chunk["usage"] = self._answer.usage_so_far() if self._continuous_usage else None
        return event(chunk)

    def closing(self) -> bytes:
        """Events after the last news, before `[DONE]`."""
        if not self._include_usage:
            return b""
        answer = self._answer
        return event(answer.envelope | {"choices": [], "usage": answer.usage()})


@cache
def _plain_tail(after: bytes, include_usage: bool) -> bytes:
    """One object for all requests: it is in the processor's cache when the next one needs it."""
    end = b',"usage":null}\n\n' if include_usage else b"}\n\n"
    return after + b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + end
