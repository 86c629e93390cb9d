"""Attention of requests with one query in a step: split-KV flash decoding (Dao et al., 2023).

The keys of all requests are divided into splits of about equal size, so that programs end together whatever the lengths
of the sequences are. The splits of a request are summed in a tree of fixed shape.

Shapes: T tokens, S requests, H query heads, G key/value heads, K head dimension, M rows of a tile, N splits of all
requests, P splits of one.
"""

import triton
import triton.language as tl

from .online_softmax import LOG2_E, attend_keys, initial_sums
from .work_list import HEADER, first_key_of_query, keys_of_split


@triton.jit(do_not_specialize=["block_table_stride"])
def decode_kernel(
    q_ptr,
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    kv_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    list_ptr,
    kv_scales_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    scale,
    alibi_scale,
    q_stride,
    block_table_stride,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Compute an entry of the list of splits for one key/value head. Grid (G, N).

    If a request has one split, the result is written to `out` [T, H, K]; otherwise to `partial` float32 [N, H, K] and
    `log_sums` float32 [N, H] (base 2). `list` is the output of `list_splits_kernel`. The other arguments are described
    at `prefill_kernel`.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV_HEAD
    kv_head, entry = tl.program_id(0), tl.program_id(1)
    if entry >= tl.load(list_ptr):
        return
    request = tl.load(list_ptr + HEADER + entry * 2)
    split = tl.load(list_ptr + HEADER + entry * 2 + 1)
    seq_len = tl.load(seq_lens_ptr + request)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    first_key = first_key_of_query(seq_len, WINDOW, NUM_CHUNKS, TILE_KEYS)
    num_keys = seq_len - first_key
    split_keys = keys_of_split(num_keys, tl.load(list_ptr + 1), TILE_KEYS, MAX_SPLITS)

    rows_M = tl.arange(0, TILE_ROWS)
    heads_M = kv_head * HEADS_PER_KV_HEAD + rows_M
    dims_K = tl.arange(0, BLOCK_K)
    is_row_M = rows_M < HEADS_PER_KV_HEAD
    mask_MK = is_row_M[:, None] & (dims_K < VALUE_DIM)[None, :]
    q_ptrs_M1 = q_ptr + token * q_stride + (heads_M * HEAD_DIM)[:, None]
    q_MK = tl.load(q_ptrs_M1 + dims_K[None, :], mask=mask_MK, other=0.0)
    q_MR = None
    if BLOCK_R > 0:
        dims_R = VALUE_DIM + tl.arange(0, BLOCK_R)
        mask_MR = is_row_M[:, None] & (dims_R < HEAD_DIM)[None, :]
        q_MR = tl.load(q_ptrs_M1 + dims_R[None, :], mask=mask_MR, other=0.0)

    CACHE_HEADS: tl.constexpr = 1 if BLOCK_R > 0 else NUM_KV_HEADS
    keys_ptr = kv_ptr if BLOCK_R > 0 else kv_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)
    start = first_key + split * split_keys
    initial_max_M, initial_sum_M = initial_sums(sinks_ptr, heads_M, is_row_M, scale, SOFTCAP)
    if sinks_ptr is not None and split > 0:
        # The sinks are added to the first split.
        initial_max_M = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
        initial_sum_M = tl.zeros((TILE_ROWS,), tl.float32)
    alibi_M = None
    if alibi_slopes_ptr is not None:
        alibi_M = tl.load(alibi_slopes_ptr + heads_M, mask=is_row_M, other=0.0)
    acc_MK, max_M, sum_M = attend_keys(
        tl.zeros((TILE_ROWS, BLOCK_K), tl.float32),
        initial_max_M,
        initial_sum_M,
        q_MK,
        q_MR,
        tl.full((TILE_ROWS,), 0, tl.int32) + seq_len - 1,
        None,
        None,
        start,
        tl.minimum(start + split_keys, seq_len),
        seq_len,
        block_table_ptr + request.to(tl.int64) * block_table_stride,
        keys_ptr,
        scale,
        alibi_M,
        alibi_scale,
        SOFTCAP,
        WINDOW,
        NUM_CHUNKS,
        True,
        CACHE_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        BLOCK_SIZE,
        TILE_KEYS,
    )
    out_MK = acc_MK / sum_M[:, None]
    if kv_scales_ptr is not None:
        out_MK *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    if num_keys <= split_keys:
        tl.store(
            out_ptr + (token * NUM_HEADS + heads_M)[:, None] * VALUE_DIM + dims_K[None, :],
            out_MK.to(out_ptr.dtype.element_ty),
            mask=mask_MK,
        )
    else:
        parts_M = entry.to(tl.int64) * NUM_HEADS + heads_M
        tl.store(
            partial_ptr + (parts_M * VALUE_DIM)[:, None] + dims_K[None, :], out_MK, mask=mask_MK
        )
        factor = scale * LOG2_E if SOFTCAP is None else LOG2_E
        tl.store(log_sums_ptr + parts_M, max_M * factor + tl.log2(sum_M), mask=is_row_M)


@triton.jit
def combine_kernel(
    out_ptr,
    partial_ptr,
    log_sums_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    list_ptr,
    starts_ptr,
    WINDOW: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_HEADS_EACH: tl.constexpr,
):
    """Sum the splits of each request that has several. Grid (H / NUM_HEADS_EACH, S)."""
    first_head, request = tl.program_id(0) * NUM_HEADS_EACH, tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    token = tl.load(query_start_loc_ptr + request).to(tl.int64)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - token
    num_keys = seq_len - first_key_of_query(seq_len, WINDOW, NUM_CHUNKS, TILE_KEYS)
    split_keys = keys_of_split(num_keys, tl.load(list_ptr + 1), TILE_KEYS, MAX_SPLITS)
    if (num_queries != 1) | (num_keys <= split_keys):
        return
    splits_P = tl.arange(0, MAX_SPLITS)
    dims_K = tl.arange(0, BLOCK_K)
    is_split_P = splits_P < tl.cdiv(num_keys, split_keys)
    mask_PK = is_split_P[:, None] & (dims_K < HEAD_DIM)[None, :]
    entries_P = tl.load(starts_ptr + request).to(tl.int64) + splits_P
    for head in range(first_head, first_head + NUM_HEADS_EACH):
        parts_P = entries_P * NUM_HEADS + head
        log_sums_P = tl.load(log_sums_ptr + parts_P, mask=is_split_P, other=float("-inf"))
        partial_PK = tl.load(
            partial_ptr + (parts_P * HEAD_DIM)[:, None] + dims_K[None, :], mask=mask_PK, other=0.0
        )
        weights_P = tl.exp2(log_sums_P - tl.max(log_sums_P, 0))
        out_K = tl.sum(partial_PK * weights_P[:, None], 0) / tl.sum(weights_P, 0)
        tl.store(
            out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dims_K,
            out_K.to(out_ptr.dtype.element_ty),
            mask=dims_K < HEAD_DIM,
        )
