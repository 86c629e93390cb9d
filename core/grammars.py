"""The scheduler's use of a grammar engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..protocol.sampling_params import StructuredOutput
from .batch import Tenure
from .request import Request, RequestKey


class GrammarBackend(Protocol):
    """Grammars by request. A compilation's end is reported by `SchedulerInterface.grammar_ready`."""

    def compile(self, key: RequestKey, structured_output: StructuredOutput) -> None:
        """Start to compile, without waiting."""

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        """Advance the grammar; False when it forbids one of the tokens."""

    def fill_bitmask(self, keys: Sequence[RequestKey]) -> bytes:
        """The allowed next tokens, int32[len(keys), ceil(vocab_size / 32)]."""

    def release(self, key: RequestKey) -> None:
        """Forget the grammar, compiled or not."""


class Grammars:
    """Grammars of constrained requests; without a backend there are none of those."""

    def __init__(self, backend: GrammarBackend | None, vocab_size: int) -> None:
        self._backend = backend
        self._row_bytes = -(-vocab_size // 32) * 4

    def start(self, request: Request) -> bool:
        """Start to compile the grammar of a constrained request. False for any other."""
        structured_output = request.params.structured_output
        if structured_output is None or self._backend is None:
            return False
        self._backend.compile(request.key, structured_output)
        return True

    def accept(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Advance a request's grammar; False when it forbids one of the tokens."""
        return self._backend is None or self._backend.accept_tokens(request.key, token_ids)

    def release(self, request: Request) -> None:
        if request.params.structured_output is not None and self._backend is not None:
            self._backend.release(request.key)

    def bitmask(self, rows: Sequence[Tenure]) -> bytes:
        """The allowed next tokens of each row.

        A row whose request has left its slot may sample anything, for its sample is dropped.
        """
        alive = [row.is_alive for row in rows]
        keys = [row.request.key for row, is_alive in zip(rows, alive, strict=True) if is_alive]
        filled = self._backend.fill_bitmask(keys) if self._backend and keys else b""
        size = self._row_bytes
        known = (filled[start : start + size] for start in range(0, len(filled), size))
        anything = b"\xff" * size
        return b"".join(next(known) if is_alive else anything for is_alive in alive)
