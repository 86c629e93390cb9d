"""The content of one step. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import msgspec
import pytest
from engine.core.scheduler.queues.admission_stop import AdmissionStop
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.arrays import int32_view
from engine.protocol.config import CacheConfig, SchedulerConfig
from engine.protocol.errors import ConfigError
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.harness import Harness


def scheduled(harness: Harness) -> dict[int, int]:
    """Schedule a step and return its token counts by slot, in batch order."""
    assert harness.schedule() is not None
    return dict(harness.batch)


def test_1_1_a_step_is_bounded_by_the_token_budget_and_the_sequence_cap():
    harness = Harness(max_num_batched_tokens=20, max_num_seqs=3)
    for n in range(5):
        harness.add([n + 1] * 8, 4)
    assert list(scheduled(harness).values()) == [8, 8, 4]
    assert harness.scheduler.get_request_counts() == (3, 2)
    harness.drain()


def test_1_1_prompts_in_a_step_are_limited_by_the_message_size(monkeypatch):
    monkeypatch.setattr("engine.core.scheduler.admission.MAX_SENT_TOKENS", 50)
    harness = Harness(max_num_batched_tokens=200, max_model_len=128, enable_prefix_caching=False)
    for length in (20, 20, 20, 100, 1):
        harness.add(length, 2)
    assert list(scheduled(harness).values()) == [20, 20]
    assert scheduled(harness)[2] == 20
    assert scheduled(harness)[3] == 100
    assert scheduled(harness)[4] == 1
    harness.drain()


def test_1_2_running_requests_come_first_in_queue_order():
    harness = Harness(max_num_batched_tokens=10, max_num_seqs=4, enable_prefix_caching=False)
    harness.add(3, 9)
    harness.add(30, 9)
    assert list(scheduled(harness).values()) == [3, 7]
    harness.add(4, 9)
    assert list(scheduled(harness).items()) == [(0, 1), (1, 9)]
    assert list(scheduled(harness).items()) == [(0, 1), (1, 9)]
    assert list(scheduled(harness).items()) == [(0, 1), (1, 5), (2, 4)]
    harness.drain()


def test_1_2_the_long_prefill_threshold_caps_each_chunk():
    harness = Harness(long_prefill_token_threshold=6, max_num_batched_tokens=50)
    harness.add([1] * 20, 2)
    harness.add([2] * 5, 2)
    assert list(scheduled(harness).values()) == [6, 5]
    assert list(scheduled(harness).values()) == [6, 1]
    harness.drain()


def test_1_2_a_request_with_nothing_to_compute_is_skipped_and_others_run():
    harness = Harness(max_in_flight=4)
    harness.add(4, 2)
    harness.add(5, 9)
    assert len(scheduled(harness)) == 2
    assert harness.schedule().slots is None
    # Both tokens of the first request are in flight; only the second request continues.
    assert scheduled(harness) == {1: 1}
    harness.drain()


def test_1_3_the_last_running_request_is_preempted_for_lack_of_blocks():
    harness = Harness(num_blocks=7, block_size=4, max_in_flight=1, enable_prefix_caching=False)
    first, second = harness.add(10, 12), harness.add(10, 12)
    harness.drain()
    assert harness.received[first].num_events(EventKind.PREEMPTED) == 0
    assert harness.received[second].num_events(EventKind.PREEMPTED) >= 1


def test_1_3_a_request_that_preempts_itself_resumes():
    harness = Harness(num_blocks=9, block_size=4, max_in_flight=1)
    keys = [harness.add([n] * 4, 25) for n in (1, 2, 3)]
    harness.drain()
    assert all(harness.received[key].reason is FinishReason.LENGTH for key in keys)
    assert sum(harness.received[key].num_events(EventKind.PREEMPTED) for key in keys) >= 2


def test_1_4_preemption_and_admission_never_share_a_step():
    harness = Harness(num_blocks=9, block_size=2, max_in_flight=1, max_num_seqs=4)
    for n in range(1, 7):
        harness.add([n] * 5, 8)
    preempted = 0
    while harness.scheduler.has_requests():
        step = harness.schedule()
        if step is not None:
            seen = [
                received.num_events(EventKind.PREEMPTED) for received in harness.received.values()
            ]
            harness.update()
            now = [
                received.num_events(EventKind.PREEMPTED) for received in harness.received.values()
            ]
            if sum(now) > sum(seen):
                preempted += 1
                assert not step.new_requests
    assert preempted > 0
    harness.check_empty()


def test_1_5_admission_stops_at_the_first_request_that_does_not_fit():
    harness = Harness(num_blocks=6, block_size=4, max_num_batched_tokens=100)
    harness.add(12, 3)
    large = harness.add([9] * 16, 2)
    small = harness.add([8], 2)
    assert len(scheduled(harness)) == 1
    assert harness.scheduler.get_request_counts() == (1, 2)
    harness.drain()
    starts = [
        next(e.timestamp for e in harness.received[key].events if e.kind == EventKind.SCHEDULED)
        for key in (large, small)
    ]
    assert starts[0] <= starts[1]


@pytest.mark.parametrize(("watermark", "num_running"), [(0.0, 2), (0.25, 2), (0.4, 1)])
def test_1_5_an_admission_leaves_blocks_free_for_running_requests(watermark, num_running):
    harness = Harness(num_blocks=8, block_size=4, watermark=watermark)
    harness.add([1] * 8, 3)
    second = harness.add([2] * 12, 3)
    assert len(scheduled(harness)) == num_running
    if num_running == 1:
        assert harness.scheduler.why_waiting(harness.request(second)) is AdmissionStop.BLOCKS
    harness.drain()
    # A request that needs every block runs alone.
    key = harness.add([3] * 26, 3)
    harness.drain()
    assert len(harness.received[key].token_ids) == 3


def test_1_5_without_chunked_prefill_a_prompt_over_the_remaining_budget_waits():
    harness = Harness(enable_chunked_prefill=False, max_num_batched_tokens=128)
    harness.add([1] * 100, 4)
    harness.add([2] * 60, 4)
    harness.add([3] * 5, 4)
    assert list(scheduled(harness).values()) == [100]
    assert list(scheduled(harness).values()) == [1, 60, 5]
    harness.drain()


def test_1_5_without_chunked_prefill_the_budget_must_hold_any_prompt():
    with pytest.raises(ConfigError, match="max_num_batched_tokens=16 is below max_model_len=64"):
        Scheduler(
            SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=16),
            CacheConfig(),
            max_model_len=64,
            vocab_size=10,
            num_blocks=8,
        )


def test_1_6_a_full_prefix_hit_recomputes_the_last_block():
    harness = Harness(block_size=4)
    harness.add(16, 1)
    harness.drain()
    again = harness.add(16, 1)
    harness.drain()
    data = harness.steps[-2].new_requests[0]
    assert data.num_computed_tokens == 12
    assert harness.received[again].token_ids == harness.received[0, 0].token_ids


def test_1_7_cached_tokens_are_recorded_once_and_not_at_resumption():
    harness = Harness(block_size=4, inject_preemption=0.3, max_in_flight=1)
    harness.add(21, 1)
    harness.drain()
    key = harness.add(21, 20)
    harness.drain()
    assert harness.received[key].num_events(EventKind.PREEMPTED) > 0
    cached = {
        e.num_cached_tokens for e in harness.received[key].events if e.kind == EventKind.SCHEDULED
    }
    assert cached == {20}


def test_1_8_computed_tokens_advance_when_a_step_is_scheduled():
    harness = Harness(max_in_flight=3, max_num_batched_tokens=10)
    harness.add(25, 2)
    assert scheduled(harness) == {0: 10}
    assert harness.scheduler.slots.num_computed_tokens[0] == 10
    second = harness.schedule()
    assert second.slots is None
    assert int32_view(second.chunks).tolist() == [0, 10]
    assert harness.scheduler.slots.num_computed_tokens[0] == 20
    harness.drain()


def test_1_9_removed_slots_are_sent_to_the_workers_exactly_once():
    harness = Harness(num_blocks=12, max_num_seqs=3)
    for n in range(8):
        harness.add([n + 1] * 7, 6)
    harness.drain()
    taken = sum(len(step.new_requests) for step in harness.steps)
    removed = sum(len(step.removed_slots) // 4 for step in harness.steps)
    assert taken == removed >= 8


def test_1_10_a_step_with_only_a_removal_is_sent():
    harness = Harness()
    key = harness.add(6, 50)
    harness.step()
    harness.abort(key)
    step = harness.schedule()
    assert int32_view(step.removed_slots).tolist() == [0]
    assert step.slots == b""
    assert harness.scheduler.schedule(0.0) is None
    harness.drain()


def test_an_unchanged_batch_is_not_sent_again():
    harness = Harness(max_in_flight=1)
    for _ in range(3):
        harness.add(5, 10)
    harness.drain()
    assert [step.slots is None for step in harness.steps] == [False] + [True] * 9 + [False]
    assert not any(step.chunks for step in harness.steps[1:])


def test_an_unchanged_decode_step_takes_few_bytes_on_the_wire():
    harness = Harness(max_num_seqs=100, num_blocks=2000, max_num_batched_tokens=4000)
    for n in range(100):
        # The lengths are spread, so that a quarter of the requests needs a block in each step.
        harness.add([n + 1] * (5 + n % 4), 60)
    for _ in range(10):
        harness.step()
    encode = msgspec.msgpack.encode
    step = harness.schedule()
    harness.update()
    result = harness.worker.next_output()
    outputs = harness.scheduler.update_from_output(step, result, harness.now)
    assert step.block_updates and step.slots is None
    assert len(encode(step)) <= 100 + 4 * 100
    assert len(encode(outputs[0])) <= 120 + 8 * 100


def test_an_idle_scheduler_has_no_step():
    harness = Harness()
    assert not harness.scheduler.has_requests()
    assert harness.schedule() is None
