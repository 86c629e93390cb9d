"""The common prefix of running requests, line 1.9 of the scheduler's specification."""

from __future__ import annotations

from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.worker_messages import SchedulerOutput
from support.scheduler.harness import Harness

SHARED = list(range(1, 17))


def harness_of(*prompts: list[int], **limits) -> tuple[Harness, SchedulerOutput]:
    harness = Harness(block_size=4, **limits)
    for prompt in prompts:
        harness.add(prompt, 10)
    step = harness.schedule()
    return harness, step


def test_1_9_the_shared_blocks_of_the_batch_are_counted():
    harness, step = harness_of([*SHARED, 50], [*SHARED, 60], [*SHARED[:10], 70, 71, 72])
    assert step.num_common_blocks == 2
    harness.drain()


def test_1_9_the_count_changes_only_with_the_batch():
    harness, step = harness_of([*SHARED, 50], [*SHARED, 60])
    assert step.num_common_blocks == 4
    harness.step()
    assert harness.schedule().num_common_blocks == 4
    other = harness.add([99] * 9, 2)
    while not harness.received[other].is_over:
        harness.step()
    assert 0 in [step.num_common_blocks for step in harness.steps]
    harness.step()
    assert harness.schedule().num_common_blocks == 4
    harness.drain()


def test_1_9_a_single_request_has_no_common_prefix():
    harness, step = harness_of(SHARED)
    assert step.num_common_blocks == 0
    harness.drain()


def test_1_9_the_common_prefix_may_be_shorter_than_that_of_two_requests():
    # The first two blocks belong to all three; the next two only to two of them.
    harness, step = harness_of([*SHARED[:8], 80, 81], [*SHARED, 50], [*SHARED, 60])
    assert step.num_common_blocks == 2
    harness.drain()


def test_1_9_windows_have_no_common_prefix():
    window = KVCacheGroup(AttentionKind.SLIDING_WINDOW, 6)
    for groups, expected in (((window,), 0), ((KVCacheGroup(), window), 4)):
        harness, step = harness_of([*SHARED, 50], [*SHARED, 60], groups=groups)
        assert step.num_common_blocks == expected
        harness.drain()
