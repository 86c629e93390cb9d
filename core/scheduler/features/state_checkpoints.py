"""Ends the chunks of prompts where a recurrent state can be cached.

A state is that after the last token of a chunk, and the prefix cache can find it only if this token ends a block. So
chunks end at the last block boundary that they reach before the prompt's last token, which is computed in a further
step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.config import CacheConfig, SchedulerConfig
from ....protocol.kv_cache_groups import AttentionKind, KVCacheGroup


class StateCheckpoints:
    """Cuts chunks for models with recurrent layers, if prefixes are cached and prompts may be split."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, groups: Sequence[KVCacheGroup]
    ) -> None:
        self._block_size = cache.block_size
        self.are_in_use = (
            config.enable_chunked_prefill
            and cache.enable_prefix_caching
            and any(group.kind is AttentionKind.STATE_SPACE for group in groups)
        )

    def cut(self, num_computed: int, granted: int, num_tokens: int) -> int:
        """Return how many of the `granted` tokens after the computed ones of a prompt of `num_tokens` to compute."""
        if not self.are_in_use:
            return granted
        last = min(num_computed + granted, num_tokens - 1)
        end = last - last % self._block_size
        return end - num_computed if end > num_computed else granted
