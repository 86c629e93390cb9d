"""Exact sampling from rows of logits.

A row's result depends only on that row, bit for bit, because no floats are added. A token's weight is its probability
relative to the most likely token, as an integer in units of 2**-42, so the sum of weights does not depend on order,
device or batch. For the same reason, tokens are ranked by an integer key (largest logit first, then lowest token id),
so that "the k largest" has no ties.

Shapes: R rows, V vocabulary, N blocks of W neighboring tokens (the vocabulary padded with -inf), D depth, X any number.
"""

from __future__ import annotations

from typing import Final

import msgspec
import torch
import torch.nn.functional as F

BLOCK_WIDTH: Final = 32
WEIGHT_SCALE: Final = 2.0**42
"""Weight of the most likely token. The sum of up to 2**20 weights fits into an int64."""

_MAX_INT32: Final = 0x7FFFFFFF
_LAST_ID: Final = 0xFFFFFFFF

_CPU_TILE_ELEMENTS: Final = 1 << 17
_TILE_ELEMENTS: Final = 1 << 25


class BlockedLogits(msgspec.Struct):
    """Logits in blocks.

    `block_max_RN` makes it possible to find a row's largest logits without reading all of it again.
    """

    logits_RNW: torch.Tensor
    block_max_RN: torch.Tensor
    peak_R: torch.Tensor

    @classmethod
    def from_logits(cls, logits_RV: torch.Tensor) -> BlockedLogits:
        """Divide logits, float32 [R, V], into blocks."""
        padding = -logits_RV.shape[1] % BLOCK_WIDTH
        if padding:
            logits_RV = F.pad(logits_RV, (0, padding), value=float("-inf"))
        num_rows, num_logits = logits_RV.shape
        logits_RNW = logits_RV.view(num_rows, num_logits // BLOCK_WIDTH, BLOCK_WIDTH)
        block_max_RN = logits_RNW.amax(2)
        return cls(logits_RNW, block_max_RN, block_max_RN.amax(1))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of a row."""
        return self.logits_RNW.shape[1]

    @property
    def row_length(self) -> int:
        """Length of a row with its padding."""
        return self.num_blocks * BLOCK_WIDTH

    @property
    def tile_rows(self) -> int:
        """Number of rows to process at once, which fit into the CPU cache or limit the scratch memory on a GPU."""
        elements = _CPU_TILE_ELEMENTS if self.logits_RNW.is_cpu else _TILE_ELEMENTS
        return max(1, elements // self.row_length)

    def rows(self, index_R: torch.Tensor | None) -> BlockedLogits:
        """Return only these rows; None means all of them."""
        if index_R is None:
            return self
        return BlockedLogits(
            self.logits_RNW[index_R], self.block_max_RN[index_R], self.peak_R[index_R]
        )

    def block(self, index_R: torch.Tensor) -> torch.Tensor:
        """Return one block of each row, float32 [R, W]."""
        rows_R = torch.arange(len(index_R), device=index_R.device)
        return self.logits_RNW[rows_R, index_R]


def argmax(x: BlockedLogits) -> torch.Tensor:
    """Return the most likely token of each row, the lowest id among equals, as int64 [R]."""
    block_R = x.block_max_RN.argmax(1)
    return block_R * BLOCK_WIDTH + x.block(block_R).argmax(1)


def weights(
    logits_RX: torch.Tensor, peak_R: torch.Tensor, inverse_temperature_R: torch.Tensor
) -> torch.Tensor:
    """Return exp((logit - peak) / temperature) in units of 1 / WEIGHT_SCALE, int64 [R, X]."""
    relative = logits_RX - peak_R[:, None]
    return weights_below_peak(relative.mul_(inverse_temperature_R[:, None]))


def weights_below_peak(relative_RX: torch.Tensor) -> torch.Tensor:
    """Return `weights`, given (logit - peak) / temperature, which is overwritten; int64 [R, X]."""
    return relative_RX.exp_().mul_(WEIGHT_SCALE).to(torch.int64)


def block_weights(
    x: BlockedLogits, inverse_temperature_R: torch.Tensor, floor_R: torch.Tensor | None
) -> torch.Tensor:
    """Return each block's total weight of the tokens whose logit is at least the row's floor, int64 [R, N]."""
    num_rows = len(x.logits_RNW)
    tile_rows = x.tile_rows
    scratch = torch.empty_like(x.logits_RNW[:tile_rows])
    kept = torch.empty_like(scratch)
    weight = torch.empty_like(scratch, dtype=torch.int64)
    sums_RN = torch.empty_like(x.block_max_RN, dtype=torch.int64)
    for start in range(0, num_rows, tile_rows):
        tile = slice(start, start + tile_rows)
        logits = x.logits_RNW[tile]
        relative = scratch[: len(logits)]
        torch.sub(logits, x.peak_R[tile, None, None], out=relative)
        relative.mul_(inverse_temperature_R[tile, None, None]).exp_().mul_(WEIGHT_SCALE)
        if floor_R is not None:
            # Comparing into floats and multiplying is several times as fast as masking.
            torch.ge(logits, floor_R[tile, None, None], out=kept[: len(logits)])
            relative.mul_(kept[: len(logits)])
        tile_weight = weight[: len(logits)].copy_(relative)
        torch.sum(tile_weight, 2, out=sums_RN[tile])
    return sums_RN


def num_above(x: BlockedLogits, threshold_R: torch.Tensor) -> torch.Tensor:
    """Return how many logits of each row are above its threshold, int64 [R]."""
    tile_rows = x.tile_rows
    is_above = torch.empty_like(x.logits_RNW[:tile_rows])
    counts_R = torch.empty_like(x.peak_R)
    for start in range(0, len(counts_R), tile_rows):
        tile = slice(start, start + tile_rows)
        logits = x.logits_RNW[tile]
        # Count in floats, which is exact up to 2**24 and several times as fast as counting booleans.
        torch.gt(logits, threshold_R[tile, None, None], out=is_above[: len(logits)])
        torch.sum(is_above[: len(logits)], (1, 2), out=counts_R[tile])
    return counts_R.to(torch.int64)


def draw(
    x: BlockedLogits,
    inverse_temperature_R: torch.Tensor,
    floor_R: torch.Tensor | None,
    uniform_R: torch.Tensor,
) -> torch.Tensor:
    """Sample every row by inverse CDF in vocabulary order, int64 [R]; `uniform_R` is float64 in [0, 1)."""
    sums_RN = block_weights(x, inverse_temperature_R, floor_R)
    cumulative_RN = sums_RN.cumsum(1)
    target_R = random_target(uniform_R, cumulative_RN[:, -1])
    block_R = first_above(cumulative_RN, target_R)
    before_R = (cumulative_RN - sums_RN).gather(1, block_R[:, None]).squeeze(1)
    logits_RW = x.block(block_R)
    weight_RW = weights(logits_RW, x.peak_R, inverse_temperature_R)
    if floor_R is not None:
        weight_RW.masked_fill_(logits_RW < floor_R[:, None], 0)
    inside_R = first_above(weight_RW.cumsum(1), target_R - before_R)
    return block_R * BLOCK_WIDTH + inside_R


def random_target(uniform_R: torch.Tensor, total_R: torch.Tensor) -> torch.Tensor:
    """Map uniform numbers in [0, 1) to integers in [0, total), int64 [R]."""
    # For a number just below one, the product may round up to the total.
    return torch.minimum((uniform_R * total_R).to(torch.int64), total_R - 1)


def share(total_R: torch.Tensor, share_R: torch.Tensor) -> torch.Tensor:
    """Return the smallest weight that is at least this share of the total, and at most the total, int64 [R]."""
    return torch.minimum((total_R * share_R).ceil().to(torch.int64), total_R)


def first_above(cumulative_RX: torch.Tensor, target_R: torch.Tensor) -> torch.Tensor:
    """Return the index of the first cumulative weight above the row's target, int64 [R]."""
    index = torch.searchsorted(cumulative_RX, target_R[:, None], right=True).squeeze(1)
    # A row of NaNs has no meaningful sums, but its index must be valid.
    return index.clamp_(max=cumulative_RX.shape[1] - 1)


def rank_keys(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return int64 keys that order tokens by logit, then by lower id. All keys of a row differ."""
    # Adding zero turns negative zero into zero, which equals it as a logit.
    bits = (logits + 0.0).view(torch.int32)
    ordered = (bits >> 31).bitwise_and_(_MAX_INT32).bitwise_xor_(bits)
    return ordered.to(torch.int64).bitwise_left_shift_(32).add_(_LAST_ID).sub_(ids)


def split_keys(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the float32 logits and int64 token ids of the keys."""
    ordered = (keys >> 32).to(torch.int32)
    bits = (ordered >> 31).bitwise_and_(_MAX_INT32).bitwise_xor_(ordered)
    return bits.view(torch.float32), _LAST_ID - (keys & _LAST_ID)


def largest_keys(x: BlockedLogits, depth: int) -> torch.Tensor:
    """Return the keys of the `depth` most likely tokens of each row in descending order, int64 [R, depth]."""
    num_blocks, width = x.logits_RNW.shape[1:]
    device = x.logits_RNW.device
    if depth * 2 >= num_blocks:
        ids_V = torch.arange(num_blocks * width, device=device)
        return sort_keys(rank_keys(x.logits_RNW.flatten(1), ids_V))[:, :depth]
    # The `depth` blocks with the largest maxima contain the `depth` largest tokens. Blocks are in order of ids, so
    # among equal maxima the earlier block has the better key.
    block_key_RN = rank_keys(x.block_max_RN, torch.arange(num_blocks, device=device))
    block_RD = block_key_RN.topk(depth, sorted=False).indices
    rows_R1 = torch.arange(len(block_RD), device=device)[:, None]
    ids_RDW = block_RD[:, :, None] * width + torch.arange(width, device=device)
    keys_RDW = rank_keys(x.logits_RNW[rows_R1, block_RD], ids_RDW)
    return keys_RDW.flatten(1).topk(depth).values


def sort_keys(keys_RV: torch.Tensor) -> torch.Tensor:
    """Return the keys in descending order. On the CPU, the argument is overwritten."""
    if not keys_RV.is_cpu:
        return keys_RV.sort(1, descending=True).values
    # numpy sorts plain values with vector instructions, about ten times as fast as a sort that tracks indices.
    keys_RV.numpy().sort(axis=1)
    return keys_RV.flip(1)
