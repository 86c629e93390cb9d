"""Which decoding requests take part in the next step when the model is a pipeline of stages."""

from __future__ import annotations

import numpy as np

from ..protocol.arrays import BoolArray, Int64Array
from .slots import SlotArray
from .step_results import StepResults


class MicroBatches:
    """Shares the decoding requests out among as many batches as there are stages.

    A request that is on its way through the pipeline cannot enter it again before it has its token. If all were in
    one batch, one stage would work while the others wait; in several that take turns, each stage has one.
    """

    def __init__(self, num_batches: int, num_slots: int, results: StepResults) -> None:
        self._num_batches = num_batches
        self._num_slots = num_slots
        self._results = results

    def limit(self, slots: SlotArray, wanted: Int64Array, is_prefill: BoolArray) -> Int64Array:
        """Return `wanted` with 0 for decoding requests that must wait for their turn."""
        may_decode = (wanted > 0) & ~is_prefill
        num_batches = min(self._num_batches, int(may_decode.sum()))
        if num_batches <= 1:
            return wanted
        under_way = self._results.last_in_flight(num_batches - 1)
        is_under_way = np.zeros(self._num_slots, np.bool_)
        for step in under_way:
            is_under_way[step.sampling.slots] = True
        may_decode &= ~is_under_way[slots]
        share = -(-int(may_decode.sum()) // (num_batches - len(under_way)))
        turn = may_decode.nonzero()[0][:share]
        limited = np.where(is_prefill, wanted, 0)
        limited[turn] = wanted[turn]
        return limited
