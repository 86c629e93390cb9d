"""Log-probabilities of chosen tokens and of their most likely alternatives.

Shapes: R rows, T positions of a prompt, V vocabulary, K alternatives.
"""

from __future__ import annotations

from itertools import accumulate

import msgspec
import torch
import torch.nn.functional as F

from ...protocol.arrays import Int32Array, float32_bytes, int32_bytes
from ...protocol.worker_messages import RowLogprobs
from ..device.dtypes import AnyArray, on_host
from ..device.transfers import Download
from .distribution import (
    WEIGHT_SCALE,
    BlockedLogits,
    block_weights,
    largest_keys,
    num_above,
    rank_keys,
    share,
    sort_keys,
    split_keys,
    weights,
)
from .metadata import RowParameters


class Logprobs(msgspec.Struct):
    """Log-probabilities: `token_ids` int32 [R, K + 1] (the chosen token first), `logprobs` float32 [R, K + 1].

    `ranks` int32 [R] is 1 plus the number of tokens more likely than the chosen one.
    """

    token_ids: AnyArray
    logprobs: AnyArray
    ranks: AnyArray

    def fetch(self, download: Download) -> Logprobs:
        """Start a download. Return the arrays in host memory, which are valid once the download has arrived."""
        tensors = (self.token_ids, self.logprobs, self.ranks)
        return Logprobs(*(download.copy(tensor) for tensor in tensors))

    def replace(self, is_other_R: torch.Tensor, other: Logprobs) -> Logprobs:
        """Return these rows, with those of `other` where `is_other_R` is true. All are tensors."""
        return Logprobs(
            torch.where(is_other_R[:, None], other.token_ids, self.token_ids),
            torch.where(is_other_R[:, None], other.logprobs, self.logprobs),
            torch.where(is_other_R, other.ranks, self.ranks),
        )

    def rows(
        self, slots: list[int], counts: list[int], lengths: list[int] | None = None
    ) -> list[RowLogprobs]:
        """Return one message per slot. It has one row, or `lengths[i]` rows, and `counts[i]` alternatives."""
        token_ids, logprobs, ranks = (
            on_host(array) for array in (self.token_ids, self.logprobs, self.ranks)
        )
        lengths = lengths or [1] * len(slots)
        return [
            RowLogprobs(
                slot,
                length,
                int32_bytes(token_ids[end - length : end, : count + 1]),
                float32_bytes(logprobs[end - length : end, : count + 1]),
                int32_bytes(ranks[end - length : end]),
            )
            for slot, count, length, end in zip(
                slots, counts, lengths, accumulate(lengths), strict=True
            )
        ]


def compute_logprobs(
    logits_RV: torch.Tensor,
    chosen_R: torch.Tensor,
    num_top: int,
    listed_RK: torch.Tensor | None = None,
) -> Logprobs:
    """Return log-probabilities from raw float32 logits: of `chosen_R` int64, and of the `num_top` most likely tokens.

    `listed_RK` int64 are tokens to report in place of the most likely ones, or -1. A row of NaNs gets -inf everywhere.
    """
    x = BlockedLogits.from_logits(logits_RV)
    ones_R = torch.ones_like(x.peak_R)
    total_R = block_weights(x, ones_R, None).sum(1).to(torch.float64) / WEIGHT_SCALE
    log_total_R = total_R.log()
    chosen_logit_R1 = logits_RV.gather(1, chosen_R[:, None])
    ranks_R = num_above(x, chosen_logit_R1.squeeze(1)) + 1
    logits_RK, ids_RK = split_keys(largest_keys(x, num_top))
    if listed_RK is not None:
        logits_RK, ids_RK = _insert_listed(listed_RK, logits_RV, logits_RK, ids_RK)
    ids = torch.cat([chosen_R[:, None], ids_RK], dim=1)
    logits = torch.cat([chosen_logit_R1, logits_RK], dim=1)
    logprobs = (logits - x.peak_R[:, None]) - log_total_R[:, None]
    logprobs = logprobs.to(torch.float32).nan_to_num_(nan=float("-inf"), neginf=float("-inf"))
    return Logprobs(ids.to(torch.int32), logprobs, ranks_R.to(torch.int32))


