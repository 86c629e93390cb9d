"""The scheduler's interface to structured output: compile grammars, advance them, and fetch token bitmasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....protocol.arrays import int32_view
from ....protocol.sampling_params import StructuredOutput
from ...state.batch import ScheduledRow
from ...state.request import Request, RequestKey


class GrammarBackend(Protocol):
    """The operations on grammars that the scheduler needs. `StructuredOutputManager` implements them.

    `SchedulerInterface.grammar_ready` reports the end of a compilation. Grammars that run in a separate process
    also report each next mask that way. A grammar that has refused tokens accepts no more.
    """

    def compile(self, key: RequestKey, structured_output: StructuredOutput) -> None:
        """Start to compile a grammar, and return without waiting for the result."""

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        """Advance the grammar. Return False if it forbids one of the tokens."""

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens the grammar accepts in a row, without advancing."""

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow these acceptable ones according to the grammar, without advancing it.

        They are one possible tokenization of the forced text.
        """

    def find_error(self, key: RequestKey) -> str:
        """Return why the grammar accepts nothing anymore, or "" if the reason is unknown."""

    def fill_bitmask(self, keys: Sequence[RequestKey]) -> bytes:
        """Return the allowed next tokens, int32[len(keys), ceil(vocab_size / 32)]."""

    def fill_draft_bitmasks(self, key: RequestKey, token_ids: Sequence[int]) -> bytes:
        """Return the allowed tokens before each draft up to the first forbidden one, and after the last.

        The result is int32[at most 1 + len(token_ids), ceil(vocab_size / 32)]. The grammar does not advance.
        """

    def release(self, key: RequestKey) -> None:
        """Remove the grammar, compiled or not."""


class Grammars:
    """The grammars of the constrained requests. Without a backend, no request is constrained."""

    def __init__(self, backend: GrammarBackend | None, vocab_size: int) -> None:
        self._backend = backend
        self._row_bytes = -(-vocab_size // 32) * 4
        self._all_allowed = b"\xff" * self._row_bytes

    def start(self, request: Request) -> bool:
        """Start to compile a constrained request's grammar. Return False for an unconstrained one."""
        structured_output = request.params.structured_output
        if structured_output is None or self._backend is None:
            return False
        self._backend.compile(request.key, structured_output)
        return True

    def accept(self, request: Request, token_ids: Sequence[int]) -> bool:
        """Advance a request's grammar. Return False if it forbids one of the tokens."""
        return self._backend is None or self._backend.accept_tokens(request.key, token_ids)

    def accept_output(self, request: Request) -> bool:
        """Advance a newly compiled grammar over the output of a resubmitted request.

        Return False if it forbids a token.
        """
        token_ids = int32_view(request.output_token_ids).tolist()
        return not token_ids or self.accept(request, token_ids)

    def is_isolated(self, request: Request) -> bool:
        """Return whether a request has to wait for its mask after each token."""
        structured_output = request.params.structured_output
        return (
            self._backend is not None
            and structured_output is not None
            and structured_output.is_isolated
        )

    def find_error(self, request: Request) -> str:
        """Return why a request's grammar accepts nothing anymore, or "" if the reason is unknown."""
        return "" if self._backend is None else self._backend.find_error(request.key)

    def num_acceptable(self, request: Request, token_ids: Sequence[int]) -> int:
        """Return how many of the draft tokens the request's grammar accepts in a row."""
        if self._backend is None or not token_ids:
            return len(token_ids)
        return self._backend.num_acceptable(request.key, token_ids)

    def forced_tokens(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must follow these acceptable drafts."""
        if self._backend is None:
            return []
        return self._backend.forced_tokens(request.key, token_ids)

    def release(self, request: Request) -> None:
        """Remove a request's grammar."""
        if self._backend is not None:
            self._backend.release(request.key)

    def bitmask(self, rows: Sequence[ScheduledRow]) -> bytes:
        """Return the bitmask of allowed next tokens for each row, and for the position after each of its drafts.

        All tokens are allowed where the sample is discarded anyway: in rows whose request has ended, and after a
        forbidden draft.
        """
        if any(row.num_drafts for row in rows):
            return b"".join(map(self._bitmask_with_drafts, rows))
        alive = [row.is_awaited for row in rows]
        keys = [row.request.key for row, is_alive in zip(rows, alive, strict=True) if is_alive]
        filled = self._backend.fill_bitmask(keys) if self._backend and keys else b""
        size = self._row_bytes
        known = (filled[start : start + size] for start in range(0, len(filled), size))
        return b"".join(next(known) if is_alive else self._all_allowed for is_alive in alive)

    def _bitmask_with_drafts(self, row: ScheduledRow) -> bytes:
        filled = b""
        if self._backend is not None and row.is_awaited:
            filled = self._backend.fill_draft_bitmasks(row.request.key, row.draft_token_ids or ())
        return filled + self._all_allowed * (row.num_drafts + 1 - len(filled) // self._row_bytes)
