"""The most recent prompts of a frontend, to find where a new prompt first differs from an earlier one."""

from __future__ import annotations

from collections import deque
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

TokenIds = npt.NDArray[np.int32]

MAX_PROMPTS: Final = 64
MAX_TOKENS: Final = 1 << 20
"""Maximum total tokens of the stored prompts (4 MiB)."""


class NearestPrompt(msgspec.Struct, frozen=True):
    """The earlier prompt with the longest common prefix, which has `num_common` tokens."""

    token_ids: TokenIds
    num_common: int


class RecentPrompts:
    """The most recent prompts. A prompt is compared only with prompts of its own `owner`, whose cache it may share."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[bytes, TokenIds]] = deque()
        self._num_tokens = 0

    def add(self, owner: bytes, token_ids: TokenIds) -> None:
        """Add a prompt. The oldest prompts are dropped if there is no space."""
        if len(token_ids) > MAX_TOKENS:
            return
        self._prompts.append((owner, token_ids))
        self._num_tokens += len(token_ids)
        while len(self._prompts) > MAX_PROMPTS or self._num_tokens > MAX_TOKENS:
            _, oldest = self._prompts.popleft()
            self._num_tokens -= len(oldest)

    def find_nearest(self, owner: bytes, token_ids: TokenIds) -> NearestPrompt | None:
        """Return the earlier prompt with the longest common prefix; None if no prompt has the same first token."""
        best: NearestPrompt | None = None
        for other_owner, other in reversed(self._prompts):
            if other_owner != owner:
                continue
            num_common = _count_common(token_ids, other)
            if num_common > (best.num_common if best else 0):
                best = NearestPrompt(other, num_common)
        return best


def _count_common(first: TokenIds, second: TokenIds) -> int:
    length = min(len(first), len(second))
    different = np.flatnonzero(first[:length] != second[:length])
    return int(different[0]) if len(different) else length
