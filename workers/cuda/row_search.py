"""Finds tokens of a row of logits by rank or by cumulative weight, without sorting.

Logits are compared as integers in the same order, their *levels*; tokens of equal level rank by id. A token's weight is
an integer, as in `workers.sampling.distribution`, so sums are exact in any order and the results equal those of a sort.

Shapes: V vocabulary, N any number of candidates, D best tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

WEIGHT_SCALE = tl.constexpr(2.0**42)
LOWEST_LEVEL = tl.constexpr(-(1 << 31))
_HIGHEST_LEVEL = tl.constexpr((1 << 31) - 1)


@triton.jit
def level_of(logits):
    """Return int32 numbers in the order of the float32 logits; both zeros have the same one."""
    # Adding zero makes the negative zero positive.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return ((bits >> 31) & 0x7FFFFFFF) ^ bits


@triton.jit
def logit_of(level):
    """Return the logit of a level."""
    return (((level >> 31) & 0x7FFFFFFF) ^ level).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logits, peak, inverse_temperature, floor):
    """Return exp((logit - peak) / temperature) in units of 1 / WEIGHT_SCALE, int64; 0 below the floor."""
    weights = tl.exp((logits - peak) * inverse_temperature) * WEIGHT_SCALE
    return tl.where(logits >= floor, weights, 0.0).to(tl.int64)


@triton.jit
def random_target(uniform, total):
    """Return a uniform integer in [0, total) of a float64 in [0, 1)."""
    # The product of a number just below one may round up to the total.
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def share_of(total, top_p):
    """Return the least weight that a nucleus must hold, never more than the total."""
    return tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)


@triton.jit
def positions_of_largest(levels_N, count):
    """Return the place of each element among the `count` largest, in their order, int32 [N]; -1 for the others.

    Of equal elements the first ones count as larger.
    """
    low = tl.full((), LOWEST_LEVEL, tl.int64)
    high = tl.full((), _HIGHEST_LEVEL, tl.int64)
    for _ in range(32):
        middle = (low + high + 1) >> 1
        if tl.sum((levels_N >= middle).to(tl.int32), 0) >= count:
            low = middle
        else:
            high = middle - 1
    is_larger_N = (levels_N > low).to(tl.int32)
    is_last_N = (levels_N == low).to(tl.int32)
    num_last = count - tl.sum(is_larger_N, 0)
    is_taken_N = is_larger_N | (is_last_N & (tl.cumsum(is_last_N, 0) <= num_last).to(tl.int32))
    return tl.where(is_taken_N == 1, tl.cumsum(is_taken_N, 0) - 1, -1)


@triton.jit
def measure_of_row(
    row_ptr,
    vocab_size,
    lowest,
    peak,
    inverse_temperature,
    floor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the weight, or with `COUNTS` the number, of the tokens whose level is `lowest` or above: int64."""
    sums = tl.zeros((TILE,), tl.int64)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_above = (level_of(logits) >= lowest) & (ids < vocab_size)
        if COUNTS:
            sums += is_above.to(tl.int64)
        else:
            sums += tl.where(is_above, weight_of(logits, peak, inverse_temperature, floor), 0)
    return tl.sum(sums, 0)


@triton.jit
def level_that_exceeds(
    row_ptr,
    vocab_size,
    target,
    lowest,
    peak,
    inverse_temperature,
    floor,
    COUNTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the highest level that measures more than the target with all above it, and what those above measure.

    Both are int64. `lowest` is the level to return where no higher one does.
    """
    low = lowest.to(tl.int64)
    high = level_of(peak).to(tl.int64)
    above = tl.zeros((), tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        measure = measure_of_row(
            row_ptr, vocab_size, middle, peak, inverse_temperature, floor, COUNTS, TILE
        )
        if measure > target:
            low = middle
        else:
            high = middle - 1
            above = measure
    return low, above


@triton.jit
def nth_of_level(row_ptr, vocab_size, level, n, TILE: tl.constexpr):
    """Return the id of the token that is number `n`, from 0, of those with this level: int64."""
    found = tl.zeros((), tl.int64)
    seen = tl.zeros((), tl.int64)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_one = ((level_of(logits) == level) & (ids < vocab_size)).to(tl.int64)
        is_it = (is_one == 1) & (seen + tl.cumsum(is_one, 0) == n + 1)
        found += tl.sum(tl.where(is_it, ids, 0).to(tl.int64), 0)
        seen += tl.sum(is_one, 0)
    return found


@triton.jit
def token_at_weight(
    row_ptr, vocab_size, target, peak, inverse_temperature, floor, TILE: tl.constexpr
):
    """Return the first token, in the order of ids, with which the weight so far exceeds the target: int64."""
    found = tl.zeros((), tl.int64)
    before = tl.zeros((), tl.int64)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        weights = weight_of(logits, peak, inverse_temperature, floor)
        upto = before + tl.cumsum(weights, 0)
        is_it = (upto > target) & (upto - weights <= target)
        found += tl.sum(tl.where(is_it, ids, 0).to(tl.int64), 0)
        before += tl.sum(weights, 0)
    return found
