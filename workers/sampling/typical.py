"""Locally typical sampling, which keeps tokens that are about as surprising as the model expects the next one to be.

Meister et al., "Locally Typical Sampling" (TACL 2023). A token's surprise is -log p, and the expected surprise is the
entropy. Tokens are ranked by the distance of their surprise from the entropy. The closest ones that together have the
share `typical_p` are kept, with all tokens that are as close as the last of them, so ties need no rule.

With x = (logit - peak) / temperature, the surprise of a token minus the entropy is E[x] - x, so no logarithm of a sum
is needed. E[x] is a quotient of two integer sums, which do not depend on order, device or batch.

Shapes: S rows of the batch, R rows with a typical_p, V vocabulary.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch

from .distribution import (
    first_above,
    rank_keys,
    share,
    sort_keys,
    split_keys,
    weights_below_peak,
)

NO_WEIGHT_BELOW: Final = -30.0
"""Value of x below which a token has weight 0, since exp(-30) < 2**-42. It limits the product of x and weight."""

_CPU_TILE_ELEMENTS: Final = 1 << 17
_TILE_ELEMENTS: Final = 1 << 22
"""Number of elements that are ranked at once, which limits scratch memory on a GPU to about 200 MB."""


class TypicalRows(msgspec.Struct):
    """The rows with a typical_p, on the device. `typical_p_R` is float64."""

    rows: torch.Tensor
    inverse_temperature_R: torch.Tensor
    typical_p_R: torch.Tensor


def mask_atypical(logits_SV: torch.Tensor, typical: TypicalRows) -> None:
    """Set the logits of all tokens outside of a row's typical set to -inf, in place.

    A row whose largest logit is not finite cannot be sampled, and may be left as it is.
    """
    elements = _CPU_TILE_ELEMENTS if logits_SV.is_cpu else _TILE_ELEMENTS
    tile_rows = max(1, elements // logits_SV.shape[1])
    for rows, inverse_temperature, typical_p in zip(
        typical.rows.split(tile_rows),
        typical.inverse_temperature_R.split(tile_rows),
        typical.typical_p_R.split(tile_rows),
        strict=True,
    ):
        logits_RV = logits_SV[rows]
        logits_RV.masked_fill_(_is_atypical(logits_RV, inverse_temperature, typical_p), -torch.inf)
        logits_SV[rows] = logits_RV


def _is_atypical(
    logits_RV: torch.Tensor, inverse_temperature_R: torch.Tensor, typical_p_R: torch.Tensor
) -> torch.Tensor:
    x_RV = (logits_RV - logits_RV.amax(1, keepdim=True)).mul_(inverse_temperature_R[:, None])
    weight_RV = weights_below_peak(x_RV.clone())
    total_R = weight_RV.sum(1)
    depth_RV = x_RV.clamp(min=NO_WEIGHT_BELOW).neg_().mul_(weight_RV.to(torch.float32))
    mean_R = -(depth_RV.to(torch.int64).sum(1).double() / total_R.double()).to(torch.float32)
    distance_RV = x_RV.sub_(mean_R[:, None]).abs_()
    # The largest key belongs to the token closest to the entropy.
    ids_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    negated_RV, ids_RV = split_keys(sort_keys(rank_keys(-distance_RV, ids_V)))
    # A row of NaNs has no meaningful keys, but its ids must be valid.
    cumulative_RV = weight_RV.gather(1, ids_RV.clamp_(0, len(ids_V) - 1)).cumsum(1)
    last_R1 = first_above(cumulative_RV, share(total_R, typical_p_R) - 1)[:, None]
    return distance_RV > -negated_RV.gather(1, last_R1)
