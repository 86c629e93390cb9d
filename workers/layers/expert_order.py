"""The order in which the choices of a step's tokens are computed: by expert.

Shapes: T tokens, D input features, C choices of a token, A = T * C choices, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOrder(NamedTuple):
    """The choices of all tokens, ordered by expert, those of one expert by token.

    Attributes:
        choice_A: The number of the choice at each place.
        token_A: The token of the choice at each place.
        place_A: The place of each choice.
        ends_E: The end of each expert's places, int32. Choices of no expert come last.
    """

    choice_A: Tensor
    token_A: Tensor
    place_A: Tensor
    ends_E: Tensor


def order_by_expert(expert_TC: Tensor, num_experts: int) -> ExpertOrder:
    """Return the order of the choices [T, C], which are numbers of experts; `num_experts` stands for no expert."""
    # Sorting takes a pass for each byte of a number.
    sorted_A, choice_A = expert_TC.flatten().to(torch.int16).sort(stable=True)
    numbers_A = torch.arange(len(choice_A), device=choice_A.device)
    place_A = torch.empty_like(choice_A).index_copy_(0, choice_A, numbers_A)
    bounds_E = torch.arange(num_experts, dtype=torch.int16, device=choice_A.device)
    ends_E = torch.searchsorted(sorted_A, bounds_E, right=True, out_int32=True)
    return ExpertOrder(choice_A, choice_A // expert_TC.shape[1], place_A, ends_E)
