"""A grammar engine for tests: the k-th generated token must be congruent to k modulo 2."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from engine.protocol.sampling_params import StructuredOutput

Key = tuple[int, int]


def allowed_tokens(num_accepted: int, vocab_size: int) -> np.ndarray:
    return np.arange(vocab_size) % 2 == num_accepted % 2


class ModelGrammar:
    def __init__(self, vocab_size: int, forces: bool = False) -> None:
        self.vocab_size = vocab_size
        self.forces = forces
        self.compiling: list[Key] = []
        self.num_accepted: dict[Key, int] = {}
        self.fails_in_drafts: set[Key] = set()
        self._failed: set[Key] = set()
        self._isolated: set[Key] = set()

    def compile(self, key: Key, structured_output: StructuredOutput) -> None:
        self.compiling.append(key)
        self.num_accepted[key] = 0
        self._isolated.discard(key)
        if structured_output.is_isolated:
            self._isolated.add(key)

    def accept_tokens(self, key: Key, token_ids: Sequence[int]) -> bool:
        if key in self._failed:
            return False
        for token_id in token_ids:
            if token_id % 2 != self.num_accepted[key] % 2:
                return False
            self.num_accepted[key] += 1
        if key in self._isolated:
            # The mask of the next token takes as long as compiling did.
            self.compiling.append(key)
        return True

    def num_acceptable(self, key: Key, token_ids: Sequence[int]) -> int:
        if key in self._isolated:
            return 0
        start = self.num_accepted[key]
        wrong = (i for i, token_id in enumerate(token_ids) if token_id % 2 != (start + i) % 2)
        return next(wrong, len(token_ids))

    def forced_tokens(self, key: Key, token_ids: Sequence[int]) -> list[int]:
        """Return two forced tokens after every third token, if `forces` is set."""
        if key in self._isolated:
            return []
        num_accepted = self.num_accepted[key] + len(token_ids)
        return (
            [num_accepted % 2, (num_accepted + 1) % 2]
            if self.forces and num_accepted % 3 == 0
            else []
        )

    def find_error(self, key: Key) -> str:
        return ""

    def fill_bitmask(self, keys: Sequence[Key]) -> bytes:
        return b"".join(self.fill_draft_bitmasks(key, ()) for key in keys)

    def fill_draft_bitmasks(self, key: Key, token_ids: Sequence[int]) -> bytes:
        assert key not in self.compiling, "a request was scheduled before its mask was ready"
        if token_ids and key in self.fails_in_drafts:
            self._failed.add(key)
        num_rows = 1 + self.num_acceptable(key, token_ids)
        bits = np.zeros((num_rows, -(-self.vocab_size // 32) * 32), np.uint8)
        for row in range(num_rows):
            allowed = allowed_tokens(self.num_accepted[key] + row, self.vocab_size)
            bits[row, : self.vocab_size] = allowed
        return np.packbits(bits, axis=1, bitorder="little").tobytes()

    def release(self, key: Key) -> None:
        del self.num_accepted[key]
        if key in self.compiling:
            self.compiling.remove(key)
