"""CPU KV offload, line 3.10 of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.cpu_offload import CPUOffload
from engine.protocol.arrays import int32_view
from engine.protocol.config import PreemptionMode, SchedulingPolicy
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.harness import Harness


def num_cached(harness: Harness, key: tuple[int, int]) -> int:
    events = harness.received[key].events
    return next(e.num_cached_tokens for e in events if e.kind == EventKind.SCHEDULED)


def fill_cache(harness: Harness) -> None:
    """Evict everything that was cached before."""
    pool = harness.scheduler.kv_cache_manager.pool
    harness.add([9] * ((pool.num_blocks - 1) * harness.block_size - 1), 1, seed=9, salt="filler")
    harness.drain()


def test_3_10_an_evicted_prefix_is_copied_back():
    harness = Harness(num_blocks=9, num_host_blocks=20)
    harness.add(20, 1)
    harness.drain()
    fill_cache(harness)
    assert sum(stats.num_blocks_copied_out for stats in harness.stats) == 5
    num_computed = harness.worker.num_prompt_tokens_computed
    again = harness.add(20, 5)
    step = harness.schedule()
    assert len(int32_view(step.host_copies_in)) == 2 * 4
    harness.drain()
    assert num_cached(harness, again) == 16
    assert harness.worker.num_prompt_tokens_computed == num_computed + 4
    third = harness.add(20, 1)
    assert harness.schedule().host_copies_in == b""
    harness.drain()
    assert num_cached(harness, third) == 16
    assert sum(stats.num_blocks_copied_in for stats in harness.stats) == 4
    assert harness.stats[-1].cpu_offload_usage > 0


def test_3_10_a_prefix_may_be_partly_on_the_device_and_partly_in_cpu_memory():
    harness = Harness(num_blocks=9, num_host_blocks=20)
    harness.add(24, 1)
    harness.drain()
    # This uses the two blocks that were never used and four cached ones, tails first.
    harness.add([9] * 23, 1, seed=9, salt="other")
    harness.drain()
    again = harness.add(24, 5)
    step = harness.schedule()
    assert len(int32_view(step.host_copies_in)) == 2 * 3
    harness.drain()
    assert num_cached(harness, again) == 20
    found = [stats for stats in harness.stats if stats.prefix_cache_hits]
    assert [(stats.prefix_cache_hits, stats.cpu_offload_hits) for stats in found] == [(20, 12)]


@pytest.mark.parametrize(
    ("mode", "num_computed"),
    [(PreemptionMode.SWAP, 28), (PreemptionMode.AUTO, 28), (PreemptionMode.RECOMPUTE, 0)],
)
def test_3_10_a_swapped_request_recomputes_at_most_its_last_partial_block(mode, num_computed):
    harness = Harness(
        num_blocks=12,
        num_host_blocks=20,
        max_in_flight=1,
        preemption_mode=mode,
        policy=SchedulingPolicy.PRIORITY,
        priority_preemption=True,
    )
    key = harness.add(21, 20, priority=1)
    for _ in range(8):
        harness.step()
    # A request with a higher priority uses all the memory.
    harness.add([9] * 43, 1, seed=9, salt="filler", priority=0)
    harness.drain()
    assert harness.received[key].num_events(EventKind.PREEMPTED) == 1
    admissions = [new for step in harness.steps for new in step.new_requests]
    assert [new.num_computed_tokens for new in admissions] == [0, 0, num_computed]


def test_3_10_swap_copies_all_blocks_in_the_next_step():
    harness = Harness(
        num_blocks=20, num_host_blocks=20, max_in_flight=1, preemption_mode=PreemptionMode.SWAP
    )
    key = harness.add(21, 20)
    for _ in range(8):
        harness.step()
    harness.preempt(key)
    step = harness.schedule()
    assert len(int32_view(step.host_copies_out)) == 2 * 7
    assert step.host_copies_in == b""
    harness.drain()


def test_3_10_outputs_are_unchanged_under_preemption_storms():
    for mode in PreemptionMode:
        harness = Harness(
            num_blocks=14, num_host_blocks=30, inject_preemption=0.2, preemption_mode=mode
        )
        for n in range(6):
            harness.add([n + 1] * 15, 30)
        harness.drain()
        copied = sum(stats.num_blocks_copied_in for stats in harness.stats)
        assert (copied > 0) == (mode is not PreemptionMode.RECOMPUTE)


def test_3_10_a_request_with_prompt_logprobs_can_be_swapped():
    harness = Harness(num_blocks=12, num_host_blocks=20, max_in_flight=1)
    key = harness.add(20, 20, prompt_logprobs=1)
    for _ in range(4):
        harness.step()
    harness.preempt(key)
    assert harness.schedule().new_requests[0].num_computed_tokens == 20
    harness.drain()


def test_3_10_the_blocks_within_a_window_are_copied_back():
    window = KVCacheGroup(AttentionKind.SLIDING_WINDOW, 8)
    harness = Harness(num_blocks=25, num_host_blocks=40, groups=(KVCacheGroup(), window))
    harness.add(40, 1)
    harness.drain()
    harness.add([9] * 47, 1, seed=9, salt="filler")
    harness.drain()
    again = harness.add(40, 1)
    step = harness.schedule()
    # Nine blocks of the full group, and the two that the next token's window covers.
    assert len(int32_view(step.host_copies_in)) == 2 * 11
    harness.drain()
    assert num_cached(harness, again) == 36


def test_3_10_a_reset_also_clears_the_offloaded_blocks():
    harness = Harness(num_blocks=9, num_host_blocks=20)
    harness.add(20, 1)
    harness.drain()
    fill_cache(harness)
    assert harness.scheduler.reset_prefix_cache()
    again = harness.add(20, 1)
    harness.drain()
    assert num_cached(harness, again) == 0


@pytest.mark.parametrize("is_corrupted", [False, True])
def test_3_10_blocks_that_may_be_invalid_are_not_offloaded(is_corrupted):
    harness = Harness(num_blocks=12, num_host_blocks=20, preemption_mode=PreemptionMode.SWAP)
    key = harness.add(20, 20)
    harness.schedule()
    harness.preempt(key)
    while (slot := harness.request(key).slot) < 0:
        harness.step()
    if is_corrupted:
        harness.worker.nan_next.add(slot)
    else:
        harness.worker.fail_next[slot] = "no token is allowed"
    harness.drain()
    assert harness.received[key].reason is (
        FinishReason.LENGTH if is_corrupted else FinishReason.ERROR
    )
    fill_cache(harness)
    again = harness.add(20, 1)
    harness.drain()
    assert num_cached(harness, again) == (0 if is_corrupted else 16)


@pytest.fixture
def tier() -> CPUOffload:
    return CPUOffload(3)


def key(name: str) -> bytes:
    return name.encode()


def test_3_10_the_least_recently_used_content_is_evicted_first(tier):
    for block, name in enumerate("abc", 1):
        tier.store_block(key(name), block)
    tier.take_copies()
    tier.reserve_blocks([key("a")])
    tier.take_copies()
    tier.store_block(key("d"), 4)
    assert [name for name in "abcd" if tier.find_block(key(name)) is not None] == ["a", "c", "d"]


def test_3_10_content_in_cpu_memory_is_not_copied_again(tier):
    tier.store_block(key("a"), 1)
    tier.take_copies()
    tier.store_block(key("a"), 2)
    assert tier.take_copies() == (b"", b"")
    assert tier.take_counts() == (1, 0)


def test_3_10_blocks_being_copied_are_not_reused(tier):
    for block, name in enumerate("abc", 1):
        tier.store_block(key(name), block)
    tier.store_block(key("d"), 4)
    assert tier.find_block(key("d")) is None
    copies, _ = tier.take_copies()
    assert sorted(int32_view(copies)[1::2].tolist()) == [0, 1, 2]
    tier.store_block(key("d"), 4)
    assert tier.find_block(key("d")) is not None and tier.find_block(key("a")) is None
