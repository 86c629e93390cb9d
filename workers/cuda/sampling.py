"""Choose the next token of each row of logits, like `workers.sampling.choose_tokens`.

Many programs per row find the largest logit and add up weights of tokens. For rows with a top-k or top-p, they list
the tokens that may be the last one kept or the chosen one. Then one program per row chooses.

Noise and weights equal those of the torch code, and so do the choices. Only the exponential may differ between devices:
in the last bit for a likely token, and by a millionth for an unlikely one. That changes one choice in millions.

Shapes: S rows of the batch, V vocabulary, N blocks of 32 neighboring tokens, B buckets of about equal logits, L tokens
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
from .row_blocks import BLOCK_WIDTH, block_max, load_block_max, load_block_weights, weigh
from .row_search import (
    NUM_BUCKETS,
    bucket_of,
    find_token,
    first_bucket,
    load_cumulative,
    random_target,
    rank_keys,
    share_of,
    sum_before,
    sum_up_to,
    token_of,
    weight_of,
)

_LIST_LENGTH = 8192
"""Number of a row's tokens that can be listed. If there are more, one program reads the whole row several times."""

_NUM_BOUNDS = tl.constexpr(6)
_LISTED_FROM = 4096
_SEARCHED = 1024
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
def _bounds_kernel(
    block_max_ptr,
    bucket_weight_ptr,
    bucket_count_ptr,
    num_blocks,
    is_greedy_ptr,
    top_k_ptr,
    top_p_ptr,
    seed_ptr,
    positions_ptr,
    bounds_ptr,
    peaks_ptr,
    vocab_size,
    NUM_BLOCKS: tl.constexpr,
):
    """Find the buckets that `_sample_filtered` searches: the first and last one of each of its three searches.

    They follow from the sums of buckets, which bound the total weight, that of the nucleus, and the random target. A
    bound is -1 if there is nothing to search.
    """
    row = tl.program_id(0).to(tl.int64)
    peak = tl.max(load_block_max(block_max_ptr, num_blocks, NUM_BLOCKS), 0)
    tl.store(peaks_ptr + row, peak)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    last = tl.full((), -1, tl.int32)
    first_end, last_end = last, last
    first, final = last, last
    is_filtered = (top_k < vocab_size) | (top_p < 1)
    is_sampled = (not tl.load(is_greedy_ptr + row)) & (tl.abs(peak) < float("inf"))
    if is_filtered & is_sampled:
        upto_B = load_cumulative(bucket_weight_ptr)
        most = tl.max(upto_B, 0)
        least = most
        if top_k < vocab_size:
            bucket = first_bucket(load_cumulative(bucket_count_ptr), top_k - 1)
            least, most = sum_before(upto_B, bucket), sum_up_to(upto_B, bucket)
            last = tl.where(least < most, bucket, -1)
        needed = share_of(least, top_p)
        first_end = first_bucket(upto_B, needed - 1)
        last_end = first_bucket(upto_B, share_of(most, top_p) - 1)
        uniform = token_noise(tl.load(seed_ptr + row), tl.load(positions_ptr + row))
        first = first_bucket(upto_B, random_target(uniform, tl.maximum(needed, 1)))
        final = first_bucket(upto_B, random_target(uniform, sum_up_to(upto_B, last_end)))
    bounds_ptr += row * _NUM_BOUNDS
    tl.store(bounds_ptr, last)
    tl.store(bounds_ptr + 1, last)
    tl.store(bounds_ptr + 2, first_end)
    tl.store(bounds_ptr + 3, last_end)
    tl.store(bounds_ptr + 4, first)
    tl.store(bounds_ptr + 5, final)


