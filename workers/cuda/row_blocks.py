"""The largest logit and the weight of each block of neighboring tokens, and the weights of buckets.

Many programs per row compute them. A bucket contains the tokens whose logits are about equal; see `row_search`.

Shapes: S rows of the batch, V vocabulary, N blocks of 32 neighboring tokens, B buckets.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.metadata import RowParameters
from .row_search import (
    NUM_BUCKETS,
    bucket_of,
    last_bucket_of_top_k,
    last_bucket_of_top_p,
    weight_of,
)

BLOCK_WIDTH = tl.constexpr(32)
_BLOCKS_AT_ONCE = 64
_TILES_WEIGHED = 4


@triton.jit
def _block_max_kernel(
    logits_ptr, stride, block_max_ptr, vocab_size, num_blocks, BLOCKS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    blocks_N = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks_N[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    # A maximum would ignore NaN, so use infinity for it: both mean that the row cannot be sampled.
    logits = tl.where(logits != logits, float("inf"), logits)
    tl.store(
        block_max_ptr + row * num_blocks + blocks_N, tl.max(logits, 1), mask=blocks_N < num_blocks
    )


@triton.jit
def load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS: tl.constexpr):
    """Load the largest logit of each block in this program's row."""
    blocks_N = tl.arange(0, NUM_BLOCKS)
    row = tl.program_id(0).to(tl.int64)
    return tl.load(
        block_max_ptr + row * num_blocks + blocks_N,
        mask=blocks_N < num_blocks,
        other=float("-inf"),
    )


@triton.jit
def _weigh_kernel(
    logits_ptr,
    stride,
    block_max_ptr,
    num_blocks,
    is_greedy_ptr,
    inverse_temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_margin_ptr,
    block_weight_ptr,
    bucket_weight_ptr,
    bucket_count_ptr,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_greedy_ptr + row):
        return
    max_N = load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS)
    peak = tl.max(max_N, 0)
    if tl.abs(peak) == float("inf"):
        return
    floor = peak + tl.load(min_p_margin_ptr + row)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    has_top_k, has_top_p = top_k < vocab_size, top_p < 1
    last = tl.zeros((), tl.int32)
    if has_top_k:
        last = last_bucket_of_top_k(max_N, peak, inverse_temperature, top_k)
    elif has_top_p:
        last = last_bucket_of_top_p(vocab_size, top_p)
    beyond = tl.zeros((BLOCKS * BLOCK_WIDTH,), tl.int64)
    bucket_weight_ptr += row * NUM_BUCKETS
    bucket_count_ptr += row * NUM_BUCKETS
    start = tl.program_id(1) * TILES * BLOCKS
    for first_block in range(start, tl.minimum(start + TILES * BLOCKS, num_blocks), BLOCKS):
        ids = first_block * BLOCK_WIDTH + tl.arange(0, BLOCKS * BLOCK_WIDTH)
        logits = tl.load(
            logits_ptr + row * stride + ids, mask=ids < vocab_size, other=float("-inf")
        )
        weights = weight_of(logits, peak, inverse_temperature, floor)
        if has_top_k | has_top_p:
            buckets = bucket_of(logits, peak, inverse_temperature)
            is_within = buckets <= last
            is_weighed = is_within & (weights > 0)
            tl.atomic_add(bucket_weight_ptr + buckets, weights, is_weighed, sem="relaxed")
            if has_top_k:
                one = tl.full((BLOCKS * BLOCK_WIDTH,), 1, tl.int64)
                tl.atomic_add(bucket_count_ptr + buckets, one, is_within, sem="relaxed")
            beyond += tl.where(is_within, 0, weights)
        else:
            blocks_N = first_block + tl.arange(0, BLOCKS)
            tl.store(
                block_weight_ptr + row * num_blocks + blocks_N,
                tl.sum(weights.reshape(BLOCKS, BLOCK_WIDTH), 1),
                mask=blocks_N < num_blocks,
            )
    weight_beyond = tl.sum(beyond, 0)
    if weight_beyond > 0:
        tl.atomic_add(bucket_weight_ptr + NUM_BUCKETS - 1, weight_beyond, sem="relaxed")


@triton.jit
def load_block_weights(block_weight_ptr, num_blocks, NUM_BLOCKS: tl.constexpr):
    """Load the weight of each block in this program's row."""
    blocks_N = tl.arange(0, NUM_BLOCKS)
    row = tl.program_id(0).to(tl.int64)
    return tl.load(
        block_weight_ptr + row * num_blocks + blocks_N, mask=blocks_N < num_blocks, other=0
    )


def block_max(logits_SV: Tensor) -> Tensor:
    """Return the largest logit of each block, float32 [S, N]; infinity if one is NaN."""
    num_rows, vocab_size = logits_SV.shape
    num_blocks = triton.cdiv(vocab_size, BLOCK_WIDTH.value)
    block_max_SN = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_SV.device)
    _block_max_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS_AT_ONCE))](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        vocab_size,
        num_blocks,
        BLOCKS=_BLOCKS_AT_ONCE,
    )
    return block_max_SN


def weigh(
    logits_SV: Tensor,
    block_max_SN: Tensor,
    rows: RowParameters,
    bucket_weight_SB: Tensor,
    bucket_count_SB: Tensor,
) -> Tensor:
    """Return the weight of each block, int64 [S, N], of rows with neither top-k nor top-p.

    For rows with one of them, add the weight of each bucket to `bucket_weight_SB`. For rows with a top-k, also add the
    number of tokens to `bucket_count_SB`. Both are int64. Buckets that no search can reach are added up in the last
    one, without their numbers of tokens. Other weights of blocks are undefined.
    """
    num_rows, vocab_size = logits_SV.shape
    num_blocks = block_max_SN.shape[1]
    block_weight_SN = torch.empty_like(block_max_SN, dtype=torch.int64)
    _weigh_kernel[(num_rows, triton.cdiv(num_blocks, _TILES_WEIGHED * _BLOCKS_AT_ONCE))](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        num_blocks,
        rows.is_greedy_S,
        rows.inverse_temperature_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.min_p_margin_S,
        block_weight_SN,
        bucket_weight_SB,
        bucket_count_SB,
        vocab_size,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCKS=_BLOCKS_AT_ONCE,
        TILES=_TILES_WEIGHED,
        num_warps=8,
    )
    return block_weight_SN
