"""The scheduler's use of a grammar engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ....protocol.arrays import int32_view
from ....protocol.sampling_params import StructuredOutput
from ...state.batch import ScheduledRow
from ...state.request import Request, RequestKey


class GrammarBackend(Protocol):
    """Grammars by request. A compilation's end is reported by `SchedulerInterface.grammar_ready`.

    So is, after each token of an isolated grammar, that the mask of the next one is ready.

    A grammar that has refused tokens, or could not take them back, accepts nothing any more.
    """

    def compile(self, key: RequestKey, structured_output: StructuredOutput) -> None:
        """Start to compile, without waiting."""

    def accept_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> bool:
        """Advance the grammar; False when it forbids one of the tokens."""

    def num_acceptable(self, key: RequestKey, token_ids: Sequence[int]) -> int:
        """How many of the tokens the grammar would accept in a row, without advancing."""

    def forced_tokens(self, key: RequestKey, token_ids: Sequence[int]) -> list[int]:
        """The tokens that the grammar forces after these, which it accepts, without advancing.

        They are one way to tokenise the text that it forces; there may be others.
        """

    def rollback(self, key: RequestKey, num_tokens: int) -> bool:
        """Take back the last accepted tokens; False when that is not possible."""

    def find_error(self, key: RequestKey) -> str:
        """Return why the grammar accepts nothing any more; "" if that is not known."""

    def fill_bitmask(self, keys: Sequence[RequestKey]) -> bytes:
        """The allowed next tokens, int32[len(keys), ceil(vocab_size / 32)]."""

    def release(self, key: RequestKey) -> None:
        """Forget the grammar, compiled or not."""


class Grammars:
    """Grammars of constrained requests; without a backend there are none of those."""

    def __init__(self, backend: GrammarBackend | None, vocab_size: int) -> None:
        self._backend = backend
        self._row_bytes = -(-vocab_size // 32) * 4
        self._anything = b"\xff" * self._row_bytes

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

    def accept_output(self, request: Request) -> bool:
        """Advance a new grammar over the output that a resubmitted request comes with."""
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
        """Return why a request's grammar accepts nothing any more; "" if that is not known."""
        return "" if self._backend is None else self._backend.find_error(request.key)

    def num_acceptable(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many drafts a request's grammar would accept."""
        if self._backend is None or not token_ids:
            return len(token_ids)
        return self._backend.num_acceptable(request.key, token_ids)

    def forced_tokens(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        """What must follow these drafts, which the request's grammar accepts."""
        if self._backend is None:
            return []
        return self._backend.forced_tokens(request.key, token_ids)

    def release(self, request: Request) -> None:
        if self._backend is not None:
            self._backend.release(request.key)

    def bitmask(self, rows: Sequence[ScheduledRow]) -> bytes:
        """The allowed next tokens of each row, and those after each of its drafts.

        A row that its request has left may sample anything, because the sample is dropped; so may what follows
        a draft that is not allowed. A grammar that refuses now what it would have accepted, or cannot be put back
        before the drafts, refuses the tokens of the step, too, which ends its request.
        """
        if any(row.num_drafts for row in rows):
            return b"".join(map(self._bitmask_with_drafts, rows))
        alive = [row.is_awaited for row in rows]
        keys = [row.request.key for row, is_alive in zip(rows, alive, strict=True) if is_alive]
        filled = self._backend.fill_bitmask(keys) if self._backend and keys else b""
        size = self._row_bytes
        known = (filled[start : start + size] for start in range(0, len(filled), size))
        return b"".join(next(known) if is_alive else self._anything for is_alive in alive)

    def _bitmask_with_drafts(self, row: ScheduledRow) -> bytes:
        num_rows = row.num_drafts + 1
        backend = self._backend
        if backend is None or not row.is_awaited:
            return self._anything * num_rows
        key = row.request.key
        filled = [backend.fill_bitmask([key])]
        draft_token_ids = row.draft_token_ids or []
        num_acceptable = self.num_acceptable(row.request, draft_token_ids)
        for token_id in draft_token_ids[:num_acceptable]:
            if not backend.accept_tokens(key, (token_id,)):
                break
            filled.append(backend.fill_bitmask([key]))
        else:
            if num_acceptable:
                backend.rollback(key, num_acceptable)
        return b"".join(filled) + self._anything * (num_rows - len(filled))
