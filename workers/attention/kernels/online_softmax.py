"""What a tile of queries sees of one request's keys, tile by tile: the heart of both attention kernels.

The scores of a row are kept as they come from the product; what turns them into powers of two, the softmax scale
times log2(e), enters where the maximum is subtracted. A tile that a row does not see leaves its sums as they are, to
the bit, so a row's result depends on its keys only, not on the rows beside it (Milakov & Gimelshein, 2018; Dao, 2023).

M rows, N keys of a tile, K head dimension, padded to a power of two.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_keys(
    acc_MK,
    max_M,
    sum_M,
    q_MK,
    positions_M,
    start,
    stop,
    seq_len,
    blocks_ptr,
    keys_ptr,
    scale,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Add the keys `start` to `stop` to the running sums of the rows.

    `start` is a multiple of `TILE_KEYS`, and of that and `BLOCK_SIZE` one is a multiple of the other. `keys_ptr` is
    the head in block 0, `blocks_ptr` the request's row of the block table. Not masked, all keys must be seen by all
    rows and `stop` be a multiple of `TILE_KEYS`.
    """
    BLOCK_K: tl.constexpr = q_MK.shape[1]
    IS_PADDED: tl.constexpr = BLOCK_K != HEAD_DIM
    VALUES: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    factor = scale * LOG2_E if SOFTCAP is None else LOG2_E
    in_tile_N = tl.arange(0, TILE_KEYS)
    dims_K = tl.arange(0, BLOCK_K)
    in_head_1K = (dims_K < HEAD_DIM)[None, :]
    in_blocks_NK = (in_tile_N % BLOCK_SIZE * HEAD_DIM)[:, None] + dims_K[None, :]
    block_ptrs_N = blocks_ptr + in_tile_N // BLOCK_SIZE
    first_key = 0
    if WINDOW is not None:
        first_key = tl.min(positions_M, 0) - WINDOW + 1
    # The blocks of a tile are read a tile ahead: a load that waits for another one cannot be.
    blocks_N = tl.load(
        block_ptrs_N + start // BLOCK_SIZE, mask=start + in_tile_N < seq_len, other=0
    )
    for tile_start in tl.range(start, stop, TILE_KEYS):
        keys_N = tile_start + in_tile_N
        row_ptrs_N = keys_ptr + blocks_N.to(tl.int64) * (2 * VALUES)
        k_ptrs_NK = (row_ptrs_N + tile_start % BLOCK_SIZE * HEAD_DIM)[:, None] + in_blocks_NK
        next_start = tile_start + TILE_KEYS
        blocks_N = tl.load(
            block_ptrs_N + next_start // BLOCK_SIZE, mask=next_start + in_tile_N < seq_len, other=0
        )
        k_NK = tl.load(k_ptrs_NK, mask=in_head_1K, other=0.0) if IS_PADDED else tl.load(k_ptrs_NK)
        scores_MN = tl.dot(q_MK, tl.trans(k_NK.to(q_MK.dtype)), input_precision="ieee")
        if SOFTCAP is not None:
            scores_MN = SOFTCAP * _tanh(scores_MN * (scale / SOFTCAP))
        if IS_MASKED:
            distance_MN = positions_M[:, None] - keys_N[None, :]
            is_seen_MN = distance_MN >= 0
            if WINDOW is not None:
                is_seen_MN &= distance_MN < WINDOW
            scores_MN = tl.where(is_seen_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1))
        # A row that has seen no key yet subtracts 0: -inf from -inf would be NaN.
        top_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if IS_MASKED else new_max_M
        # One rounding, so that no compiler has a choice of its own in either loop.
        weights_MN = tl.exp2(tl.fma(scores_MN, factor, -(top_M * factor)[:, None]))
        rescale_M = tl.exp2((max_M - top_M) * factor)
        sum_M = sum_M * rescale_M + tl.sum(weights_MN, 1)
        # Past the sequence a block has what its last request left; before the window it may be another request's
        # already. And 0 * NaN is not 0.
        if IS_MASKED:
            is_own_N = (keys_N >= first_key) & (keys_N < seq_len)
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
def _tanh(x):
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
