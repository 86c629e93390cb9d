"""Divide decoding requests among the stages of a pipeline-parallel model."""

from __future__ import annotations

import numpy as np

from ...protocol.arrays import BoolArray, Int64Array
from ...protocol.config import SchedulerConfig
from ..state.slots import SlotArray
from .step_results import StepResults


class MicroBatches:
    """Splits the decoding requests into one batch per pipeline stage.

    A request in the pipeline cannot enter it again before its token is known. With a single batch, one stage would work
    while the others wait; with several alternating batches, every stage is busy.

    If it `awaits_tokens`, no request enters the pipeline before its last token and its drafts are known here.
    """

    def __init__(
        self, num_batches: int, num_slots: int, results: StepResults, awaits_tokens: bool
    ) -> None:
        self._num_batches = num_batches
        self._num_slots = num_slots
        self._results = results
        self._awaits_tokens = awaits_tokens

    def limit_decodes(
        self, slots: SlotArray, wanted: Int64Array, is_prefill: BoolArray
    ) -> Int64Array:
        """Return `wanted` with 0 for the decoding requests whose batch is not next."""
        may_decode = (wanted > 0) & ~is_prefill
        num_batches = min(self._num_batches, int(may_decode.sum()))
        if num_batches < 1 or (num_batches == 1 and not self._awaits_tokens):
            return wanted
        others = self._num_batches if self._awaits_tokens else num_batches - 1
        under_way = self._results.get_last_steps(others)
        is_under_way = np.zeros(self._num_slots, np.bool_)
        for step in under_way:
            is_under_way[step.sampling.slots] = True
        may_decode &= ~is_under_way[slots]
        share = -(-int(may_decode.sum()) // max(num_batches - len(under_way), 1))
        turn = may_decode.nonzero()[0][:share]
        limited = np.where(is_prefill, wanted, 0)
        limited[turn] = wanted[turn]
        return limited


def make_micro_batches(
    config: SchedulerConfig, results: StepResults, *, has_drafts: bool
) -> MicroBatches | None:
    """Return the micro-batches of decoding requests, or None if these are not divided."""
    if config.num_micro_batches == 1:
        return None
    awaits_tokens = has_drafts and not config.async_scheduling
    return MicroBatches(config.num_micro_batches, config.max_num_seqs, results, awaits_tokens)
