"""What a step has computed, as the models and heads that draft read it, and plans of their own steps.

Shapes: S slots of a step, T tokens, E elements of the hidden states of a token.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from ....protocol.arrays import Int32Array, Int64Array
from ...batch import StepPlan

SlotArray: TypeAlias = Int32Array | Int64Array


class ComputedRows(NamedTuple):
    """The tokens that a step computed for good: `counts_S` of each slot, from position `begins_S`.

    The hidden states of the first one are in row `rows_S` of `hidden_TE`, and the others follow. `hidden_TE` is None if
    the model does not keep its hidden states.
    """

    slots_S: SlotArray
    begins_S: SlotArray
    counts_S: SlotArray
    rows_S: SlotArray
    hidden_TE: torch.Tensor | None


def plan_chunks(slots_S: SlotArray, begins_S: SlotArray, counts_S: SlotArray) -> StepPlan:
    """Return the plan of a step that computes `counts_S` tokens of each slot, from `begins_S`."""
    query_start_loc = np.concatenate(([0], np.cumsum(counts_S))).astype(np.int32)
    first_S = begins_S - query_start_loc[:-1]
    positions_T = np.arange(query_start_loc[-1]) + np.repeat(first_S, counts_S)
    slots_32 = slots_S.astype(np.int32)
    return StepPlan(
        slots_32,
        begins_S.astype(np.int32),
        (begins_S + counts_S).astype(np.int32),
        query_start_loc,
        np.repeat(slots_32, counts_S),
        positions_T.astype(np.int32),
        sampling_rows=np.arange(len(slots_S), dtype=np.int32),
    )
