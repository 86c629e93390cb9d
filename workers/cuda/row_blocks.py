"""The largest logit and the weight of each block of neighboring tokens, computed by many programs per row.

Shapes: S rows of the batch, V vocabulary, N blocks of 32 neighboring tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.metadata import RowParameters
from .row_search import weight_of

BLOCK_WIDTH = tl.constexpr(32)
_BLOCKS_AT_ONCE = 64


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
def _block_weight_kernel(
    logits_ptr,
    stride,
    block_max_ptr,
    num_blocks,
    is_greedy_ptr,
    inverse_temperature_ptr,
    top_k_ptr,
    min_p_margin_ptr,
    block_weight_ptr,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    # Only the most likely token is needed, or the total of the `top_k` best ones.
    if tl.load(is_greedy_ptr + row) | (tl.load(top_k_ptr + row) < vocab_size):
        return
    peak = tl.max(load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS), 0)
    floor = peak + tl.load(min_p_margin_ptr + row)
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    blocks_N = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    ids = blocks_N[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    weights_N = tl.sum(weight_of(logits, peak, inverse_temperature, floor), 1)
    tl.store(block_weight_ptr + row * num_blocks + blocks_N, weights_N, mask=blocks_N < num_blocks)


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


def block_weight(logits_SV: Tensor, block_max_SN: Tensor, rows: RowParameters) -> Tensor:
    """Return the total weight of each block, int64 [S, N], of rows that sample without a top-k.

    Other rows have undefined values.
    """
    num_rows, vocab_size = logits_SV.shape
    num_blocks = block_max_SN.shape[1]
    block_weight_SN = torch.empty_like(block_max_SN, dtype=torch.int64)
    _block_weight_kernel[(num_rows, triton.cdiv(num_blocks, _BLOCKS_AT_ONCE))](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        num_blocks,
        rows.is_greedy_S,
        rows.inverse_temperature_S,
        rows.top_k_S,
        rows.min_p_margin_S,
        block_weight_SN,
        vocab_size,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCKS=_BLOCKS_AT_ONCE,
    )
    return block_weight_SN
