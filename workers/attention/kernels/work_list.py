"""Divides the queries and keys of a step among programs, on the device.

A captured graph has a fixed number of programs, but its requests differ in each replay. So these kernels write a list
of what each program computes. Programs past its end have nothing to do.

A list is int32: the number of its entries, the keys of a split, then two numbers for each entry.

Shapes: S requests, padded to a power of two.
"""

import triton
import triton.language as tl

HEADER = tl.constexpr(2)


@triton.jit
def first_key_of_query(seq_len, WINDOW: tl.constexpr, NUM_CHUNKS: tl.constexpr, TILE: tl.constexpr):
    """Return the first key that the last token of a sequence sees, rounded down to a tile."""
    first_key = seq_len * 0
    if WINDOW is not None:
        if NUM_CHUNKS:
            # Padding requests have no tokens.
            chunk = tl.maximum(seq_len - 1, 0) // WINDOW + 1 - NUM_CHUNKS
            first_key = tl.maximum(chunk * WINDOW, 0) // TILE * TILE
        else:
            first_key = tl.maximum(seq_len - WINDOW, 0) // TILE * TILE
    return first_key


@triton.jit
def keys_of_split(num_keys, split_keys, TILE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Return the keys of each split of a sequence: `split_keys`, or more if there would be too many splits."""
    least = tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), TILE) * TILE
    return tl.maximum(least, split_keys)


@triton.jit(do_not_specialize=["num_requests", "num_shares", "min_split_keys"])
def list_splits_kernel(
    list_ptr,
    starts_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    num_requests,
    num_shares,
    min_split_keys,
    WINDOW: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    NUM_REQUESTS: tl.constexpr,
):
    """List the splits of each request with one query: request and split. Grid (1,).

    Splits have equally many keys: an equal share of all keys among `num_shares`, but at least `min_split_keys`.
    `starts` int32 [S] are the entries before each request's.
    """
    requests_S = tl.arange(0, NUM_REQUESTS)
    mask_S = requests_S < num_requests
    seq_len_S = tl.load(seq_lens_ptr + requests_S, mask=mask_S, other=0)
    first_query_S = tl.load(query_start_loc_ptr + requests_S, mask=mask_S, other=0)
    last_query_S = tl.load(query_start_loc_ptr + requests_S + 1, mask=mask_S, other=0)
    first_key_S = first_key_of_query(seq_len_S, WINDOW, NUM_CHUNKS, TILE_KEYS)
    num_keys_S = tl.where(last_query_S - first_query_S == 1, seq_len_S - first_key_S, 0)
    share = tl.sum(num_keys_S.to(tl.int64), 0) // num_shares + 1
    split_keys = tl.maximum((tl.cdiv(share, TILE_KEYS) * TILE_KEYS).to(tl.int32), min_split_keys)
    counts_S = tl.cdiv(num_keys_S, keys_of_split(num_keys_S, split_keys, TILE_KEYS, MAX_SPLITS))
    starts_S = tl.cumsum(counts_S, 0) - counts_S
    tl.store(starts_ptr + requests_S, starts_S, mask=mask_S)
    tl.store(list_ptr, tl.sum(counts_S, 0))
    tl.store(list_ptr + 1, split_keys)
    for split in range(tl.max(counts_S, 0)):
        entry_ptrs_S = list_ptr + HEADER + (starts_S + split) * 2
        tl.store(entry_ptrs_S, requests_S, mask=split < counts_S)
        tl.store(entry_ptrs_S + 1, split + requests_S * 0, mask=split < counts_S)


@triton.jit(do_not_specialize=["num_requests"])
def list_tiles_kernel(
    list_ptr,
    query_start_loc_ptr,
    num_requests,
    FEWEST_QUERIES: tl.constexpr,
    TILE_QUERIES: tl.constexpr,
    NUM_REQUESTS: tl.constexpr,
):
    """List the tiles of each request with `FEWEST_QUERIES` or more: request and first query. Grid (1,).

    The last tile of a request comes first, because it has the most keys.
    """
    requests_S = tl.arange(0, NUM_REQUESTS)
    mask_S = requests_S < num_requests
    first_query_S = tl.load(query_start_loc_ptr + requests_S, mask=mask_S, other=0)
    last_query_S = tl.load(query_start_loc_ptr + requests_S + 1, mask=mask_S, other=0)
    num_queries_S = last_query_S - first_query_S
    counts_S = tl.where(num_queries_S >= FEWEST_QUERIES, tl.cdiv(num_queries_S, TILE_QUERIES), 0)
    starts_S = tl.cumsum(counts_S, 0) - counts_S
    tl.store(list_ptr, tl.sum(counts_S, 0))
    for tile in range(tl.max(counts_S, 0)):
        entry_ptrs_S = list_ptr + HEADER + (starts_S + tile) * 2
        tl.store(entry_ptrs_S, requests_S, mask=tile < counts_S)
        tl.store(entry_ptrs_S + 1, (counts_S - 1 - tile) * TILE_QUERIES, mask=tile < counts_S)
