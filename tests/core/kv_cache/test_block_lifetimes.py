"""Sampled lifetimes of blocks, line 3.9 of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache import block_lifetimes
from engine.core.kv_cache.block_pool import BlockPool
from engine.protocol.arrays import float32_view
from support.scheduler.harness import Harness


@pytest.fixture
def pool(monkeypatch) -> BlockPool:
    monkeypatch.setattr(block_lifetimes, "SAMPLE_INTERVAL", 1)
    return BlockPool(num_blocks=4)


def cached(pool: BlockPool, name: str, now: float) -> list[int]:
    pool.lifetimes.now = now
    blocks = pool.allocate_blocks(1)
    pool.cache_blocks(blocks, [name.encode()])
    return blocks


def at(pool: BlockPool, now: float) -> BlockPool:
    pool.lifetimes.now = now
    return pool


def test_3_9_lifetime_idle_time_and_reuse_gap_are_measured(pool):
    block = cached(pool, "a", now=10.0)
    at(pool, 12.0).release_blocks(block)
    at(pool, 15.0).hold_blocks(block, 1)
    at(pool, 16.0).release_blocks(block)
    at(pool, 20.0).allocate_blocks(3)
    assert pool.lifetimes.take_samples() == ([10.0], [4.0], [3.0])
    assert pool.lifetimes.take_samples() == ([], [], [])


def test_3_9_a_shared_block_is_not_idle(pool):
    block = cached(pool, "a", now=1.0)
    at(pool, 2.0).hold_blocks(block, 0)
    at(pool, 3.0).release_blocks(block)
    at(pool, 5.0).release_blocks(block)
    at(pool, 9.0).allocate_blocks(3)
    assert pool.lifetimes.take_samples() == ([8.0], [4.0], [])


def test_3_9_a_discarded_block_does_not_count_as_evicted(pool):
    block = cached(pool, "a", now=1.0)
    pool.uncache_blocks([b"a"])
    pool.release_blocks(block)
    at(pool, 9.0).allocate_blocks(3)
    assert pool.lifetimes.take_samples() == ([], [], [])


def test_3_9_a_reset_ends_every_sample(pool):
    at(pool, 2.0).release_blocks(cached(pool, "a", now=1.0))
    assert pool.reset_cache()
    at(pool, 9.0).allocate_blocks(3)
    assert pool.lifetimes.take_samples() == ([], [], [])


def test_3_9_a_copy_of_a_sampled_block_is_not_sampled(pool):
    held = cached(pool, "a", now=1.0)
    copy = cached(pool, "a", now=2.0)
    at(pool, 3.0).release_blocks(copy)
    at(pool, 4.0).allocate_blocks(2)
    assert pool.lifetimes.take_samples() == ([], [], [])
    assert pool.find_cached_blocks([b"a"]) == held


def test_3_9_a_fraction_of_the_blocks_is_sampled(monkeypatch):
    monkeypatch.setattr(block_lifetimes, "SAMPLE_INTERVAL", 4)
    pool = BlockPool(num_blocks=11)
    blocks = pool.allocate_blocks(10)
    for start, end in ((0, 3), (3, 6), (6, 10)):
        names = [bytes((n,)) for n in range(start, end)]
        pool.cache_blocks(blocks[start:end], names)
    pool.release_blocks(blocks)
    at(pool, 3.0).allocate_blocks(10)
    assert pool.lifetimes.take_samples() == ([3.0, 3.0], [3.0, 3.0], [])


def test_3_9_statistics_contain_the_samples(monkeypatch):
    monkeypatch.setattr(block_lifetimes, "SAMPLE_INTERVAL", 1)
    harness = Harness(num_blocks=9, block_size=4)
    for length in (20, 24):
        harness.add(length, 1)
        harness.drain()
    harness.add([9] * 31, 1, seed=9, salt="other")
    harness.drain()
    gaps = [gap for s in harness.stats for gap in float32_view(s.block_reuse_gaps).tolist()]
    lifetimes = [t for s in harness.stats for t in float32_view(s.block_lifetimes).tolist()]
    idle_times = [t for s in harness.stats for t in float32_view(s.block_idle_times).tolist()]
    assert gaps and min(gaps) > 0
    assert lifetimes and len(lifetimes) == len(idle_times)
    assert all(idle <= life for idle, life in zip(idle_times, lifetimes, strict=True))
