"""Find a token of a row of logits by its rank or by cumulative weight, without sorting.

Logits are mapped to integers in the same order, their *levels*; tokens of equal level rank by id. A token's weight is
an integer, as in `workers.sampling.distribution`, so sums are exact in any order, and the results are the same as with
a sort.

Tokens are divided into *buckets* by their distance from the largest logit. The sums of the buckets show which
bucket contains the token, and only the tokens of that bucket are searched.

Shapes: V vocabulary, B buckets, L listed tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

WEIGHT_SCALE = tl.constexpr(2.0**42)

NUM_BUCKETS = tl.constexpr(2048)
_BUCKETS_PER_UNIT = tl.constexpr(2047 / 29.2)
"""The last bucket starts at a distance of 29.2, at which exp(-distance) * WEIGHT_SCALE is less than 1."""

LOWEST_KEY = tl.constexpr(-0x7F800000 << 32)
"""A key below those of all tokens. Its logit is -inf."""

_HIGHEST_KEY = tl.constexpr(0x7F800000 << 32)


@triton.jit
def _level_of(logits):
    """Return int32 levels, in the order of the float32 logits. Both zeros have the same level."""
    # Adding zero turns negative zero into positive zero.
    bits = (logits + 0.0).to(tl.int32, bitcast=True)
    return ((bits >> 31) & 0x7FFFFFFF) ^ bits


@triton.jit
def rank_keys(logits, ids):
    """Return int64 keys that order tokens by logit and then by lower id. All keys of a row differ."""
    return (_level_of(logits).to(tl.int64) << 32) + (0x7FFFFFFF - ids)


@triton.jit
def _logit_of(keys):
    level = (keys >> 32).to(tl.int32)
    return (((level >> 31) & 0x7FFFFFFF) ^ level).to(tl.float32, bitcast=True)


@triton.jit
def token_of(key):
    """Return the token id of a key, int64."""
    return 0x7FFFFFFF - (key & 0xFFFFFFFF)


@triton.jit
def weight_of(logits, peak, inverse_temperature, floor):
    """Return exp((logit - peak) / temperature) in units of 1 / WEIGHT_SCALE, int64; 0 below the floor."""
    weights = tl.exp((logits - peak) * inverse_temperature) * WEIGHT_SCALE
    return tl.where(logits >= floor, weights, 0.0).to(tl.int64)


@triton.jit
def bucket_of(logits, peak, inverse_temperature):
    """Return the buckets of logits, int32. A larger logit never has a larger bucket."""
    # Each operation rounds to the nearest number, which keeps the order.
    buckets = (peak - logits) * inverse_temperature * _BUCKETS_PER_UNIT
    return tl.minimum(buckets, NUM_BUCKETS - 1.0).to(tl.int32)


@triton.jit
def last_bucket_of_top_k(max_N, peak, inverse_temperature, top_k):
    """Return a bucket, int32, such that at least `top_k` tokens are in it and those before it; the last one if none is.

    It is found from the largest logit of each block: `top_k` blocks have theirs up to this bucket.
    """
    buckets_N = bucket_of(max_N, peak, inverse_temperature)
    low, high = tl.zeros((), tl.int32), tl.full((), NUM_BUCKETS - 1, tl.int32)
    while low < high:
        middle = (low + high) >> 1
        if tl.sum((buckets_N <= middle).to(tl.int32), 0) >= top_k:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def last_bucket_of_top_p(vocab_size, top_p):
    """Return a bucket, int32, up to which the weight is at least `top_p` of the total, whatever the logits are.

    The total is at least 1, the largest weight. Tokens with a smaller weight than (1 - top_p) / V do not add up to the
    rest.
    """
    distance = tl.log(vocab_size / (1 - top_p).to(tl.float32))
    # The next bucket is a hundredth farther, which is more than the errors of the exponential and the logarithm.
    return tl.minimum(distance * _BUCKETS_PER_UNIT + 1.0, NUM_BUCKETS - 1.0).to(tl.int32)


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
def load_cumulative(sums_ptr):
    """Load the sums of this program's row, int64 [B]; return each added to those of the buckets before it."""
    offset = tl.program_id(0).to(tl.int64) * NUM_BUCKETS
    return tl.cumsum(tl.load(sums_ptr + offset + tl.arange(0, NUM_BUCKETS)), 0)


