"""Choose the next token of each row of logits, like `workers.sampling.choose_tokens`.

Many programs per row find the largest logit and the weight of each block of tokens. Then one program per row chooses.

Noise and weights equal those of the torch code, and so do the choices. Only the exponential may differ between devices:
in the last bit for a likely token, and by a millionth for an unlikely one. That changes one choice in millions.

Shapes: S rows of the batch, V vocabulary, N blocks of 32 neighboring tokens, D tokens that are ranked, L tokens
of a list.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ...protocol.arrays import Int32Array
from ..device.transfers import to_device
from ..sampling.choice import NOT_A_NUMBER, NOTHING_ALLOWED
from ..sampling.metadata import SamplingMetadata
from ..sampling.random import Stream
from .row_blocks import BLOCK_WIDTH, block_max, block_weight, load_block_max, load_block_weights
from .row_search import (
    LOWEST_LEVEL,
    level_of,
    level_that_exceeds,
    logit_of,
    nth_of_level,
    positions_of_largest,
    random_target,
    share_of,
    weigh_row,
    weight_of,
)

_DEPTH = 256
"""Number of a row's best tokens that are ranked. For filters that keep more, the whole row is read several times."""

_LIST_LENGTH = 4096
"""Number of a row's tokens that one program searches without reading the row again."""

_TILE = 4096
_APPENDED = 128
_NOT_A_NUMBER = tl.constexpr(NOT_A_NUMBER)
_NOTHING_ALLOWED = tl.constexpr(NOTHING_ALLOWED)
_TOKEN_STREAM = tl.constexpr(int(Stream.TOKEN))


@triton.jit
def token_noise(seed, position):
    """Return the noise of a token, float64 in [0, 1), as `workers.sampling.random.uniforms` does."""
    zero = position.to(tl.uint32) * 0
    low, high = position.to(tl.uint32), (position.to(tl.uint64) >> 32).to(tl.uint32)
    first, second, _, _ = tl.philox(seed, low, high, zero + _TOKEN_STREAM, zero)
    bits = (first.to(tl.uint64) << 21) | (second.to(tl.uint64) >> 11)
    return bits.to(tl.float64) * (1.0 / (1 << 53))


@triton.jit
def _best_tokens(row_ptr, vocab_size, max_N, blocks_N, list_ptr, DEPTH: tl.constexpr):
    """Write the ids of the `DEPTH` best tokens to a list, in order of ids.

    They are in the blocks with the largest maxima.
    """
    place_N = positions_of_largest(level_of(max_N), DEPTH)
    tl.store(list_ptr + place_N, blocks_N, mask=place_N >= 0)
    tl.debug_barrier()
    chosen_D = tl.load(list_ptr + tl.arange(0, DEPTH))
    tl.debug_barrier()
    ids = (chosen_D[:, None] * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]).reshape(
        DEPTH * BLOCK_WIDTH
    )
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    place = positions_of_largest(level_of(logits), DEPTH)
    tl.store(list_ptr + place, ids, mask=place >= 0)
    tl.debug_barrier()


@triton.jit
def _rank_keys(row_ptr, vocab_size, ids):
    """Return logits, and keys that order tokens by logit and then by lower id."""
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    return logits, (level_of(logits).to(tl.int64) << 32) + (0x7FFFFFFF - ids)


@triton.jit
def _sample_best(
    row_ptr,
    vocab_size,
    list_ptr,
    top_k,
    top_p,
    total,
    uniform,
    peak,
    inverse_temperature,
    floor,
    DEPTH: tl.constexpr,
):
    """Return one of the listed tokens, and whether the list suffices. With a top-k, the list defines the total."""
    ids_D = tl.load(list_ptr + tl.arange(0, DEPTH))
    logits_D, keys_D = _rank_keys(row_ptr, vocab_size, ids_D)
    weights_D = weight_of(logits_D, peak, inverse_temperature, floor)
    rank_D = tl.zeros((DEPTH,), tl.int32)
    before_D = tl.zeros((DEPTH,), tl.int64)
    for start in range(0, DEPTH, 16):
        others = tl.load(list_ptr + start + tl.arange(0, 16))
        logits, keys = _rank_keys(row_ptr, vocab_size, others)
        weights = weight_of(logits, peak, inverse_temperature, floor)
        is_before = keys[None, :] > keys_D[:, None]
        rank_D += tl.sum(is_before.to(tl.int32), 1)
        before_D += tl.sum(tl.where(is_before, weights[None, :], 0), 1)
    if top_k < vocab_size:
        total = tl.sum(tl.where(rank_D < top_k, weights_D, 0), 0)
    needed = share_of(total, top_p)
    is_enough = (top_k <= DEPTH) | (tl.sum(weights_D, 0) >= needed)
    is_kept = (rank_D < top_k) & (before_D < needed)
    target = random_target(uniform, tl.sum(tl.where(is_kept, weights_D, 0), 0))
    is_it = (before_D <= target) & (target < before_D + weights_D)
    return tl.sum(tl.where(is_it, ids_D, 0).to(tl.int64), 0), is_enough


