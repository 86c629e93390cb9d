"""End the chunks of a prompt where its recurrent state can be cached.

The state after a chunk is the one after its last token, and the prefix cache can find it only if that token ends a
block. Chunks therefore end at the last block boundary before the prompt's last token, which is computed in an
additional step. They also end where a prompt begins to differ from earlier ones, such as after a common system prompt:
the next prompt that begins in the same way starts from there.
"""

from __future__ import annotations

from collections.abc import Sequence

from ....protocol.config import CacheConfig, SchedulerConfig
from ....protocol.kv_cache_groups import AttentionKind, KVCacheGroup


class StateCheckpoints:
    """Shortens chunks for models with recurrent layers, if prefixes are cached and prompts may be split."""

    def __init__(
        self, config: SchedulerConfig, cache: CacheConfig, groups: Sequence[KVCacheGroup]
    ) -> None:
        self._block_size = cache.block_size
        self.are_in_use = (
            config.enable_chunked_prefill
            and cache.enable_prefix_caching
            and any(group.kind is AttentionKind.STATE_SPACE for group in groups)
        )

    def cut(self, num_computed: int, granted: int, num_tokens: int, num_shared: int) -> int:
        """Return how many of `granted` tokens to compute, for a prompt of `num_tokens` with `num_computed` done.

        Its first `num_shared` tokens, which end a block, are also those of earlier requests.
        """
        if not self.are_in_use:
            return granted
        last = min(num_computed + granted, num_tokens - 1)
        end = last - last % self._block_size
        if num_computed < num_shared < end:
            end = num_shared
        return end - num_computed if end > num_computed else granted
