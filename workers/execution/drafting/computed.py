"""The rows of a step that count, for the models and heads that draft after it.

Shapes: S slots of a step, T tokens, E elements of the hidden states of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...batch import SlotArray


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