@triton.jit
def _sample_any(
    row_ptr,
    vocab_size,
    top_k,
    top_p,
    total,
    uniform,
    peak,
    inverse_temperature,
    floor,
    list_ptr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return one of the tokens that top-k and top-p keep, however many there are."""
    last = tl.full((), LOWEST_LEVEL, tl.int64)
    if top_k < vocab_size:
        last, num_above = level_that_exceeds(
            row_ptr,
            vocab_size,
            top_k - 1,
            last,
            peak,
            inverse_temperature,
            floor,
            list_ptr,
            True,
            LENGTH,
            TILE,
        )
        above, _ = weigh_row(row_ptr, vocab_size, last + 1, peak, inverse_temperature, floor, TILE)
        weight = weight_of(logit_of(last.to(tl.int32)), peak, inverse_temperature, floor)
        total = above + (top_k - num_above) * weight
    needed = share_of(total, top_p)
    last, above = level_that_exceeds(
        row_ptr,
        vocab_size,
        needed - 1,
        last,
        peak,
        inverse_temperature,
        floor,
        list_ptr,
        False,
        LENGTH,
        TILE,
    )
    weight = tl.maximum(weight_of(logit_of(last.to(tl.int32)), peak, inverse_temperature, floor), 1)
    target = random_target(uniform, above + tl.cdiv(needed - above, weight) * weight)
    level, above = level_that_exceeds(
        row_ptr,
        vocab_size,
        target,
        last,
        peak,
        inverse_temperature,
        floor,
        list_ptr,
        False,
        LENGTH,
        TILE,
    )
    weight = tl.maximum(
        weight_of(logit_of(level.to(tl.int32)), peak, inverse_temperature, floor), 1
    )
    return nth_of_level(row_ptr, vocab_size, level, (target - above) // weight, TILE)


@triton.jit
def _most_likely(row_ptr, vocab_size, max_N, peak, NUM_BLOCKS: tl.constexpr):
    """Return the first token whose logit is the row's maximum, as int32."""
    blocks_N = tl.arange(0, NUM_BLOCKS)
    block = tl.min(tl.where(max_N == peak, blocks_N, NUM_BLOCKS), 0)
    ids = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    return tl.min(tl.where(logits == peak, ids, NUM_BLOCKS * BLOCK_WIDTH), 0)


@triton.jit
def _token_at_weight(
    row_ptr,
    vocab_size,
    weights_N,
    target,
    peak,
    inverse_temperature,
    floor,
    NUM_BLOCKS: tl.constexpr,
):
    """Return the first token in order of ids with which the cumulative weight exceeds the target, as int64."""
    upto_N = tl.cumsum(weights_N, 0)
    before_N = upto_N - weights_N
    is_it_N = (upto_N > target) & (before_N <= target)
    block = tl.sum(tl.where(is_it_N, tl.arange(0, NUM_BLOCKS), 0), 0)
    before = tl.sum(tl.where(is_it_N, before_N, 0), 0)
    ids = block * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    weights = weight_of(logits, peak, inverse_temperature, floor)
    upto = before + tl.cumsum(weights, 0)
    is_it = (upto > target) & (upto - weights <= target)
    return tl.sum(tl.where(is_it, ids, 0).to(tl.int64), 0)


@triton.jit
def _choose_greedy_kernel(
    logits_ptr,
    stride,
    block_max_ptr,
    num_blocks,
    tokens_ptr,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    max_N = load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS)
    peak = tl.max(max_N, 0)
    token = tl.zeros((), tl.int64)
    if peak == float("inf"):
        token += _NOT_A_NUMBER
    elif peak == float("-inf"):
        token += _NOTHING_ALLOWED
    else:
        token += _most_likely(logits_ptr + row * stride, vocab_size, max_N, peak, NUM_BLOCKS)
    tl.store(tokens_ptr + row, token)


@triton.jit
def _choose_kernel(
    logits_ptr,
    stride,
    block_max_ptr,
    block_weight_ptr,
    num_blocks,
    lists_ptr,
    is_greedy_ptr,
    inverse_temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_margin_ptr,
    seed_ptr,
    positions_ptr,
    tokens_ptr,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
    DEPTH: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    blocks_N = tl.arange(0, NUM_BLOCKS)
    max_N = load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS)
    peak = tl.max(max_N, 0)
    token = tl.zeros((), tl.int64)
    if peak == float("inf"):
        token += _NOT_A_NUMBER
    elif peak == float("-inf"):
        token += _NOTHING_ALLOWED
    elif tl.load(is_greedy_ptr + row):
        token += _most_likely(row_ptr, vocab_size, max_N, peak, NUM_BLOCKS)
    else:
        inverse_temperature = tl.load(inverse_temperature_ptr + row)
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        floor = peak + tl.load(min_p_margin_ptr + row)
        uniform = token_noise(tl.load(seed_ptr + row), tl.load(positions_ptr + row))
        has_top_k, has_top_p = top_k < vocab_size, top_p < 1
        list_ptr = lists_ptr + row * LENGTH
        total = tl.zeros((), tl.int64)
        if not has_top_k:
            total += tl.sum(load_block_weights(block_weight_ptr, num_blocks, NUM_BLOCKS), 0)
        if has_top_k | has_top_p:
            is_enough = top_k <= DEPTH
            if is_enough | (not has_top_k):
                _best_tokens(row_ptr, vocab_size, max_N, blocks_N, list_ptr, DEPTH)
                found, is_enough = _sample_best(
                    row_ptr,
                    vocab_size,
                    list_ptr,
                    top_k,
                    top_p,
                    total,
                    uniform,
                    peak,
                    inverse_temperature,
                    floor,
                    DEPTH,
                )
                token = found
            if not is_enough:
                token = _sample_any(
                    row_ptr,
                    vocab_size,
                    top_k,
                    top_p,
                    total,
                    uniform,
                    peak,
                    inverse_temperature,
                    floor,
                    list_ptr,
                    LENGTH,
                    TILE,
                )
        else:
            token = _token_at_weight(
                row_ptr,
                vocab_size,
                load_block_weights(block_weight_ptr, num_blocks, NUM_BLOCKS),
                random_target(uniform, total),
                peak,
                inverse_temperature,
                floor,
                NUM_BLOCKS,
            )
    tl.store(tokens_ptr + row, token)


def choose_tokens(logits_SV: Tensor, metadata: SamplingMetadata, positions_S: Int32Array) -> Tensor:
    """Return each row's next token or a mark, int64 [S]; see `workers.sampling.choose_tokens`.

    `logits_SV` is float32, and its last dimension must be contiguous.
    """
    num_rows, vocab_size = logits_SV.shape
    device = logits_SV.device
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens_S
    rows = metadata.parameters
    block_max_SN = block_max(logits_SV)
    num_blocks = block_max_SN.shape[1]
    block_weight_SN = block_weight(logits_SV, block_max_SN, rows)
    lists_SL = torch.empty(num_rows, _LIST_LENGTH, dtype=torch.int32, device=device)
    _choose_kernel[(num_rows,)](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        block_weight_SN,
        num_blocks,
        lists_SL,
        rows.is_greedy_S,
        rows.inverse_temperature_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.min_p_margin_S,
        rows.seed_S,
        to_device(positions_S.astype(np.int64), device),
        tokens_S,
        vocab_size,
        NUM_BLOCKS=max(_DEPTH, triton.next_power_of_2(num_blocks)),
        DEPTH=_DEPTH,
        LENGTH=_LIST_LENGTH,
        TILE=min(_TILE, max(128, triton.next_power_of_2(vocab_size))),
        num_warps=8,
    )
    return tokens_S


def choose_greedy(logits_SV: Tensor) -> Tensor:
    """Return the most likely token of each row, as `choose_tokens` does for greedy sampling."""
    num_rows, vocab_size = logits_SV.shape
    tokens_S = torch.empty(num_rows, dtype=torch.int64, device=logits_SV.device)
    if not num_rows:
        return tokens_S
    block_max_SN = block_max(logits_SV)
    num_blocks = block_max_SN.shape[1]
    _choose_greedy_kernel[(num_rows,)](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        num_blocks,
        tokens_S,
        vocab_size,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return tokens_S


@triton.jit(do_not_specialize=["num_rows"])
def _append_kernel(token_ids_ptr, index_ptr, tokens_ptr, num_rows, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    tokens = tl.maximum(tl.load(tokens_ptr + rows, mask=mask, other=0), 0)
    after = tl.load(index_ptr + rows, mask=mask, other=0).to(tl.int64) + 1
    tl.store(token_ids_ptr + after, tokens.to(tl.int32), mask=mask)


def append_tokens(token_ids_NL: Tensor, index_S: Tensor, tokens_S: Tensor) -> None:
    """See `LayerKernels.append_tokens`."""
    num_rows = len(tokens_S)
    if num_rows:
        grid = (triton.cdiv(num_rows, _APPENDED),)
        _append_kernel[grid](token_ids_NL, index_S, tokens_S, num_rows, BLOCK=_APPENDED)
