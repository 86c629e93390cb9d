"""Find tokens in a row of logits by rank or by cumulative weight, without sorting.

Logits are mapped to integers in the same order, their *levels*; tokens of equal level rank by id. A token's weight is
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
    """Return int32 levels, in the order of the float32 logits. Both zeros have the same level."""
    # Adding zero turns negative zero into positive zero.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return ((bits >> 31) & 0x7FFFFFFF) ^ bits


@triton.jit
def logit_of(level):
    """Return the float32 logits whose levels `level_of` returned."""
    return (((level >> 31) & 0x7FFFFFFF) ^ level).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(logits, peak, inverse_temperature, floor):
    """Return exp((logit - peak) / temperature) in units of 1 / WEIGHT_SCALE, int64; 0 below the floor."""
    weights = tl.exp((logits - peak) * inverse_temperature) * WEIGHT_SCALE
    return tl.where(logits >= floor, weights, 0.0).to(tl.int64)


@triton.jit
def random_target(uniform, total):
    """Map a float64 in [0, 1) to an integer in [0, total), uniformly."""
    # For a number just below one, the product may round up to the total.
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def share_of(total, top_p):
    """Return the minimum weight of a nucleus for `top_p`, at most the total."""
    return tl.minimum(tl.ceil(total.to(tl.float64) * top_p).to(tl.int64), total)


@triton.jit
def positions_of_largest(levels_N, count):
    """Return the rank of each element among the `count` largest, as int32 [N]; -1 for the others.

    Of equal elements, the first ones rank higher.
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
    """Return the total weight, or the number if `COUNTS`, of the tokens with at least the level `lowest`, as int64."""
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
    """Return the highest level that, with all above it, measures more than the target, and what those above measure.

    Both are int64, and `COUNTS` says whether weight or number is measured. If there is no such level, `lowest` is
    returned.
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
    """Return the id of the token with index `n` among those with this level, as int64."""
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
    """Return the first token in order of ids with which the cumulative weight exceeds the target, as int64."""
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
