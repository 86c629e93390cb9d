"""The tokens of a step that were accepted, as input of the models and heads that draft after it.

Shapes: S slots of a step, T tokens, E elements of a token's hidden states.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...batch import SlotArray


class ComputedRows(NamedTuple):
    """The accepted tokens that a step computed: `counts_S` of each slot, from position `begins_S`.

    The hidden states of a slot's first token are in row `rows_S` of `hidden_TE`, and those of the other tokens follow.
    `hidden_TE` is None if the model does not keep hidden states.
    """

    slots_S: SlotArray
    begins_S: SlotArray
    counts_S: SlotArray
    rows_S: SlotArray
    hidden_TE: torch.Tensor | None
