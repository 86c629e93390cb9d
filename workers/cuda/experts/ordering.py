"""The order of a step's choices by expert, as one Triton kernel.

Each program compares its choices with all others, which is faster than sorting for few of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...layers.expert_order import ExpertOrder, order_by_expert

_MOST_CHOICES = 2048
"""Number of choices above which sorting is faster."""

_BLOCK, _CHUNK = 32, 128
_NO_EXPERT = tl.constexpr((1 << 31) - 1)


@triton.jit
def _order_kernel(
    expert_ptr,
    choice_ptr,
    token_ptr,
    place_ptr,
    ends_ptr,
    num_choices,
    num_experts,
    num_chosen,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Find the places of a block of choices, or the ends of a block of experts.

    Grid (ceil(A / BLOCK) + ceil(E / BLOCK),).
    """
    num_choice_blocks = tl.cdiv(num_choices, BLOCK)
    block = tl.program_id(0)
    count_B = tl.zeros((BLOCK,), tl.int32)
    if block < num_choice_blocks:
        choices_B = block * BLOCK + tl.arange(0, BLOCK)
        mask_B = choices_B < num_choices
        own_B = tl.load(expert_ptr + choices_B, mask=mask_B, other=0).to(tl.int32)
        for first in range(0, num_choices, CHUNK):
            others_N = first + tl.arange(0, CHUNK)
            expert_N = tl.load(
                expert_ptr + others_N, mask=others_N < num_choices, other=_NO_EXPERT
            ).to(tl.int32)
            is_equal_BN = expert_N[None, :] == own_B[:, None]
            is_earlier_BN = is_equal_BN & (others_N[None, :] < choices_B[:, None])
            is_before_BN = (expert_N[None, :] < own_B[:, None]) | is_earlier_BN
            count_B += tl.sum(is_before_BN.to(tl.int32), 1)
        tl.store(place_ptr + choices_B, count_B, mask=mask_B)
        tl.store(choice_ptr + count_B, choices_B, mask=mask_B)
        tl.store(token_ptr + count_B, choices_B // num_chosen, mask=mask_B)
    else:
        experts_B = (block - num_choice_blocks) * BLOCK + tl.arange(0, BLOCK)
        for first in range(0, num_choices, CHUNK):
            others_N = first + tl.arange(0, CHUNK)
            expert_N = tl.load(
                expert_ptr + others_N, mask=others_N < num_choices, other=_NO_EXPERT
            ).to(tl.int32)
            count_B += tl.sum((expert_N[None, :] <= experts_B[:, None]).to(tl.int32), 1)
        tl.store(ends_ptr + experts_B, count_B, mask=experts_B < num_experts)


def order_choices(expert_TC: Tensor, num_experts: int) -> ExpertOrder:
    """Return the order of choices with these experts; see `order_by_expert`. All of it is int32."""
    num_choices = expert_TC.numel()
    if not 0 < num_choices <= _MOST_CHOICES:
        return order_by_expert(expert_TC, num_experts)
    sizes = (num_choices, num_choices, num_choices, num_experts)
    choice_A, token_A, place_A, ends_E = torch.empty(
        sum(sizes), dtype=torch.int32, device=expert_TC.device
    ).split(sizes)
    grid = (triton.cdiv(num_choices, _BLOCK) + triton.cdiv(num_experts, _BLOCK),)
    _order_kernel[grid](
        expert_TC.contiguous(),
        choice_A,
        token_A,
        place_A,
        ends_E,
        num_choices,
        num_experts,
        expert_TC.shape[1],
        BLOCK=_BLOCK,
        CHUNK=_CHUNK,
    )
    return ExpertOrder(choice_A, token_A, place_A, ends_E)
