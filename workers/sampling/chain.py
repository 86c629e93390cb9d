"""Samplers that apply one after another, in the order of a request, as in llama.cpp.

Most requests need only temperature, top-k, min-p and top-p in this order, which `filters.py` applies while it chooses
the token. For all others, this module removes tokens from the logits and scales the rest before a token is drawn from
what is left.

All samplers keep the order of the tokens, so they work on logits that are sorted once. Probabilities are quotients of
integer sums, which do not depend on order, device or batch; see `distribution.py`.

Shapes: R rows with the same samplers, V vocabulary in descending order, N samplers.
"""

from __future__ import annotations

import math
import sys
from enum import IntEnum
from typing import Final, NamedTuple

import msgspec
import torch

from ...protocol.sampling_params import SamplingParams
from .distribution import (
    WEIGHT_SCALE,
    first_above,
    rank_keys,
    share,
    sort_keys,
    split_keys,
    weights_below_peak,
)

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperature below which only the most likely token has a nonzero weight, so that sampling is greedy."""

NO_WEIGHT_BELOW: Final = -30.0
"""Difference to the largest logit below which a token has weight 0, since exp(-30) < 2**-42."""

_SIGMA_SCALE: Final = 4096.0
"""Deviations of logits are summed up as integers of this unit."""
_FARTHEST: Final = 1000.0
"""Larger distances from the largest logit count as this one, so that the sum of squares fits into an int64."""

_CPU_TILE_ELEMENTS: Final = 1 << 17
_TILE_ELEMENTS: Final = 1 << 22
"""Number of elements that are sorted at once, which limits scratch memory on a GPU to about 200 MB."""


class Kind(IntEnum):
    """The samplers, with their numbers in `csrc/sampling/sampler_chain.h`."""

    TEMPERATURE = 0
    TOP_K = 1
    MIN_P = 2
    TOP_P = 3
    TYPICAL = 4
    TOP_N_SIGMA = 5
    XTC = 6


_PLAIN_ORDER: Final = (Kind.TEMPERATURE, Kind.TOP_K, Kind.MIN_P, Kind.TOP_P)
_KIND_OF_NAME: Final = {
    "top_n_sigma": Kind.TOP_N_SIGMA,
    "top_k": Kind.TOP_K,
    "typ_p": Kind.TYPICAL,
    "top_p": Kind.TOP_P,
    "min_p": Kind.MIN_P,
    "xtc": Kind.XTC,
    "temperature": Kind.TEMPERATURE,
}


class ChainedSampler(NamedTuple):
    """A sampler of a request and its parameters, in the order of their names in `SamplingParams`; else 0."""

    kind: Kind
    first: float
    second: float = 0.0
    third: float = 0.0


def samplers_of(params: SamplingParams, vocab_size: int) -> list[ChainedSampler]:
    """Return the samplers with an effect, in the order in which they apply."""
    effective = {
        Kind.TEMPERATURE: ChainedSampler(
            Kind.TEMPERATURE,
            max(params.temperature, GREEDY_TEMPERATURE),
            params.dynatemp_range,
            params.dynatemp_exponent,
        )
    }
    if 0 < params.top_k < vocab_size:
        effective[Kind.TOP_K] = ChainedSampler(Kind.TOP_K, params.top_k)
    if params.min_p > 0:
        effective[Kind.MIN_P] = ChainedSampler(Kind.MIN_P, math.log(params.min_p))
    if params.top_p < 1:
        # The smallest positive top-p still keeps one token.
        effective[Kind.TOP_P] = ChainedSampler(Kind.TOP_P, max(params.top_p, sys.float_info.min))
    if params.typical_p < 1:
        effective[Kind.TYPICAL] = ChainedSampler(Kind.TYPICAL, params.typical_p)
    if params.top_n_sigma > 0:
        effective[Kind.TOP_N_SIGMA] = ChainedSampler(Kind.TOP_N_SIGMA, params.top_n_sigma)
    if params.xtc_probability > 0:
        effective[Kind.XTC] = ChainedSampler(Kind.XTC, params.xtc_probability, params.xtc_threshold)
    kinds = (_KIND_OF_NAME[name] for name in dict.fromkeys(params.sampler_order))
    return [effective[kind] for kind in kinds if kind in effective]


def is_plain(samplers: list[ChainedSampler]) -> bool:
    """Return whether the samplers can be applied while the token is chosen."""
    remaining = iter(_PLAIN_ORDER)
    return all(each.kind in remaining and not each.second for each in samplers)


class ChainRows(msgspec.Struct):
    """The rows of a batch with the same kinds of samplers, with the parameters, float64 [R, N, 3], on the device."""

    host_rows: list[int]
    rows: torch.Tensor
    kinds: tuple[Kind, ...]
    values_RN3: torch.Tensor


def apply_samplers(logits_SV: torch.Tensor, chain: ChainRows, noise_R: torch.Tensor | None) -> None:
    """Apply the samplers in place: removed tokens get -inf, and the others are scaled by the temperature.

    A row whose largest logit is not finite cannot be sampled, and may be left as it is. `noise_R` float64 are random
    numbers in [0, 1), which only `Kind.XTC` needs.
    """
    elements = _CPU_TILE_ELEMENTS if logits_SV.is_cpu else _TILE_ELEMENTS
    tile_rows = max(1, elements // logits_SV.shape[1])
    for start in range(0, len(chain.rows), tile_rows):
        tile = slice(start, start + tile_rows)
        noise = None if noise_R is None else noise_R[tile]
        rows = chain.rows[tile]
        logits_SV[rows] = _apply(logits_SV[rows], chain.kinds, chain.values_RN3[tile], noise)


def _apply(
    logits_RV: torch.Tensor,
    kinds: tuple[Kind, ...],
    values_RN3: torch.Tensor,
    noise_R: torch.Tensor | None,
) -> torch.Tensor:
    num_tokens = logits_RV.shape[1]
    ids_V = torch.arange(num_tokens, device=logits_RV.device)
    sorted_RV, ids_RV = split_keys(sort_keys(rank_keys(logits_RV, ids_V)))
    # A row of NaNs has no meaningful keys, but its ids must be valid.
    ids_RV.clamp_(0, num_tokens - 1)
    tokens = _Tokens(sorted_RV)
    for i, kind in enumerate(kinds):
        first_R1, second_R1, third_R1 = values_RN3[:, i].split(1, 1)
        match kind:
            case Kind.TEMPERATURE:
                tokens.scale(first_R1, second_R1, third_R1)
            case Kind.TOP_K:
                tokens.keep(tokens.is_kept_RV.cumsum(1) <= first_R1)
            case Kind.MIN_P:
                tokens.keep(tokens.logits_RV >= tokens.peak_R1 + first_R1.to(torch.float32))
            case Kind.TOP_P:
                tokens.keep_share(first_R1)
            case Kind.TYPICAL:
                tokens.keep_typical(first_R1)
            case Kind.TOP_N_SIGMA:
                tokens.keep_near(first_R1)
            case Kind.XTC:
                assert noise_R is not None
                tokens.exclude_top(second_R1, noise_R[:, None] < first_R1)
    return torch.full_like(logits_RV, -torch.inf).scatter_(1, ids_RV, tokens.kept_logits_RV)


class _Tokens:
    """The logits of rows, float32 in descending order, and which of them are kept."""

    def __init__(self, logits_RV: torch.Tensor) -> None:
        self.logits_RV = logits_RV
        self.is_kept_RV = logits_RV > -torch.inf

    @property
    def kept_logits_RV(self) -> torch.Tensor:
        return self.logits_RV.masked_fill(~self.is_kept_RV, -torch.inf)

    @property
    def peak_R1(self) -> torch.Tensor:
        return self.kept_logits_RV.amax(1, keepdim=True)

    def keep(self, is_kept_RV: torch.Tensor) -> None:
        self.is_kept_RV = self.is_kept_RV & is_kept_RV

    def scale(
        self, temperature_R1: torch.Tensor, range_R1: torch.Tensor, exponent_R1: torch.Tensor
    ) -> None:
        """Divide the logits by the temperature, which depends on the entropy if there is a range."""
        below_RV = self._below_peak()
        weight_RV = weights_below_peak(below_RV.clone())
        total_R1 = weight_RV.sum(1, keepdim=True).double()
        entropy_R1 = (total_R1 / WEIGHT_SCALE).log() - self._mean(below_RV, weight_RV)
        count_R1 = self.is_kept_RV.sum(1, keepdim=True)
        share_R1 = (entropy_R1 / count_R1.double().log()).clamp(0, 1)
        low_R1, high_R1 = (temperature_R1 - range_R1).clamp(min=0), temperature_R1 + range_R1
        dynamic_R1 = low_R1 + (high_R1 - low_R1) * share_R1.pow(exponent_R1)
        is_dynamic_R1 = (range_R1 > 0) & (count_R1 > 1)
        divisor_R1 = torch.where(is_dynamic_R1, dynamic_R1, temperature_R1)
        inverse_R1 = (1 / divisor_R1.clamp(min=GREEDY_TEMPERATURE)).to(torch.float32)
        self.logits_RV = below_RV * inverse_R1

    def keep_share(self, share_R1: torch.Tensor) -> None:
        """Keep the most likely tokens that together have a share of the probability."""
        weight_RV = weights_below_peak(self._below_peak())
        cumulative_RV = weight_RV.cumsum(1)
        needed_R1 = share(cumulative_RV[:, -1:], share_R1)
        self.keep(cumulative_RV - weight_RV < needed_R1)

    def keep_typical(self, share_R1: torch.Tensor) -> None:
        """Keep the tokens whose surprise is closest to the entropy, which together have a share of the probability.

        All tokens that are as close as the last of them are kept too. With x, the logit minus the largest one, the
        surprise of a token minus the entropy is E[x] - x (Meister et al., "Locally Typical Sampling", TACL 2023).
        """
        below_RV = self._below_peak()
        weight_RV = weights_below_peak(below_RV.clone())
        mean_R1 = self._mean(below_RV, weight_RV).to(torch.float32)
        distance_RV = below_RV.sub_(mean_R1).abs_()
        places_V = torch.arange(distance_RV.shape[1], device=distance_RV.device)
        # The largest key belongs to the token closest to the entropy.
        negated_RV, places_RV = split_keys(sort_keys(rank_keys(-distance_RV, places_V)))
        # A row of NaNs has no meaningful keys, but its places must be valid.
        cumulative_RV = weight_RV.gather(1, places_RV.clamp_(0, len(places_V) - 1)).cumsum(1)
        needed_R1 = share(cumulative_RV[:, -1:], share_R1)
        last_R1 = first_above(cumulative_RV, needed_R1.squeeze(1) - 1)[:, None]
        self.keep(distance_RV <= -negated_RV.gather(1, last_R1))

    def keep_near(self, sigmas_R1: torch.Tensor) -> None:
        """Keep the tokens whose logit is at most this many standard deviations below the largest one."""
        below_RV = self._below_peak().masked_fill_(~self.is_kept_RV, 0)
        scaled_RV = below_RV.clamp_(min=-_FARTHEST).mul_(_SIGMA_SCALE).to(torch.int64)
        count_R1 = self.is_kept_RV.sum(1, keepdim=True).double()
        mean_R1 = scaled_RV.sum(1, keepdim=True).double() / count_R1
        square_R1 = (scaled_RV * scaled_RV).sum(1, keepdim=True).double() / count_R1
        deviation_R1 = (square_R1 - mean_R1 * mean_R1).clamp(min=0).sqrt() / _SIGMA_SCALE
        farthest_R1 = (deviation_R1 * sigmas_R1).to(torch.float32)
        self.keep(self.logits_RV >= self.peak_R1 - farthest_R1)

    def exclude_top(self, threshold_R1: torch.Tensor, is_active_R1: torch.Tensor) -> None:
        """Remove all tokens that reach the threshold except the least likely of them, from active rows."""
        weight_RV = weights_below_peak(self._below_peak())
        needed_R1 = share(weight_RV.sum(1, keepdim=True), threshold_R1).clamp(min=1)
        reaches_RV = weight_RV >= needed_R1
        is_last_RV = reaches_RV.cumsum(1) == reaches_RV.sum(1, keepdim=True)
        self.keep(~(reaches_RV & ~is_last_RV & is_active_R1))

    def _below_peak(self) -> torch.Tensor:
        """Return each kept logit minus the largest one, and -inf for the others."""
        return (self.logits_RV - self.peak_R1).masked_fill_(~self.is_kept_RV, -torch.inf)

    @staticmethod
    def _mean(below_RV: torch.Tensor, weight_RV: torch.Tensor) -> torch.Tensor:
        """Return the expected value of `below_RV`, float64 [R, 1]."""
        depth_RV = below_RV.clamp(min=NO_WEIGHT_BELOW).neg_().mul_(weight_RV.to(torch.float32))
        depth_R1 = depth_RV.to(torch.int64).sum(1, keepdim=True).double()
        return -(depth_R1 / weight_RV.sum(1, keepdim=True).double())
