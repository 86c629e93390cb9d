"""Sampling under top-k, top-p and min-p.

The filtered set of a row is always a prefix of its tokens in descending order. So only the largest tokens are
examined: exactly `top_k` of them, or the number that the nucleus needs.

Shapes: R rows, D depth (how many of the largest tokens are examined).
"""

from __future__ import annotations

import msgspec
import torch

from .distribution import (
    BlockedLogits,
    block_weights,
    draw,
    first_above,
    largest_keys,
    random_target,
    share,
    split_keys,
    weights,
)


class Filters(msgspec.Struct):
    """The sampling parameters of some rows, on the device.

    `top_k_R` int64 is the vocabulary size for rows without top-k. `top_p_R` is float64. `min_p_margin_R` float32 is
    temperature * log(min_p), that is, how far below the peak a logit may be; None if no row has min-p.
    """

    inverse_temperature_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor
    min_p_margin_R: torch.Tensor | None

    def rows(self, index_R: torch.Tensor) -> Filters:
        """Return the parameters of these rows."""
        return Filters(
            self.inverse_temperature_R[index_R],
            self.top_k_R[index_R],
            self.top_p_R[index_R],
            None if self.min_p_margin_R is None else self.min_p_margin_R[index_R],
        )

    def floor(self, peak_R: torch.Tensor) -> torch.Tensor | None:
        """Return the lowest logit that min-p keeps, float32 [R]."""
        return None if self.min_p_margin_R is None else peak_R + self.min_p_margin_R


def sample_unfiltered(x: BlockedLogits, filters: Filters, uniform_R: torch.Tensor) -> torch.Tensor:
    """Sample rows with neither top-k nor top-p, int64 [R]."""
    return draw(x, filters.inverse_temperature_R, filters.floor(x.peak_R), uniform_R)


def sample_top_k(
    x: BlockedLogits, filters: Filters, depth: int, uniform_R: torch.Tensor
) -> torch.Tensor:
    """Sample rows whose top-k is at most `depth`, and which may have a top-p as well. Return int64 [R]."""
    prefix = _Prefix.from_logits(x, filters, depth)
    # top-p applies to the total weight that top-k and min-p leave.
    return prefix.sample(prefix.within(prefix.total(), filters.top_p_R), uniform_R)


def sample_top_p(
    x: BlockedLogits, filters: Filters, depth: int, uniform_R: torch.Tensor
) -> torch.Tensor:
    """Sample rows with a top-p and no top-k, int64 [R]. Most nuclei contain at most `depth` tokens."""
    sums_RN = block_weights(x, filters.inverse_temperature_R, filters.floor(x.peak_R))
    total_R = sums_RN.sum(1)
    if not x.logits_RNW.is_cpu:
        # Checking on the host which nuclei are wider would stall the device's queue.
        return _sample_nucleus(x, filters, total_R, x.row_length, uniform_R)[0]
    tokens_R, is_whole_R = _sample_nucleus(x, filters, total_R, depth, uniform_R)
    wide = (~is_whole_R).nonzero().squeeze(1)
    for rows in torch.split(wide, x.tile_rows):
        tokens_R[rows] = _sample_nucleus(
            x.rows(rows), filters.rows(rows), total_R[rows], x.row_length, uniform_R[rows]
        )[0]
    return tokens_R


def _sample_nucleus(
    x: BlockedLogits,
    filters: Filters,
    total_R: torch.Tensor,
    depth: int,
    uniform_R: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens, int64 [R], and whether each row's nucleus has at most `depth` tokens, bool [R]."""
    prefix = _Prefix.from_logits(x, filters, depth)
    is_whole_R = prefix.cumulative_RD[:, -1] >= share(total_R, filters.top_p_R)
    tokens_R = prefix.sample(prefix.within(total_R, filters.top_p_R), uniform_R)
    return tokens_R, is_whole_R


class _Prefix(msgspec.Struct):
    """The largest tokens of each row. Top-k and min-p keep the first `length_R`."""

    ids_RD: torch.Tensor
    cumulative_RD: torch.Tensor
    length_R: torch.Tensor

    @classmethod
    def from_logits(cls, x: BlockedLogits, filters: Filters, depth: int) -> _Prefix:
        logits_RD, ids_RD = split_keys(largest_keys(x, depth))
        weight_RD = weights(logits_RD, x.peak_R, filters.inverse_temperature_R)
        length_R = filters.top_k_R.clamp(max=depth)
        floor_R = filters.floor(x.peak_R)
        if floor_R is not None:
            length_R = torch.minimum(length_R, (logits_RD >= floor_R[:, None]).sum(1))
        return cls(ids_RD, weight_RD.cumsum(1), length_R.clamp_(min=1))

    def total(self) -> torch.Tensor:
        return self._at(self.length_R)

    def within(self, total_R: torch.Tensor, top_p_R: torch.Tensor) -> torch.Tensor:
        """Return the length of the shortest prefix that has the share `top_p_R` of `total_R`, int64 [R]."""
        needed_R = share(total_R, top_p_R)
        return torch.minimum(self.length_R, first_above(self.cumulative_RD, needed_R - 1) + 1)

    def sample(self, length_R: torch.Tensor, uniform_R: torch.Tensor) -> torch.Tensor:
        """Sample from the first `length_R` tokens by inverse CDF in descending order, int64 [R]."""
        target_R = random_target(uniform_R, self._at(length_R))
        index_R = first_above(self.cumulative_RD, target_R)
        return self.ids_RD.gather(1, index_R[:, None]).squeeze(1)

    def _at(self, length_R: torch.Tensor) -> torch.Tensor:
        return self.cumulative_RD.gather(1, length_R[:, None] - 1).squeeze(1)
