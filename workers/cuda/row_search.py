"""Find tokens in a row of logits by rank or by cumulative weight, without sorting.

Logits are mapped to integers in the same order, their *levels*; tokens of equal level rank by id. A token's weight is
an integer, as in `workers.sampling.distribution`, so sums are exact in any order, and the results are the same as with
a sort.

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
def weigh_row(row_ptr, vocab_size, lowest, peak, inverse_temperature, floor, TILE: tl.constexpr):
    """Return the total weight and the number of the tokens with at least the level `lowest`, both int64."""
    weight_sums = tl.zeros((TILE,), tl.int64)
    counts = tl.zeros((TILE,), tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        is_above = (level_of(logits) >= lowest) & (ids < vocab_size)
        weights = weight_of(logits, peak, inverse_temperature, floor)
        weight_sums += tl.where(is_above, weights, 0)
        counts += is_above.to(tl.int32)
    return tl.sum(weight_sums, 0), tl.sum(counts, 0).to(tl.int64)


@triton.jit
def _list_between(row_ptr, vocab_size, low, high, list_ptr, TILE: tl.constexpr):
    """Write the ids of the tokens with levels from `low` to `high` to a list, in order of ids."""
    num_listed = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, TILE):
        ids = start + tl.arange(0, TILE)
        logits = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        levels = level_of(logits)
        is_listed = ((levels >= low) & (levels <= high) & (ids < vocab_size)).to(tl.int32)
        place = num_listed + tl.cumsum(is_listed, 0) - 1
        tl.store(list_ptr + place, ids, mask=is_listed == 1)
        num_listed += tl.sum(is_listed, 0)
    tl.debug_barrier()
    return num_listed


@triton.jit
def level_that_exceeds(
    row_ptr,
    vocab_size,
    target,
    lowest,
    peak,
    inverse_temperature,
    floor,
    list_ptr,
    COUNTS: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the highest level that, with all levels above it, measures more than the target.

    Also return the measure of the levels above it.

    Both are int64, and `COUNTS` says whether weight or number is measured. If there is no such level, `lowest` is
    returned.

    The whole row is read only until at most `LENGTH` tokens are between the bounds of the binary search. These are
    listed at `list_ptr`, int32 [LENGTH], and the rest of the search reads only them.
    """
    low = lowest.to(tl.int64)
    high = level_of(peak).to(tl.int64)
    above = tl.zeros((), tl.int64)
    # The number of tokens from the level `low` on, and above the level `high`.
    num_from_low = tl.zeros((), tl.int64) + vocab_size
    num_above = tl.zeros((), tl.int64)
    while (low < high) & (num_from_low - num_above > LENGTH):
        middle = (low + high + 1) >> 1
        weight, number = weigh_row(
            row_ptr, vocab_size, middle, peak, inverse_temperature, floor, TILE
        )
        measure = number if COUNTS else weight
        if measure > target:
            low = middle
            num_from_low = number
        else:
            high = middle - 1
            above = measure
            num_above = number
    if low < high:
        num_listed = _list_between(row_ptr, vocab_size, low, high, list_ptr, TILE)
        index_N = tl.arange(0, LENGTH)
        is_listed_N = index_N < num_listed
        ids_N = tl.load(list_ptr + index_N, mask=is_listed_N, other=0)
        logits_N = tl.load(row_ptr + ids_N, mask=is_listed_N, other=float("-inf"))
        levels_N = level_of(logits_N)
        if COUNTS:
            measure_N = is_listed_N.to(tl.int64)
        else:
            weights_N = weight_of(logits_N, peak, inverse_temperature, floor)
            measure_N = tl.where(is_listed_N, weights_N, 0)
        above_list = above
        while low < high:
            middle = (low + high + 1) >> 1
            measure = above_list + tl.sum(tl.where(levels_N >= middle, measure_N, 0), 0)
            if measure > target:
                low = middle
            else:
                high = middle - 1
                above = measure
        tl.debug_barrier()
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
