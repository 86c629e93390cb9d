"""Limit how many prompts are computed in chunks at the same time, and how they share a step."""

from __future__ import annotations

import numpy as np

from ....protocol.arrays import BoolArray, Int64Array
from ....protocol.config import CacheConfig, SchedulerConfig
from ....protocol.errors import ConfigError
from .prefill_pace import PrefillPace

DEFAULT_LONG_SHARE = 0.04
"""A prompt is long if it has more than this fraction of max_model_len, unless a threshold is configured."""


class PartialPrefills:
    """Limits the prompts that are computed in chunks at the same time.

    At most `max_num_partial_prefills` such prompts are allowed, `max_long_partial_prefills` of them long; 0 means no
    limit.

    Raises:
        ConfigError: More long prompts than prompts are allowed.
    """

    def __init__(
        self, config: SchedulerConfig, cache_config: CacheConfig, max_model_len: int
    ) -> None:
        self.max_num = config.max_num_partial_prefills
        self.max_num_long = config.max_long_partial_prefills
        if 0 < self.max_num < self.max_num_long:
            raise ConfigError(
                f"max_long_partial_prefills={self.max_num_long} exceeds "
                f"max_num_partial_prefills={self.max_num}"
            )
        self.pace = PrefillPace(config.prefill_step_ms)
        self._budget = config.max_num_batched_tokens
        self._chunk = config.long_prefill_token_threshold
        self._long = self._chunk or max(1, int(max_model_len * DEFAULT_LONG_SHARE))
        self._unit = config.token_unit
        self._whole_blocks = cache_config.block_size if cache_config.enable_prefix_caching else 1

    def is_long(self, num_tokens: int) -> bool:
        """Return whether a prompt with this many tokens counts as long."""
        return num_tokens > self._long

    def are_at_limit(self, num_partial: int) -> bool:
        """Return whether `num_partial` prompts in chunks reach the maximum."""
        return 0 < self.max_num <= num_partial

    def are_long_at_limit(self, num_long: int) -> bool:
        """Return whether `num_long` long prompts in chunks reach the maximum."""
        return 0 < self.max_num_long <= num_long

    @property
    def long_prompt_tokens(self) -> int:
        """Length in tokens above which a prompt may have to wait for other long ones; 0 if no prompt has to."""
        return self._long if self.max_num and self.max_num_long else 0

    def share(self, num_tokens: int, num_prefilling: int, num_joining: int) -> int:
        """Return the maximum number of tokens of one prompt in a step; a few more may complete it.

        All prompts together have `num_tokens`. `num_joining` of them may start in the step, in addition to the
        `num_prefilling` ones that are being computed.
        """
        share = self._budget
        if self.max_num:
            num_sharing = max(num_prefilling, min(self.max_num, num_prefilling + num_joining), 1)
            share = max(self._unit, num_tokens // num_sharing)
        return min(share, self._chunk) if self._chunk else share

    def cap(self, wanted: int, share: int) -> int:
        """Return how many of its wanted tokens a prompt gets with this share, in whole blocks where possible."""
        if wanted <= share:
            return wanted
        if not self.max_num:
            return share
        return share // self._whole_blocks * self._whole_blocks or share

    def cap_rows(self, wanted: Int64Array, is_prefill: BoolArray, share: int) -> Int64Array:
        """Apply `cap` to the rows that compute a prompt."""
        most = self.cap(share + 1, share)
        return np.where(is_prefill & (wanted > share), most, wanted)
