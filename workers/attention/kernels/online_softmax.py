"""The loop over one request's keys that both attention kernels share: online softmax, tile by tile.

The softmax scale times log2(e) is applied when the maximum is subtracted; before that, scores are unscaled products. A
tile in which a row attends to no key leaves the row's sums unchanged to the bit. So a row's result depends only on its
own keys, not on other rows (Milakov & Gimelshein, 2018; Dao, 2023).

With latent attention, values are the first elements of keys. Queries and keys are then passed in two parts, these
elements and the others, each padded to its own power of two.

Shapes: M rows, N keys of a tile, K head dimension (of values), padded to a power of two, R other elements of a key.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rounded(x):
    """Round float32 numbers to bfloat16, ties to even, as float32. Triton's interpreter truncates them instead."""
    bits = x.to(tl.uint32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def attend_keys(
    acc_MK,
    max_M,
    sum_M,
    q_MK,
    q_MR,
    positions_M,
    firsts_M,
    ends_M,
    start,
    stop,
    seq_len,
    blocks_ptr,
    keys_ptr,
    scale,
    alibi_M,
    alibi_scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    IS_MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Add the keys `start` to `stop` to the running sums of the rows.

    `start` is a multiple of `TILE_KEYS`. One of `TILE_KEYS` and `BLOCK_SIZE` is a multiple of the other. `keys_ptr`
    points to the head in block 0, `blocks_ptr` to the request's row of the block table. Unless `IS_MASKED`, all rows
    must attend to all of these keys, and `stop` must be a multiple of `TILE_KEYS`. Unless `NUM_CHUNKS` is 0, `WINDOW`
    is the size of a chunk, and a row attends to the keys of this many chunks, the last of which is its own. `alibi_M`
    times the distance to a key is subtracted from scores, unless it is None. If `alibi_scale` is not None, the product
    of `alibi_M` and a key's position, rounded to bfloat16, times this factor is added instead.

    If `ends_M` is given, rows attend to the keys before it instead of those up to their own position. If `firsts_M` is
    given, they attend to keys from there on, whatever their window is.

    `q_MR` is None unless the first `VALUE_DIM` of a key's `HEAD_DIM` elements are its value.
    """
    BLOCK_K: tl.constexpr = q_MK.shape[1]
    IS_PADDED: tl.constexpr = BLOCK_K != VALUE_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    factor = scale * LOG2_E if SOFTCAP is None else LOG2_E
    in_tile_N = tl.arange(0, TILE_KEYS)
    dims_K = tl.arange(0, BLOCK_K)
    in_head_1K = (dims_K < VALUE_DIM)[None, :]
    BLOCK_STRIDE: tl.constexpr = 2 * VALUES if q_MR is None else VALUES
    if q_MR is not None:
        dims_R = VALUE_DIM + tl.arange(0, q_MR.shape[1])
        in_key_1R = (dims_R < HEAD_DIM)[None, :]
    in_blocks_NK = (in_tile_N % BLOCK_SIZE * HEAD_DIM)[:, None] + dims_K[None, :]
    block_ptrs_N = blocks_ptr + in_tile_N // BLOCK_SIZE
    first_key = 0
    if WINDOW is not None:
        if NUM_CHUNKS:
            first_key = (tl.min(positions_M, 0) // WINDOW + 1 - NUM_CHUNKS) * WINDOW
        else:
            first_key = tl.min(positions_M, 0) - WINDOW + 1
        if firsts_M is not None:
            first_key = tl.minimum(first_key, tl.min(firsts_M, 0))
    # Load the block numbers one tile ahead, because the loads of the keys depend on them.
    blocks_N = tl.load(
        block_ptrs_N + start // BLOCK_SIZE, mask=start + in_tile_N < seq_len, other=0
    )
    for tile_start in tl.range(start, stop, TILE_KEYS):
        keys_N = tile_start + in_tile_N
        row_ptrs_N = keys_ptr + blocks_N.to(tl.int64) * BLOCK_STRIDE
        k_ptrs_NK = (row_ptrs_N + tile_start % BLOCK_SIZE * HEAD_DIM)[:, None] + in_blocks_NK
        next_start = tile_start + TILE_KEYS
        blocks_N = tl.load(
            block_ptrs_N + next_start // BLOCK_SIZE, mask=next_start + in_tile_N < seq_len, other=0
        )
        # Do not load entries past the sequence, which are left over from another request, or blocks before the window,
        # which may belong to one. Their values could be NaN, and 0 * NaN is not 0.
        is_own_N = (keys_N >= first_key) & (keys_N < seq_len)
        if q_MR is not None and IS_MASKED:
            k_NK = tl.load(k_ptrs_NK, mask=is_own_N[:, None] & in_head_1K, other=0.0)
        elif IS_PADDED:
            k_NK = tl.load(k_ptrs_NK, mask=in_head_1K, other=0.0)
        else:
            k_NK = tl.load(k_ptrs_NK)
        scores_MN = tl.dot(q_MK, tl.trans(k_NK.to(q_MK.dtype)), input_precision="ieee")
        if q_MR is not None:
            r_ptrs_NR = (row_ptrs_N + (tile_start + in_tile_N) % BLOCK_SIZE * HEAD_DIM)[:, None]
            k_NR = tl.load(r_ptrs_NR + dims_R[None, :], mask=in_key_1R, other=0.0)
            scores_MN = tl.dot(
                q_MR, tl.trans(k_NR.to(q_MR.dtype)), scores_MN, input_precision="ieee"
            )
        if SOFTCAP is not None:
            scores_MN = SOFTCAP * _tanh(scores_MN * (scale / SOFTCAP))
        distance_MN = positions_M[:, None] - keys_N[None, :]
        if alibi_M is not None:
            # Without a soft cap, the scale is applied to the scores later.
            if alibi_scale is None:
                bias_MN = alibi_M[:, None] * tl.abs(distance_MN)
            else:
                keys_1N = _rounded(keys_N.to(tl.float32))[None, :]
                bias_MN = -alibi_scale * _rounded(_rounded(alibi_M)[:, None] * keys_1N)
            scores_MN -= bias_MN / scale if SOFTCAP is None else bias_MN
        if IS_MASKED:
            if WINDOW is None:
                is_seen_MN = keys_N[None, :] >= 0
            elif NUM_CHUNKS:
                chunk_M = positions_M // WINDOW + 1 - NUM_CHUNKS
                is_seen_MN = keys_N[None, :] >= (chunk_M * WINDOW)[:, None]
            else:
                is_seen_MN = distance_MN < WINDOW
            if ends_M is None:
                is_seen_MN &= distance_MN >= 0
            else:
                is_seen_MN |= keys_N[None, :] >= firsts_M[:, None]
                is_seen_MN &= keys_N[None, :] < ends_M[:, None]
            scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        # In a row without any key so far, subtract 0, because -inf minus -inf is NaN.
        top_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if IS_MASKED else new_max_M
        # An explicit fma rounds once, so that the compiler cannot round differently in the two calls of this loop.
        weights_MN = tl.exp2(tl.fma(scores_MN, factor, -(top_M * factor)[:, None]))
        rescale_M = tl.exp2((max_M - top_M) * factor)
        sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
        if q_MR is not None:
            v_NK = k_NK
        elif IS_MASKED:
            v_NK = tl.load(k_ptrs_NK + VALUES, mask=is_own_N[:, None] & in_head_1K, other=0.0)
        elif IS_PADDED:
            v_NK = tl.load(k_ptrs_NK + VALUES, mask=in_head_1K, other=0.0)
        else:
            v_NK = tl.load(k_ptrs_NK + VALUES)
        acc_MK = tl.dot(
            weights_MN.to(q_MK.dtype),
            v_NK.to(q_MK.dtype),
            acc_MK * rescale_M[:, None],
            input_precision="ieee",
        )
        max_M = new_max_M
    return acc_MK, max_M, sum_M


@triton.jit
def initial_sums(sinks_ptr, heads_M, is_row_M, scale, SOFTCAP: tl.constexpr):
    """Return the maximum and the sum of rows before their first key. They come from the sinks, if there are any."""
    if sinks_ptr is None:
        max_M = tl.full(heads_M.shape, float("-inf"), tl.float32)
        sum_M = tl.zeros(heads_M.shape, tl.float32)
    else:
        max_M = tl.load(sinks_ptr + heads_M, mask=is_row_M, other=0.0)
        max_M = max_M / scale if SOFTCAP is None else max_M
        sum_M = tl.full(heads_M.shape, 1.0, tl.float32)
    return max_M, sum_M


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
