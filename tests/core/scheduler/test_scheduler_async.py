"""Several steps in flight. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.connector import ExternalMatch
from engine.protocol.arrays import int32_view
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector


def test_6_1_tokens_covered_by_placeholders_are_not_scheduled_again():
    harness = Harness(max_in_flight=10)
    harness.add(5, 3)
    assert [harness.schedule() is not None for _ in range(5)] == [True] * 3 + [False] * 2
    harness.drain()


def test_6_2_a_stop_seen_late_drops_the_extra_token_and_frees_once():
    probe = Harness(max_in_flight=1)
    probe.add(5, 9)
    probe.drain()
    tokens = probe.received[0, 0].token_ids
    for depth in (2, 3, 4):
        harness = Harness(max_in_flight=depth)
        key = harness.add(5, 9, eos=(tokens[2],))
        harness.drain()
        assert harness.received[key].token_ids == tokens[:3]
        assert len(harness.steps) > len(probe.steps[:3])


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_6_3_several_chunks_of_a_prompt_may_be_in_flight(depth):
    harness = Harness(max_in_flight=depth, max_num_batched_tokens=8)
    harness.add(30, 2)
    scheduled = 0
    while harness.num_in_flight < depth and harness.schedule() is not None:
        scheduled += 1
    assert scheduled == depth
    assert harness.scheduler.slots.num_computed_tokens[0] == min(30, 8 * depth)
    harness.drain()


def test_a_slot_freed_in_flight_is_reused_in_the_same_message():
    harness = Harness(max_num_seqs=1, max_in_flight=2)
    harness.add([1] * 5, 3)
    second = harness.add([2] * 5, 3)
    harness.drain()
    handover = next(step for step in harness.steps if step.removed_slots and step.new_requests)
    assert int32_view(handover.removed_slots).tolist() == [handover.new_requests[0].slot]
    assert handover.new_requests[0].request_id == second


def test_2_7_injected_preemption_changes_no_output():
    def outputs(probability: float) -> list[list[int]]:
        harness = Harness(inject_preemption=probability)
        for n in range(5):
            harness.add([n + 1] * (3 * n + 1), 15)
        harness.drain()
        preempted = sum(h.num_events(EventKind.PREEMPTED) for h in harness.received.values())
        assert (preempted > 0) == (probability > 0)
        return [received.token_ids for received in harness.received.values()]

    assert outputs(0.3) == outputs(0.0)


def test_i3_no_request_starves_under_fcfs_in_a_preemption_storm():
    harness = Harness(num_blocks=8, block_size=2, max_in_flight=2, max_num_seqs=6)
    keys = [harness.add([n % 9 + 1] * 4, 9) for n in range(40)]
    harness.drain()
    ends = [harness.received[key] for key in keys]
    assert all(len(received.token_ids) == 9 for received in ends)
    assert sum(stats.num_preemptions for stats in harness.stats) > 10
    admitted = [received.events[1].timestamp for received in ends]
    assert admitted == sorted(admitted)


@pytest.mark.parametrize("depth", [2, 4])
def test_6_2_tokens_in_flight_of_a_preempted_request_are_kept(depth):
    harness = Harness(max_in_flight=depth)
    key = harness.add(5, 40)
    for _ in range(3):
        harness.step()
    while harness.num_in_flight < depth:
        harness.schedule()
    num_tokens = len(harness.received[key].token_ids)
    num_in_flight = harness.num_in_flight
    harness.preempt(key)
    # No later request is admitted first.
    late = harness.add(6, 2)
    while harness.num_in_flight:
        harness.update()
    assert len(harness.received[key].token_ids) == num_tokens + num_in_flight
    step = harness.schedule()
    assert [data.request_id for data in step.new_requests] == [key, late]
    harness.drain()


def test_6_2_a_token_in_flight_may_end_a_preempted_request():
    harness = Harness()
    key = harness.add(5, 3)
    harness.schedule()
    for _ in range(2):
        harness.schedule()
    harness.preempt(key)
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH
    assert len([data for step in harness.steps for data in step.new_requests]) == 1


def test_6_2_a_reset_drops_tokens_in_flight_of_preempted_requests():
    harness = Harness()
    key = harness.add(5, 30)
    harness.step()
    harness.schedule()
    num_tokens = len(harness.received[key].token_ids)
    harness.preempt(key)
    assert harness.scheduler.reset_prefix_cache(True, harness.now)
    while harness.num_in_flight:
        harness.update()
    assert len(harness.received[key].token_ids) == num_tokens
    harness.drain()


def test_a_request_competing_with_asynchronous_loads_makes_progress():
    """A request that preempts itself must not alternate for ever with loads that take its blocks."""
    connector = ModelConnector(
        lambda request, computed: ExternalMatch(
            max(request.num_tokens - computed, 0) if request.params.seed else 0,
            request.params.seed is not None,
        )
    )
    harness = Harness(
        connector=connector, num_blocks=8, max_num_seqs=4, enable_prefix_caching=False
    )
    keys = [harness.add([n] * 11, 16, seed=n or None) for n in range(5)]
    harness.drain(400)
    assert {harness.received[key].reason for key in keys} == {FinishReason.LENGTH}
    num_tokens = sum(len(harness.received[key].token_ids) for key in keys)
    assert sum(stats.num_preemptions for stats in harness.stats) <= num_tokens


def test_requests_are_reported_while_no_step_runs():
    harness = Harness(max_num_seqs=2, max_in_flight=1)
    harness.add(4, 30)
    harness.step()
    scheduler = harness.scheduler

    def take_counts() -> list[tuple[int, int]]:
        reported = [each.stats for each in scheduler.take_outputs(7.0).values()]
        return [(each.num_running, each.num_waiting) for each in reported if each is not None]

    assert take_counts() == []
    harness.add(4, 30)
    assert take_counts() == [(1, 1)]
    assert take_counts() == []
    scheduler.add_client(0)
    assert take_counts() == [(1, 1)]
    harness.schedule()
    harness.add(4, 30)
    assert take_counts() == []
