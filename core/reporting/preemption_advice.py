"""Log advice when requests are preempted because the KV cache is full."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger(__name__)

ADVICE_INTERVAL_S: Final = 60.0
"""Minimum seconds between two warnings."""


class PreemptionAdvice:
    """Warns at the first preemption for lack of blocks, and then at most once per `ADVICE_INTERVAL_S`."""

    def __init__(self) -> None:
        self._num_total = 0
        self._num_new = 0
        self._last_warning: float | None = None

    def record(self, num_preemptions: int, now: float) -> None:
        """Count preemptions for lack of blocks, and warn if a warning is due."""
        self._num_new += num_preemptions
        if not self._num_new:
            return
        last = self._last_warning
        if last is not None and now - last < ADVICE_INTERVAL_S:
            return
        self._num_total += self._num_new
        logger.warning(
            "the KV cache is full: %d sequences were preempted (%d since the start) and must be computed again "
            "or copied back. Give it more memory (--kv-cache-memory-bytes, or --gpu-memory-utilization on a GPU), "
            "spread the model over more devices (--tensor-parallel-size), or lower --max-num-seqs",
            self._num_new,
            self._num_total,
        )
        self._num_new = 0
        self._last_warning = now