@triton.jit
def _list_kernel(
    logits_ptr,
    stride,
    peaks_ptr,
    bounds_ptr,
    inverse_temperature_ptr,
    lists_ptr,
    num_listed_ptr,
    vocab_size,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """List the keys of the tokens between the bounds, in any order.

    If the list is too short, only the number of the tokens is correct.
    """
    row = tl.program_id(0).to(tl.int64)
    bounds_ptr += row * _NUM_BOUNDS
    if tl.load(bounds_ptr + 5) < 0:
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits = tl.load(logits_ptr + row * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    inverse_temperature = tl.load(inverse_temperature_ptr + row)
    buckets = bucket_of(logits, tl.load(peaks_ptr + row), inverse_temperature)
    is_listed = ids < 0
    for search in tl.static_range(0, _NUM_BOUNDS, 2):
        first, last = tl.load(bounds_ptr + search), tl.load(bounds_ptr + search + 1)
        is_listed |= (buckets >= first) & (buckets <= last)
    num_listed = tl.sum(is_listed.to(tl.int32), 0)
    if num_listed > 0:
        start = tl.atomic_add(num_listed_ptr + row, num_listed.to(tl.int64), sem="relaxed")
        place = start + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(
            lists_ptr + row * LENGTH + place,
            rank_keys(logits, ids),
            mask=is_listed & (place < LENGTH),
        )


@triton.jit
def _sample_filtered(
    row_ptr,
    vocab_size,
    bucket_weight_ptr,
    bucket_count_ptr,
    list_ptr,
    num_listed,
    top_k,
    top_p,
    uniform,
    peak,
    inverse_temperature,
    floor,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return one of the tokens that top-k and top-p keep."""
    upto_B = load_cumulative(bucket_weight_ptr)
    total = tl.max(upto_B, 0)
    if top_k < vocab_size:
        count_upto_B = load_cumulative(bucket_count_ptr)
        bucket = first_bucket(count_upto_B, top_k - 1)
        before = sum_before(upto_B, bucket)
        total = sum_up_to(upto_B, bucket)
        if before < total:
            _, weight = find_token(
                row_ptr,
                vocab_size,
                list_ptr,
                num_listed,
                bucket,
                top_k - 1 - sum_before(count_upto_B, bucket),
                peak,
                inverse_temperature,
                floor,
                True,
                LENGTH,
                TILE,
            )
            total = before + weight
    target = share_of(total, top_p) - 1
    key = tl.zeros((), tl.int64)
    # First find the last token of the nucleus, and then, with its weight, the token.
    for _ in range(2):
        bucket = first_bucket(upto_B, target)
        before = sum_before(upto_B, bucket)
        key, weight = find_token(
            row_ptr,
            vocab_size,
            list_ptr,
            num_listed,
            bucket,
            target - before,
            peak,
            inverse_temperature,
            floor,
            False,
            LENGTH,
            TILE,
        )
        target = random_target(uniform, before + weight)
    return token_of(key)


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
    bucket_weight_ptr,
    bucket_count_ptr,
    num_blocks,
    lists_ptr,
    num_listed_ptr,
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
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
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
        if (top_k < vocab_size) | (top_p < 1):
            token = _sample_filtered(
                row_ptr,
                vocab_size,
                bucket_weight_ptr,
                bucket_count_ptr,
                lists_ptr + row * LENGTH,
                tl.load(num_listed_ptr + row),
                top_k,
                top_p,
                uniform,
                peak,
                inverse_temperature,
                floor,
                LENGTH,
                TILE,
            )
        else:
            weights_N = load_block_weights(block_weight_ptr, num_blocks, NUM_BLOCKS)
            token = _token_at_weight(
                row_ptr,
                vocab_size,
                weights_N,
                random_target(uniform, tl.sum(weights_N, 0)),
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
    num_sums = num_rows * NUM_BUCKETS.value
    zeros = torch.zeros(2 * num_sums + num_rows, dtype=torch.int64, device=device)
    bucket_weight_SB, bucket_count_SB, num_listed_S = zeros.split([num_sums, num_sums, num_rows])
    block_weight_SN = weigh(logits_SV, block_max_SN, rows, bucket_weight_SB, bucket_count_SB)
    lists_SL = torch.empty(num_rows, _LIST_LENGTH, dtype=torch.int64, device=device)
    positions = to_device(positions_S.astype(np.int64), device)
    padded_blocks = triton.next_power_of_2(num_blocks)
    bounds_S6 = torch.empty(num_rows, _NUM_BOUNDS.value, dtype=torch.int32, device=device)
    peaks_S = torch.empty(num_rows, dtype=torch.float32, device=device)
    _bounds_kernel[(num_rows,)](
        block_max_SN,
        bucket_weight_SB,
        bucket_count_SB,
        num_blocks,
        rows.is_greedy_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.seed_S,
        positions,
        bounds_S6,
        peaks_S,
        vocab_size,
        NUM_BLOCKS=padded_blocks,
        num_warps=8,
    )
    _list_kernel[(num_rows, triton.cdiv(vocab_size, _LISTED_FROM))](
        logits_SV,
        logits_SV.stride(0),
        peaks_S,
        bounds_S6,
        rows.inverse_temperature_S,
        lists_SL,
        num_listed_S,
        vocab_size,
        LENGTH=_LIST_LENGTH,
        TILE=_LISTED_FROM,
        num_warps=8,
    )
    _choose_kernel[(num_rows,)](
        logits_SV,
        logits_SV.stride(0),
        block_max_SN,
        block_weight_SN,
        bucket_weight_SB,
        bucket_count_SB,
        num_blocks,
        lists_SL,
        num_listed_S,
        rows.is_greedy_S,
        rows.inverse_temperature_S,
        rows.top_k_S,
        rows.top_p_S,
        rows.min_p_margin_S,
        rows.seed_S,
        positions,
        tokens_S,
        vocab_size,
        NUM_BLOCKS=padded_blocks,
        LENGTH=_LIST_LENGTH,
        TILE=_SEARCHED,
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
