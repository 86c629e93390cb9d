"""The answer to a chat message: its text as it arrives, and its token count and speed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ....protocol.errors import counted


class Piece(NamedTuple):
    """A piece of the answer's text. `is_reasoning` marks the reasoning before the actual answer."""

    text: str
    is_reasoning: bool = False


class Answer:
    """Collects the events of a streamed chat completion.

    Attributes:
        text: The answer so far, without the reasoning.
        num_tokens: The number of generated tokens, or None if the server has not reported it.
        finish_reason: The reason why the answer ended, or None.
        first_s: Seconds until the first text arrived, or None if there was none.
        total_s: Seconds until the answer ended.
    """

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens: int | None = None
        self.finish_reason: str | None = None
        self.first_s: float | None = None
        self.total_s = 0.0
        self._begun = time.monotonic()

    def read(self, events: Iterable[dict[str, Any]]) -> Iterator[Piece]:
        """Yield the pieces of text as they arrive."""
        for event in events:
            self.total_s = time.monotonic() - self._begun
            if usage := event.get("usage"):
                self.num_tokens = usage.get("completion_tokens")
            for choice in event.get("choices") or ():
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
                yield from self._pieces(choice.get("delta") or {})
        self.total_s = time.monotonic() - self._begun

    def _pieces(self, delta: dict[str, Any]) -> Iterator[Piece]:
        # Servers use different names for the field with reasoning.
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        content = delta.get("content")
        if self.first_s is None and (reasoning or content):
            self.first_s = self.total_s
        if reasoning:
            yield Piece(reasoning, is_reasoning=True)
        if content:
            self.text += content
            yield Piece(content)

    def figures(self) -> str:
        """Return the line below the answer: the number of tokens and the speed."""
        parts = []
        if self.num_tokens is not None:
            parts.append(counted(self.num_tokens, "token"))
        if self.first_s is not None:
            parts.append(f"first after {self.first_s:.2f} s")
            decoding_s = self.total_s - self.first_s
            if self.num_tokens is not None and self.num_tokens > 1 and decoding_s > 0:
                parts.append(f"then {(self.num_tokens - 1) / decoding_s:.1f} tokens/s")
        if self.finish_reason == "length":
            parts.append("stopped at the token limit")
        return ", ".join(parts)
