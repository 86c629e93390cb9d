"""Attention of requests with several queries in a step: flash attention over a paged cache (Dao, 2023).

A program computes one tile of one request's queries for one key/value head. Its M rows are the queries times the heads
that share the key. It visits the keys in order, starting from the first one that any row attends to. A query therefore
sums them in the same order in a prompt and in any chunk of it.

Shapes: T tokens, N tiles, H query heads, G key/value heads, K head dimension, M rows of a tile.
"""

import triton
import triton.language as tl

from .online_softmax import attend_keys, initial_sums
from .work_list import HEADER


@triton.jit(do_not_specialize=["block_table_stride"])
def prefill_kernel(
    q_ptr,
    out_ptr,
    kv_ptr,
    list_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_table_ptr,
    kv_scales_ptr,
    alibi_slopes_ptr,
    sinks_ptr,
    visible_ptr,
    scale,
    alibi_scale,
    q_stride,
    block_table_stride,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    """Compute one tile of queries for one key/value head. Grid (N * G).

    `list` is the output of `list_tiles_kernel`: each of its entries, at most N, has a request and the first of its
    queries in the tile. q is [T, H, K] with a stride between tokens; out [T, H, K] and kv [blocks, 2, G, BLOCK_SIZE, K]
    are contiguous. `kv_scales` is float32 [2, G], or None. `alibi_slopes` and `sinks` are float32 [H], or None.
    `alibi_scale` is described at `attend_keys`.
    `visible` int32 [T, 2] is the field of `AttentionBatch`, or None. `WINDOW` is a number of tokens, or the size of a
    chunk if `NUM_CHUNKS` is not 0. Unless `IS_CAUSAL`, every query attends to all keys, and there is no window.

    If `BLOCK_R` is not 0 (latent attention), all heads share one key/value head, and each of the G programs of a tile
    computes a group of heads. Values are the first `VALUE_DIM` elements of keys: kv is [blocks, 1, 1, BLOCK_SIZE, K],
    out [T, H, VALUE_DIM]. Otherwise `VALUE_DIM` is `HEAD_DIM`.
    """
    TILE_QUERIES: tl.constexpr = TILE_ROWS // HEADS_PER_KV_HEAD
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV_HEAD
    # The grid is one-dimensional, because its other dimensions are limited to 65,535.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    if tile >= tl.load(list_ptr):
        return
    tile_ptr = list_ptr + HEADER + tile * 2
    request, first_query = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    first_token = tl.load(query_start_loc_ptr + request)
    num_queries = tl.load(query_start_loc_ptr + request + 1) - first_token
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - 1
    if IS_CAUSAL:
        first_position = seq_len - num_queries + first_query

    rows_M = tl.arange(0, TILE_ROWS)
    queries_M = rows_M // HEADS_PER_KV_HEAD
    heads_M = kv_head * HEADS_PER_KV_HEAD + rows_M % HEADS_PER_KV_HEAD
    tile_token = (first_token + first_query).to(tl.int64)
    dims_K = tl.arange(0, BLOCK_K)
    is_row_M = (queries_M < TILE_QUERIES) & (first_query + queries_M < num_queries)
    mask_MK = is_row_M[:, None] & (dims_K < VALUE_DIM)[None, :]
    q_ptrs_M1 = q_ptr + tile_token * q_stride + (queries_M * q_stride + heads_M * HEAD_DIM)[:, None]
    q_MK = tl.load(q_ptrs_M1 + dims_K[None, :], mask=mask_MK, other=0.0)
    q_MR = None
    if BLOCK_R > 0:
        dims_R = VALUE_DIM + tl.arange(0, BLOCK_R)
        mask_MR = is_row_M[:, None] & (dims_R < HEAD_DIM)[None, :]
        q_MR = tl.load(q_ptrs_M1 + dims_R[None, :], mask=mask_MR, other=0.0)

    positions_M = tl.full((TILE_ROWS,), 0, tl.int32) + first_position
    if IS_CAUSAL:
        positions_M += queries_M
    firsts_M = None
    ends_M = None
    if visible_ptr is None:
        stop = tl.minimum(first_position + TILE_QUERIES, seq_len)
    else:
        # Both increase with the rows. Rows without a query repeat the last one.
        last_query = tl.minimum(num_queries - 1, first_query + TILE_QUERIES - 1)
        tokens_M = first_token + tl.minimum(first_query + queries_M, last_query)
        firsts_M = tl.load(visible_ptr + tokens_M * 2)
        ends_M = tl.load(visible_ptr + tokens_M * 2 + 1)
        stop = tl.load(visible_ptr + (first_token + last_query) * 2 + 1)
    if WINDOW is None:
        start = 0
        all_seen = (first_position + 1) // TILE_KEYS * TILE_KEYS
    else:
        if NUM_CHUNKS:
            chunk = first_position // WINDOW + 1 - NUM_CHUNKS
            start = tl.maximum(chunk * WINDOW, 0) // TILE_KEYS * TILE_KEYS
        else:
            start = tl.maximum(first_position + 1 - WINDOW, 0)
            if visible_ptr is not None:
                start = tl.minimum(start, tl.load(visible_ptr + (first_token + first_query) * 2))
            start = start // TILE_KEYS * TILE_KEYS
        all_seen = start
    blocks_ptr = block_table_ptr + request.to(tl.int64) * block_table_stride
    CACHE_HEADS: tl.constexpr = 1 if BLOCK_R > 0 else NUM_KV_HEADS
    keys_ptr = kv_ptr if BLOCK_R > 0 else kv_ptr + kv_head * (BLOCK_SIZE * HEAD_DIM)
    if kv_scales_ptr is not None:
        scale *= tl.load(kv_scales_ptr + kv_head)
    max_M, sum_M = initial_sums(sinks_ptr, heads_M, is_row_M, scale, SOFTCAP)
    alibi_M = None
    if alibi_slopes_ptr is not None:
        alibi_M = tl.load(alibi_slopes_ptr + heads_M, mask=is_row_M, other=0.0)
    acc_MK = tl.zeros((TILE_ROWS, BLOCK_K), tl.float32)
    if WINDOW is None:
        acc_MK, max_M, sum_M = attend_keys(
            acc_MK,
            max_M,
            sum_M,
            q_MK,
            q_MR,
            positions_M,
            firsts_M,
            ends_M,
            0,
            all_seen,
            seq_len,
            blocks_ptr,
            keys_ptr,
            scale,
            alibi_M,
            alibi_scale,
            SOFTCAP,
            WINDOW,
            NUM_CHUNKS,
            False,
            CACHE_HEADS,
            HEAD_DIM,
            VALUE_DIM,
            BLOCK_SIZE,
            TILE_KEYS,
        )
    acc_MK, max_M, sum_M = attend_keys(
        acc_MK,
        max_M,
        sum_M,
        q_MK,
        q_MR,
        positions_M,
        firsts_M,
        ends_M,
        all_seen,
        stop,
        seq_len,
        blocks_ptr,
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
    tl.store(
        out_ptr
        + tile_token * (NUM_HEADS * VALUE_DIM)
        + ((queries_M * NUM_HEADS + heads_M) * VALUE_DIM)[:, None]
        + dims_K[None, :],
        out_MK.to(out_ptr.dtype.element_ty),
        mask=mask_MK,
    )
