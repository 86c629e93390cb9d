"""The choice of each token's experts as Triton kernels.

Shapes: T tokens, E experts, C experts that a token chooses, D hidden size, G groups of experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ...layers.specs.experts import SMALLEST_SUM, ExpertsSpec

_FEW_TOKENS = 32
"""Number of tokens up to which a program reads a router's rows again for each token."""

_LOGIT_ROWS, _LOGIT_COLUMNS = 2, 1024
_LARGEST_GROUP_COUNT = 16
_SOFTPLUS_LIMIT = tl.constexpr(20.0)
"""The softplus of larger numbers is the number itself, as in torch."""


@triton.jit(do_not_specialize=["num_rows", "num_columns"])
def _logits_kernel(
    x_ptr,
    x_stride,
    weight_ptr,
    out_ptr,
    num_rows,
    num_columns,
    BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Multiply one token by some rows in float32. Grid (ceil(E / BLOCK_E), T)."""
    token = tl.program_id(1).to(tl.int64)
    rows_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    mask_E = rows_E < num_rows
    total_ED = tl.zeros((BLOCK_E, BLOCK_D), tl.float32)
    for first in range(0, num_columns, BLOCK_D):
        columns_D = first + tl.arange(0, BLOCK_D)
        mask_D = columns_D < num_columns
        x_D = tl.load(x_ptr + token * x_stride + columns_D, mask=mask_D, other=0.0)
        weight_ED = tl.load(
            weight_ptr + rows_E[:, None] * num_columns + columns_D[None, :],
            mask=mask_E[:, None] & mask_D[None, :],
            other=0.0,
        )
        total_ED += weight_ED * x_D.to(tl.float32)[None, :]
    tl.store(out_ptr + token * num_rows + rows_E, tl.sum(total_ED, 1), mask=mask_E)


def router_logits(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return x @ weight.T in float32, [T, E]; `weight_ED` is float32 and contiguous."""
    if not 0 < len(x_TD) <= _FEW_TOKENS:
        return F.linear(x_TD.float(), weight_ED)
    num_rows, num_columns = weight_ED.shape
    out_TE = torch.empty((len(x_TD), num_rows), device=x_TD.device)
    _logits_kernel[triton.cdiv(num_rows, _LOGIT_ROWS), len(x_TD)](
        x_TD,
        x_TD.stride(0),
        weight_ED,
        out_TE,
        num_rows,
        num_columns,
        BLOCK_E=_LOGIT_ROWS,
        BLOCK_D=_LOGIT_COLUMNS,
    )
    return out_TE


@triton.jit
def _scores(logits_E, mask_E, SCORING: tl.constexpr):
    if SCORING == "softmax":
        exponentials_E = tl.where(mask_E, tl.exp(logits_E - tl.max(logits_E, 0)), 0.0)
        scores_E = exponentials_E / tl.sum(exponentials_E, 0)
    elif SCORING == "sigmoid":
        scores_E = 1 / (1 + tl.exp(-logits_E))
    else:
        limited_E = tl.minimum(logits_E, _SOFTPLUS_LIMIT)
        softplus_E = tl.where(logits_E > _SOFTPLUS_LIMIT, logits_E, tl.log(1 + tl.exp(limited_E)))
        scores_E = tl.sqrt(softplus_E)
    return scores_E


@triton.jit
def _within_best_groups(
    choice_E,
    experts_E,
    group_size,
    NUM_GROUPS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Replace the scores of experts outside of the best groups by minus infinity."""
    lowest = float("-inf")
    groups_G = tl.arange(0, BLOCK_G)
    scores_G = tl.full((BLOCK_G,), lowest, tl.float32)
    for group in tl.static_range(NUM_GROUPS):
        own_E = tl.where(experts_E // group_size == group, choice_E, lowest)
        score = tl.max(own_E, 0)
        if SUMS_TWO:
            score += tl.max(tl.where(experts_E == tl.argmax(own_E, 0), lowest, own_E), 0)
        scores_G = tl.where(groups_G == group, score, scores_G)
    is_within_E = experts_E < 0
    for _ in tl.static_range(NUM_CHOSEN):
        best = tl.argmax(scores_G, 0)
        is_within_E |= experts_E // group_size == best
        scores_G = tl.where(groups_G == best, lowest, scores_G)
    return tl.where(is_within_E, choice_E, lowest)


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    correction_ptr,
    experts_ptr,
    weights_ptr,
    num_experts,
    num_chosen,
    scale,
    smallest_sum,
    group_size,
    SCORING: tl.constexpr,
    CORRECTS_LOGITS: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_GROUPS_CHOSEN: tl.constexpr,
    SUMS_TWO: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Choose the experts of one token. Grid (T,)."""
    token = tl.program_id(0).to(tl.int64)
    lowest = float("-inf")
    experts_E = tl.arange(0, BLOCK_E)
    mask_E = experts_E < num_experts
    logits_E = tl.load(logits_ptr + token * num_experts + experts_E, mask=mask_E, other=lowest)
    if bias_ptr is not None:
        logits_E += tl.load(bias_ptr + experts_E, mask=mask_E, other=0.0)
    scores_E = _scores(logits_E, mask_E, SCORING)
    choice_E = logits_E if CORRECTS_LOGITS else scores_E
    if correction_ptr is not None:
        choice_E += tl.load(correction_ptr + experts_E, mask=mask_E, other=0.0)
    choice_E = tl.where(mask_E, choice_E, lowest)
    if NUM_GROUPS > 1:
        choice_E = _within_best_groups(
            choice_E, experts_E, group_size, NUM_GROUPS, NUM_GROUPS_CHOSEN, SUMS_TWO, BLOCK_G
        )
    choices_C = tl.arange(0, BLOCK_C)
    chosen_C = tl.zeros((BLOCK_C,), tl.int64)
    weights_C = tl.zeros((BLOCK_C,), tl.float32)
    # Those chosen before, and the padding, lose against every number.
    left_E = mask_E
    for i in range(num_chosen):
        expert = tl.argmax(tl.where(left_E, choice_E, lowest), 0)
        left_E &= experts_E != expert
        chosen_C = tl.where(choices_C == i, expert.to(tl.int64), chosen_C)
        weight = tl.sum(tl.where(experts_E == expert, scores_E, 0.0), 0)
        weights_C = tl.where(choices_C == i, weight, weights_C)
    if RENORMALIZES:
        weights_C = weights_C / (tl.sum(weights_C, 0) + smallest_sum)
    mask_C = choices_C < num_chosen
    tl.store(experts_ptr + token * num_chosen + choices_C, chosen_C, mask=mask_C)
    tl.store(weights_ptr + token * num_chosen + choices_C, weights_C * scale, mask=mask_C)


def supports_choice(spec: ExpertsSpec) -> bool:
    """Return whether `choose_experts` computes the choice of this mixture."""
    is_special = (
        *(spec.num_always, spec.has_expert_scales, spec.has_stored_scale, spec.logit_softcap),
        *(spec.is_hashed, spec.second_tokens, spec.adjugate_group, spec.block_size),
        *(spec.capacity, spec.divides_choice),
    )
    return (
        not any(is_special)
        and spec.scoring != "sparse mixer"
        and spec.num_groups <= _LARGEST_GROUP_COUNT
    )


def choose_experts(
    spec: ExpertsSpec, bias_E: Tensor | None, correction_E: Tensor | None, logits_TE: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the numbers of the experts, int64 [T, C], and their weights, float32 [T, C].

    `logits_TE` is float32 and contiguous.
    """
    num_tokens, num_experts = logits_TE.shape
    shape = num_tokens, spec.num_experts_per_token
    experts_TC = torch.empty(shape, dtype=torch.int64, device=logits_TE.device)
    weights_TC = torch.empty(shape, device=logits_TE.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits_TE,
            bias_E,
            correction_E,
            experts_TC,
            weights_TC,
            num_experts,
            spec.num_experts_per_token,
            spec.scale,
            SMALLEST_SUM,
            num_experts // spec.num_groups,
            SCORING=spec.scoring,
            CORRECTS_LOGITS=spec.corrects_logits,
            RENORMALIZES=spec.renormalizes,
            NUM_GROUPS=spec.num_groups,
            NUM_GROUPS_CHOSEN=spec.num_groups_per_token,
            SUMS_TWO=spec.group_score == "best two",
            BLOCK_G=triton.next_power_of_2(spec.num_groups),
            BLOCK_E=triton.next_power_of_2(num_experts),
            BLOCK_C=triton.next_power_of_2(spec.num_experts_per_token),
        )
    return experts_TC, weights_TC