def compute_processed(
    logits_RV: torch.Tensor,
    chosen_R: torch.Tensor,
    parameters: RowParameters,
    num_top: int,
    listed_RK: torch.Tensor | None = None,
) -> Logprobs:
    """Return log-probabilities after temperature and all filters, from changed float32 logits; see `compute_logprobs`.

    Tokens that cannot be drawn get -inf, as do all tokens of a row of NaNs.
    """
    x = BlockedLogits.from_logits(logits_RV)
    places_V = torch.arange(x.row_length, device=logits_RV.device)
    keys_RV = sort_keys(rank_keys(x.logits_RNW.flatten(1), places_V))
    logits_RV, ids_RV = split_keys(keys_RV)
    weight_RV = weights(logits_RV, x.peak_R, parameters.inverse_temperature_S)
    floor_R1 = (x.peak_R + parameters.min_p_margin_S)[:, None]
    is_kept_RV = (logits_RV >= floor_R1) & (places_V < parameters.top_k_S[:, None])
    weight_RV *= is_kept_RV
    cumulative_RV = weight_RV.cumsum(1)
    needed_R = share(cumulative_RV[:, -1], parameters.top_p_S)
    weight_RV *= cumulative_RV - weight_RV < needed_R[:, None]
    weight_RV = torch.where(
        parameters.is_greedy_S[:, None], (places_V == 0).to(torch.int64), weight_RV
    )
    logprobs_RV = (weight_RV.to(torch.float64) / weight_RV.sum(1, keepdim=True)).log()
    logprobs_RV = torch.where(x.peak_R.isfinite()[:, None], logprobs_RV, float("-inf"))
    ranks_R1 = (ids_RV == chosen_R[:, None]).to(torch.int8).argmax(1, keepdim=True)
    logprobs_RK, ids_RK = logprobs_RV[:, :num_top], ids_RV[:, :num_top]
    if listed_RK is not None:
        by_token_RV = torch.empty_like(logprobs_RV).scatter_(1, ids_RV, logprobs_RV)
        logprobs_RK, ids_RK = _insert_listed(listed_RK, by_token_RV, logprobs_RK, ids_RK)
    ids = torch.cat([chosen_R[:, None], ids_RK], dim=1)
    logprobs = torch.cat([logprobs_RV.gather(1, ranks_R1), logprobs_RK], 1)
    ranks_R = ranks_R1.squeeze(1) + 1
    return Logprobs(ids.to(torch.int32), logprobs.to(torch.float32), ranks_R.to(torch.int32))


def _insert_listed(
    listed_RK: torch.Tensor, values_RV: torch.Tensor, top_RK: torch.Tensor, ids_RK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values and ids of the most likely tokens, with those of the listed tokens in their columns."""
    missing = listed_RK.shape[1] - ids_RK.shape[1]
    is_listed_RK = listed_RK >= 0
    listed_values_RK = values_RV.gather(1, listed_RK.clamp(0))
    return (
        torch.where(is_listed_RK, listed_values_RK, F.pad(top_RK, (0, missing))),
        torch.where(is_listed_RK, listed_RK, F.pad(ids_RK, (0, missing))),
    )


def prompt_logprobs(
    slot: int,
    logits_TV: torch.Tensor,
    next_token_ids_T: torch.Tensor,
    count: int,
    listed_TK: Int32Array,
) -> RowLogprobs:
    """Return log-probabilities of consecutive prompt tokens of one request.

    `logits_TV` are the raw float32 logits at T positions, `next_token_ids_T` int64 the prompt tokens that follow
    them. `count` alternatives are reported, -1 for the whole vocabulary, and then the listed ones.
    """
    num_top = logits_TV.shape[1] if count < 0 else count
    in_place = None
    if listed_TK.shape[1]:
        columns = torch.from_numpy(listed_TK).to(logits_TV.device, torch.int64)
        in_place = F.pad(columns, (num_top, 0), value=-1)
    result = compute_logprobs(logits_TV, next_token_ids_T, num_top, in_place)
    return RowLogprobs(
        slot,
        len(logits_TV),
        int32_bytes(result.token_ids.cpu().numpy()),
        float32_bytes(result.logprobs.cpu().numpy()),
        int32_bytes(result.ranks.cpu().numpy()),
    )
