from __future__ import annotations

import random

import pytest
from engine.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from engine.core.kv_cache.block_tables import BlockTables
from engine.core.kv_cache.cached_prefix import CachedPrefix
from engine.protocol.kv_cache_groups import FULL_ATTENTION


def digests(*names: str) -> list[bytes]:
    return [name.encode().ljust(32, b".") for name in names]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(num_blocks=6)


def test_3_1_the_null_block_is_never_allocated(pool):
    assert pool.num_free == 5
    assert sorted(pool.allocate_blocks(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0
    assert NULL_BLOCK == 0


def test_3_1_blocks_never_cached_are_taken_before_cached_ones(pool):
    held = pool.allocate_blocks(2)
    pool.cache_blocks(held, digests("a", "b"))
    pool.release_blocks(held)
    assert not set(pool.allocate_blocks(3)) & set(held)
    assert pool.find_cached_blocks(digests("a", "b")) == held


def test_blocks_are_described_by_their_use_and_large_caches_by_every_nth_block(pool):
    shared, used, cached = pool.allocate_blocks(3)
    pool.cache_blocks([shared, used, cached], digests("a", "b", "c"))
    pool.hold_blocks([shared], 0)
    pool.release_blocks([cached])
    described = pool.describe_blocks()
    assert [described[block - 1] for block in (shared, used, cached)] == ["s", "u", "c"]
    assert sorted(described) == [".", ".", "c", "s", "u"]
    assert pool.describe_blocks(max_cells=4) == described[::2]


def test_3_1_the_least_recently_freed_block_is_evicted_first_and_tails_before_heads(pool):
    held = pool.allocate_blocks(5)
    pool.cache_blocks(held, digests("a", "b", "c", "d", "e"))
    pool.release_blocks(held[2:])
    pool.release_blocks(held[:2])
    assert pool.allocate_blocks(3) == held[:1:-1]
    assert pool.find_cached_blocks(digests("a", "b", "c")) == held[:2]
    assert pool.allocate_blocks(1) == [held[1]]
    assert pool.find_cached_blocks(digests("a", "b")) == [held[0]]


@pytest.mark.parametrize("seed", range(6))
def test_many_blocks_are_released_and_evicted_as_if_one_by_one(seed):
    rng = random.Random(seed)
    at_once, one_by_one = BlockPool(num_blocks=400), BlockPool(num_blocks=400)
    held = at_once.allocate_blocks(300)
    assert one_by_one.allocate_blocks(300) == held
    cached = [block for block in held if rng.random() < 0.8]
    # Some blocks are copies, some belong to several requests, and some stay held.
    contents = digests(*(str(rng.randrange(280)) for _ in cached))
    shared = rng.sample(cached, 60)
    kept = rng.sample(cached, 20)
    for pool in (at_once, one_by_one):
        pool.cache_blocks(cached, contents)
        pool.hold_blocks(shared, 0)
        pool.hold_blocks(kept, 0)
    released = held + shared
    rng.shuffle(released)
    at_once.release_blocks(released)
    for block in reversed(released):
        one_by_one.release_blocks([block])
    assert at_once.num_free == one_by_one.num_free
    assert at_once.describe_blocks() == one_by_one.describe_blocks()
    # A block that is held and released again leaves a stale entry among the freed blocks.
    again = [at_once.get_cached_block(digest) for digest in rng.sample(sorted(set(contents)), 40)]
    for pool in (at_once, one_by_one):
        pool.hold_blocks(again, pool.num_free)
        pool.release_blocks(again)
    num_free = at_once.num_free
    allocated = at_once.allocate_blocks(num_free)
    assert allocated == [block for _ in allocated for block in one_by_one.allocate_blocks(1)]
    assert at_once.count_cached() == one_by_one.count_cached() == len(set(kept))


def test_3_1_blocks_of_requests_that_end_together_are_evicted_in_request_order():
    pool = BlockPool(num_blocks=7)
    tables = BlockTables(pool, FULL_ATTENTION, block_size=4, max_num_seqs=2)
    first, second = pool.allocate_blocks(3), pool.allocate_blocks(3)
    pool.cache_blocks(first + second, digests("a", "b", "c", "d", "e", "f"))
    for slot, blocks in enumerate((first, second)):
        tables.assign_tables(slot, (blocks,), CachedPrefix(0, ([],)))
    tables.free_slots([0, 1])
    assert pool.allocate_blocks(6) == first[::-1] + second[::-1]


def test_3_3_a_hit_takes_the_longest_prefix_and_reuses_free_blocks(pool):
    held = pool.allocate_blocks(3)
    pool.cache_blocks(held, digests("a", "b", "c"))
    pool.release_blocks(held)
    found = pool.find_cached_blocks(digests("a", "b", "x", "c"))
    assert found == held[:2]
    pool.hold_blocks(found, pool.count_free(found))
    assert pool.num_free == 3
    assert held[0] not in pool.allocate_blocks(3)


def test_3_3_content_computed_twice_stays_findable_when_either_block_is_freed(pool):
    first, second = pool.allocate_blocks(1), pool.allocate_blocks(1)
    pool.cache_blocks(first, digests("a"))
    pool.cache_blocks(second, digests("a"))
    pool.release_blocks(second)
    assert pool.find_cached_blocks(digests("a")) == first
    pool.release_blocks(first)
    assert pool.find_cached_blocks(digests("a")) == first
    pool.allocate_blocks(5)
    assert pool.find_cached_blocks(digests("a")) == []


def test_3_3_a_copy_is_found_after_the_first_block_is_evicted_or_freed(pool):
    first, second, third = pool.allocate_blocks(1), pool.allocate_blocks(1), pool.allocate_blocks(1)
    for blocks in (first, second, third):
        pool.cache_blocks(blocks, digests("a"))
    assert (pool.num_cached, pool.num_copies) == (1, 2)
    pool.release_blocks(first)
    # No memory is wasted on a copy that no request holds.
    assert pool.find_cached_blocks(digests("a")) == second
    assert (pool.num_free, pool.num_copies) == (3, 1)
    pool.release_blocks(third)
    pool.release_blocks(second)
    assert pool.find_cached_blocks(digests("a")) == second
    late = pool.allocate_blocks(1)
    pool.cache_blocks(late, digests("a"))
    pool.allocate_blocks(4)
    assert pool.find_cached_blocks(digests("a")) == late
    pool.release_blocks(late)
    assert pool.find_cached_blocks(digests("a")) == late
    assert pool.num_free == 1


def test_invalid_content_is_not_found_in_any_copy(pool):
    first, second = pool.allocate_blocks(1), pool.allocate_blocks(1)
    for blocks in (first, second):
        pool.cache_blocks(blocks, digests("a"))
    pool.release_blocks(first)
    pool.uncache_blocks(digests("a"))
    assert pool.find_cached_blocks(digests("a")) == []
    pool.release_blocks(second)
    assert sorted(pool.allocate_blocks(5)) == [1, 2, 3, 4, 5]


def test_3_4_a_hit_on_a_free_block_consumes_a_free_block(pool):
    held = pool.allocate_blocks(2)
    pool.cache_blocks(held, digests("a", "b"))
    pool.release_blocks(held[1:])
    assert pool.count_free(held) == 1


def test_shared_blocks_are_freed_with_the_last_reference(pool):
    held = pool.allocate_blocks(2)
    pool.hold_blocks(held, pool.count_free(held))
    pool.release_blocks(held)
    assert pool.num_free == 3
    pool.release_blocks(held)
    assert pool.num_free == 5


def test_3_6_a_reset_requires_that_no_block_is_in_use(pool):
    held = pool.allocate_blocks(2)
    pool.cache_blocks(held, digests("a", "b"))
    assert not pool.reset_cache()
    assert pool.find_cached_blocks(digests("a")) == [held[0]]
    pool.release_blocks(held)
    assert pool.reset_cache()
    assert pool.find_cached_blocks(digests("a")) == []
    assert len(set(pool.allocate_blocks(5))) == 5


def test_an_uncached_block_is_reused_like_a_blank_one(pool):
    held = pool.allocate_blocks(2)
    pool.cache_blocks(held, digests("a", "b"))
    pool.release_blocks(held[1:])
    pool.uncache_blocks(digests("a", "b", "c"))
    assert pool.find_cached_blocks(digests("a")) == []
    pool.release_blocks(held[:1])
    assert pool.num_free == 5
    assert len(set(pool.allocate_blocks(5))) == 5


def test_a_block_uncached_while_in_use_is_freed_like_a_blank_one(pool):
    first, second = pool.allocate_blocks(2)
    pool.cache_blocks([first, second], digests("a", "b"))
    pool.release_blocks([first])
    pool.hold_blocks([first], 1)
    pool.uncache_blocks(digests("a"))
    pool.release_blocks([first])
    pool.release_blocks([second])
    assert sorted(pool.allocate_blocks(5)) == [1, 2, 3, 4, 5]
    assert pool.num_free == 0


def test_usage_is_the_fraction_of_blocks_in_use(pool):
    assert pool.usage == 0.0
    pool.allocate_blocks(1)
    assert pool.usage == pytest.approx(0.2)
