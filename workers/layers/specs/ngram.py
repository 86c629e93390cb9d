"""The specification of embeddings of n-grams of tokens."""

from __future__ import annotations

from functools import cache

import msgspec

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_ID = (1 << 63) - 1


class NgramHashes(msgspec.Struct, frozen=True):
    """The constants of a table's hashes, and the number of its rows."""

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    num_rows: int


class NgramSpec(msgspec.Struct, frozen=True):
    """The embeddings of n-grams (PLE of Qwen4, Engram of DeepSeek-V4.1), which some layers add to a token's streams.

    For each length from 2 to `longest`, the last tokens have `num_heads` embeddings, all in one table of the layer.
    Hashes of the tokens choose them: a head has a prime number of rows, the next one from `smallest_head` on that no
    earlier head of any layer has. The table ends with rows that nothing uses, so that its length is a multiple of
    `divisor`. Together the embeddings of a token have `size` elements.

    `end_id` separates texts. In an n-gram, it replaces all tokens before an earlier `end_id` or before the first token.

    If `num_classes` is not 0, the classes of tokens replace them, of which tokens with similar texts have the same one.
    `end_id` then replaces tokens before the first one, but does not separate texts.

    A convolution with `taps` taps at distances of `longest` tokens follows, unless there are none.

    If there are `hashes`, one for each table, nothing is computed from `seed`, `smallest_head` and `divisor`.
    """

    longest: int
    num_heads: int
    size: int
    taps: int
    end_id: int
    seed: int = 0
    smallest_head: int = 0
    divisor: int = 1
    hashes: tuple[NgramHashes, ...] = ()
    num_classes: int = 0

    @property
    def num_all_heads(self) -> int:
        """The number of embeddings of a token in one layer."""
        return (self.longest - 1) * self.num_heads

    def head_sizes(self, table: int) -> list[int]:
        """Return the number of rows of each head in the table with this index."""
        if self.hashes:
            return list(self.hashes[table].head_sizes)
        first = table * self.num_all_heads
        return list(primes_from(self.smallest_head, first + self.num_all_heads)[first:])

    def num_rows(self, table: int) -> int:
        """Return the number of rows of the table with this index."""
        if self.hashes:
            return self.hashes[table].num_rows
        return -(-sum(self.head_sizes(table)) // self.divisor) * self.divisor

    def multipliers(self, vocab_size: int, table: int) -> list[int]:
        """Return the factors on a token and on those before it, whose products do not overflow int64."""
        if self.hashes:
            return list(self.hashes[table].multipliers)
        half = max(1, _LARGEST_ID // vocab_size // 2)
        base = self.seed + 10007 * table
        return [2 * (_mixed(base + _GOLDEN * (i + 1)) % half) + 1 for i in range(self.longest)]


class AveragedNgramSpec(msgspec.Struct, frozen=True):
    """The embeddings of n-grams that are averaged with that of the token (LongCat-Flash-Lite).

    For each length from 2 to `longest`, the last tokens have `num_heads` embeddings. Each has a table of its own, and a
    product that makes it as large as a hidden state. Table i has `smallest_table` + 2 * i rows. The row of an n-gram is
    the number with its tokens as digits, in the base of the vocabulary's size, modulo the number of rows.

    An n-gram has no tokens up to an earlier `end_id`.
    """

    longest: int
    num_heads: int
    smallest_table: int
    end_id: int

    @property
    def num_tables(self) -> int:
        """The number of embeddings of a token."""
        return (self.longest - 1) * self.num_heads

    def num_rows(self, table: int) -> int:
        """Return the number of rows of the table with this index."""
        return self.smallest_table + 2 * table


def _mixed(state: int) -> int:
    """Return the number that the generator SplitMix64 computes in this state."""
    bits = (state + _GOLDEN) & _MASK
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _MASK
    return bits ^ bits >> 31


@cache
def primes_from(smallest: int, count: int) -> tuple[int, ...]:
    """Return the first `count` primes that are not less than `smallest`."""
    primes: list[int] = []
    candidate = max(2, smallest)
    while len(primes) < count:
        if all(candidate % divisor for divisor in range(2, int(candidate**0.5) + 1)):
            primes.append(candidate)
        candidate += 1
    return tuple(primes)
