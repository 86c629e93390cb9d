"""The tile sizes of the attention kernels.

They are limited by registers: a thread holds its share of the output tile [M, K] and of the scores [M, N] in float32.
They are also limited by shared memory, which holds the queries and `num_stages` tiles of keys and values. The sizes are
chosen for Hopper, whose multiprocessor has 64 Ki registers and 227 KiB of shared memory. They also fit into the 99 KiB
of smaller GPUs, where a stage takes less. They depend only on the model, never on the batch, so that a token's sums
have one order.
"""

from typing import NamedTuple

import torch

MIN_DOT_ROWS = 16
"""Minimum number of rows of a matrix product on tensor cores."""

SPLIT_KEYS = 256
"""Minimum number of keys per split of a decoding request.

Splits are longer if a step has many keys, or if a request would have more than `max_splits`.
"""

_LATENT_ROWS = {1: 32, 2: 64, 4: 16}
"""Rows of a tile of latent attention, by the number of bytes per element of the cache."""

_PROGRAMS = 132
"""Number of programs that share a sequence: one for each multiprocessor of an H100 or H200."""

PROGRAMS_OF_STEP = 8 * _PROGRAMS
"""Number of programs among which a step divides the keys of all decoding requests.

A multiprocessor runs them in several rounds, so that little of it is idle in the last one.
"""


class Tile(NamedTuple):
    """A tile of M rows (queries and the heads that share a key) by N keys, and its compiler options."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def prefill_tile(head_dim: int, heads_per_kv_head: int, dtype: torch.dtype) -> Tile:
    """Return the tile for prompts.

    More rows mean that a key is read fewer times; four warps compute 64 rows at a time.
    """
    if dtype == torch.float32:
        return _float32_tile(head_dim, heads_per_kv_head)
    rows = max(128 if head_dim <= 128 else 64, power_of_2(heads_per_kv_head))
    if head_dim <= 64:
        return Tile(rows, 64, 4, 3)
    if head_dim <= 128:
        return Tile(rows, 64, 8, 3)
    return Tile(rows, 32, 4, 2)


def batch_invariant_tile(head_dim: int, heads_per_kv_head: int, dtype: torch.dtype) -> Tile:
    """Return the tile for prompts and single queries, with the minimum number of rows for four warps."""
    tile = prefill_tile(head_dim, heads_per_kv_head, dtype)
    if dtype == torch.float32:
        return tile
    return tile._replace(rows=max(64, power_of_2(heads_per_kv_head)), num_warps=4)


def decode_tile(head_dim: int, heads_per_kv_head: int, dtype: torch.dtype) -> Tile:
    """Return the tile for decoding.

    Memory bandwidth bounds decoding, so the tile is small enough for several to run on a multiprocessor.
    """
    if dtype == torch.float32:
        return _float32_tile(head_dim, heads_per_kv_head)
    rows = max(MIN_DOT_ROWS, power_of_2(heads_per_kv_head))
    return Tile(rows, 64 if head_dim <= 128 else 32, 4, 3)


def latent_prefill_tile(dtype: torch.dtype) -> Tile:
    """Return the tile of latent attention for prompts, with as many rows as fit.

    A program sums values of up to 512 elements, which takes so many registers that a tile has few keys.
    """
    return Tile(_LATENT_ROWS[dtype.itemsize], 16, 8, 1 if dtype == torch.float32 else 2)


def latent_decode_tile(heads: int, dtype: torch.dtype) -> Tile:
    """Return the tile of latent attention for decoding with a group of heads."""
    tile = latent_prefill_tile(dtype)
    rows = max(MIN_DOT_ROWS, power_of_2(heads))
    if dtype.itemsize != 2 or rows == tile.rows:
        return tile
    return Tile(rows, 32, 4 if rows == MIN_DOT_ROWS else 8, tile.num_stages)


def heads_of_latent_tile(num_heads: int, dtype: torch.dtype) -> int:
    """Return how many heads one program of latent attention computes: the largest divisor of their number that fits."""
    most = _LATENT_ROWS[dtype.itemsize]
    return max(heads for heads in range(1, most + 1) if num_heads % heads == 0)


def max_splits(num_kv_heads: int) -> int:
    """Return the maximum number of splits, a power of two.

    The fewer heads a rank has, the more programs are needed per head to occupy the GPU.
    """
    return min(64, max(16, power_of_2(_PROGRAMS // num_kv_heads + 1) // 2))


def _float32_tile(head_dim: int, heads_per_kv_head: int) -> Tile:
    """Return the tile for float32. Tensor cores cannot multiply it exactly, so operands take registers too."""
    rows = max(MIN_DOT_ROWS, power_of_2(heads_per_kv_head))
    return Tile(rows, 32 if head_dim <= 128 else 16, 8, 2)


def power_of_2(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()