@triton.jit
def first_bucket(cumulative_B, target):
    """Return the first bucket whose cumulative sum exceeds the target, int32."""
    return tl.sum((cumulative_B <= target).to(tl.int32), 0)


@triton.jit
def sum_before(cumulative_B, bucket):
    """Return the sum of the buckets before this one, int64."""
    return tl.sum(tl.where(tl.arange(0, NUM_BUCKETS) == bucket - 1, cumulative_B, 0), 0)


@triton.jit
def sum_up_to(cumulative_B, bucket):
    """Return the sum of the buckets up to this one, int64."""
    return sum_before(cumulative_B, bucket + 1)


@triton.jit
def _load_keys(
    row_ptr, vocab_size, list_ptr, num_listed, start, LENGTH: tl.constexpr, TILE: tl.constexpr
):
    """Load keys from the list, or from the row if the list does not hold all that were to be listed."""
    index = start + tl.arange(0, TILE)
    keys = tl.full((TILE,), LOWEST_KEY, tl.int64)
    if num_listed <= LENGTH:
        keys = tl.load(list_ptr + index, mask=index < num_listed, other=LOWEST_KEY)
    else:
        logits = tl.load(row_ptr + index, mask=index < vocab_size, other=float("-inf"))
        keys = rank_keys(logits, index)
    return keys


@triton.jit
def find_token(
    row_ptr,
    vocab_size,
    list_ptr,
    num_listed,
    bucket,
    target,
    peak,
    inverse_temperature,
    floor,
    COUNTS: tl.constexpr,
    LENGTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the key of the first token of a bucket, in descending order, with which a sum exceeds the target.

    The sum is the number of tokens with `COUNTS`, and their weight without; it starts with the bucket. Also return the
    bucket's weight up to the token, int64.
    """
    number = tl.where(num_listed <= LENGTH, num_listed, vocab_size)
    lows = tl.full((TILE,), _HIGHEST_KEY, tl.int64)
    highs = tl.full((TILE,), LOWEST_KEY, tl.int64)
    for start in range(0, number, TILE):
        keys = _load_keys(row_ptr, vocab_size, list_ptr, num_listed, start, LENGTH, TILE)
        is_in = bucket_of(_logit_of(keys), peak, inverse_temperature) == bucket
        lows = tl.minimum(lows, tl.where(is_in, keys, _HIGHEST_KEY))
        highs = tl.maximum(highs, tl.where(is_in, keys, LOWEST_KEY))
    # The token is between these two, and the sums are those of the bucket's tokens above the higher one.
    low, high = tl.min(lows, 0), tl.max(highs, 0)
    weight_above = tl.zeros((), tl.int64)
    count_above = tl.zeros((), tl.int64)
    while low < high:
        # Half the sum, rounded up, without an overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        weights = tl.zeros((TILE,), tl.int64)
        counts = tl.zeros((TILE,), tl.int32)
        lows = tl.full((TILE,), _HIGHEST_KEY, tl.int64)
        highs = tl.full((TILE,), LOWEST_KEY, tl.int64)
        for start in range(0, number, TILE):
            keys = _load_keys(row_ptr, vocab_size, list_ptr, num_listed, start, LENGTH, TILE)
            is_upper = (keys >= middle) & (keys <= high)
            is_lower = (keys >= low) & (keys < middle)
            each = weight_of(_logit_of(keys), peak, inverse_temperature, floor)
            weights += tl.where(is_upper, each, 0)
            counts += is_upper.to(tl.int32)
            lows = tl.minimum(lows, tl.where(is_upper, keys, _HIGHEST_KEY))
            highs = tl.maximum(highs, tl.where(is_lower, keys, LOWEST_KEY))
        weight = weight_above + tl.sum(weights, 0)
        count = count_above + tl.sum(counts, 0)
        measure = count if COUNTS else weight
        if measure > target:
            low = tl.min(lows, 0)
        else:
            high = tl.max(highs, 0)
            weight_above = weight
            count_above = count
    return low, weight_above + weight_of(_logit_of(low), peak, inverse_temperature, floor)
