"""Adapters in a step. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import msgspec
import pytest
from engine.protocol.config import SchedulingPolicy
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.harness import Harness
from support.scheduler.recorded_harness import RecordedHarness, replay


def start(harness: Harness, key: tuple[int, int]) -> float:
    events = harness.received[key].events
    return next(event.timestamp for event in events if event.kind is EventKind.SCHEDULED)


def test_1_5_at_most_max_loras_adapters_run_and_other_requests_pass():
    harness = Harness(max_loras=2)
    names = ("x", "y", "z", "", "x")
    keys = [harness.add([n + 1] * 5, 6, lora_name=name) for n, name in enumerate(names)]
    step = harness.schedule()
    assert [harness.worker.loras.get(new.lora_number, "") for new in step.new_requests] == [
        *("x", "y"),
        *("", "x"),
    ]
    harness.drain()
    assert start(harness, keys[2]) > start(harness, keys[4])


def test_1_5_a_request_without_a_lora_slot_keeps_its_place():
    harness = Harness(max_loras=1, max_num_seqs=2, max_in_flight=1)
    harness.add(5, 3, lora_name="x")
    first = harness.add(5, 3, lora_name="y")
    harness.add(5, 8)
    harness.step()
    second = harness.add(6, 3, lora_name="y")
    third = harness.add(6, 3)
    harness.drain()
    assert start(harness, first) < start(harness, second) <= start(harness, third)


def test_1_5_a_waiting_adapter_request_can_be_aborted():
    harness = Harness(max_loras=1)
    harness.add(5, 4, lora_name="x")
    aside = harness.add(5, 4, lora_name="y")
    harness.step()
    harness.abort(aside)
    harness.drain()
    assert harness.received[aside].is_over


@pytest.mark.parametrize("policy", SchedulingPolicy)
@pytest.mark.parametrize("max_loras", [1, 2])
def test_i3_an_adapter_gets_a_slot_while_others_keep_arriving(policy, max_loras):
    harness = Harness(max_loras=max_loras, max_num_seqs=8, policy=policy, priority_preemption=True)
    names = "xw"[:max_loras]
    for name in names:
        harness.add([1] * 5, 6, lora_name=name)
    harness.step()
    waiting = harness.add([2] * 5, 3, lora_name="y")
    plain = []
    for index in range(30):
        for name in names:
            harness.add([3, index], 6, lora_name=name)
        plain.append(harness.add([4, index], 1))
        for _ in range(3):
            harness.step()
    assert harness.received[waiting].is_over
    assert start(harness, plain[0]) < start(harness, waiting)
    harness.drain()


def test_1_5_adapters_keep_their_slots_when_no_other_needs_them():
    harness = Harness(max_loras=1, max_in_flight=1)
    long = harness.add([1] * 5, 100, lora_name="x")
    harness.step()
    waiting = harness.add([2] * 5, 3, lora_name="y")
    for _ in range(3):
        harness.step()
    behind = harness.add([3] * 5, 3, lora_name="x")
    for _ in range(3):
        harness.step()
    assert harness.received[behind].num_events(EventKind.SCHEDULED) == 0
    harness.abort(waiting)
    for _ in range(5):
        harness.step()
    assert harness.received[behind].is_over and not harness.received[long].is_over
    harness.drain()


def test_3_2_adapters_share_no_prefix():
    harness = Harness(max_loras=2)
    for name in ("x", "y", ""):
        harness.add([3] * 12, 3, lora_name=name)
        harness.drain()
    assert all(new.num_computed_tokens == 0 for step in harness.steps for new in step.new_requests)


def loads(harness: Harness) -> list[tuple[int, str]]:
    """Return the number and the name of each adapter that the workers were asked to load."""
    return [(load.number, load.adapter.name) for step in harness.steps for load in step.lora_loads]


def test_an_adapter_is_loaded_while_other_requests_run_and_its_own_wait():
    harness = Harness(max_loras=2, max_in_flight=1)
    running = harness.add(5, 20)
    harness.step()
    key = harness.add([1] * 5, 3, lora_name="new")
    step = harness.schedule()
    assert [load.adapter.name for load in step.lora_loads] == ["new"]
    assert not step.new_requests and step.step == 2
    harness.update()
    (new,) = harness.schedule().new_requests
    assert new.lora_number == harness.steps[1].lora_loads[0].number
    harness.update()
    harness.drain()
    assert harness.received[key].is_over and harness.received[running].is_over


def test_the_least_recently_used_adapter_is_replaced_and_loaded_again():
    harness = Harness(max_loras=1, max_cpu_loras=2)
    # "w" and "x" are loaded.
    for name in ("w", "a", "w", "x", "x"):
        harness.add([1] * 5, 2, lora_name=name)
        harness.drain()
    numbers = {name: number for number, name in loads(harness)}
    assert [name for _, name in loads(harness)] == ["a", "x"]
    assert numbers["a"] == numbers["x"]


@pytest.mark.parametrize("is_alone", [True, False])
def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone(is_alone):
    harness = Harness(max_loras=1)
    others = [] if is_alone else [harness.add([1] * 5, 9), harness.add([1] * 5, 9, lora_name="x")]
    failed = [harness.add([n] * 5, 9, lora_name="bad") for n in (1, 2)]
    others.append(harness.add([2] * 5, 9, lora_name="y"))
    harness.drain()
    for key in failed:
        end = harness.received[key].finished
        assert (end.reason, end.message) == (FinishReason.IGNORED, "bad is damaged")
    assert all(harness.received[key].reason is FinishReason.LENGTH for key in others)


def test_an_adapter_whose_request_was_aborted_while_it_loaded_leaves_no_slot_behind():
    harness = Harness(max_loras=1, max_cpu_loras=1)
    aborted = harness.add([1] * 5, 9, lora_name="a")
    harness.schedule()
    harness.abort(aborted)
    key = harness.add([1] * 5, 3, lora_name="b")
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH
    assert [name for _, name in loads(harness)] == ["a", "b"]


def test_a_pending_adapter_is_not_replaced_before_its_request_starts():
    harness = Harness(max_loras=1, max_cpu_loras=1, num_blocks=9, max_in_flight=1)
    long = harness.add([1] * 20, 10)
    harness.step()
    first = harness.add([2] * 20, 3, lora_name="a")
    second = harness.add([3] * 4, 3, lora_name="b")
    harness.drain()
    assert [name for _, name in loads(harness)] == ["a", "b"]
    assert start(harness, first) < start(harness, second)
    assert harness.received[long].reason is FinishReason.LENGTH


def test_statistics_name_the_adapters_of_running_and_waiting_requests():
    harness = Harness(max_loras=1)
    harness.add([1] * 5, 6, lora_name="x")
    harness.add([1] * 5, 6, lora_name="y")
    harness.step()
    assert (harness.stats[-1].running_loras, harness.stats[-1].waiting_loras) == (["x"], ["y"])
    harness.drain()


def test_a_replay_repeats_loads_and_names_no_adapter():
    harness = RecordedHarness(max_loras=1, max_cpu_loras=2, segment_bytes=2000)
    for round_ in range(12):
        for name in ("secret-a", "secret-b", "secret-c", "bad secret", ""):
            harness.add([round_ + 1] * 5, 3, lora_name=name)
        harness.drain()
    dump = harness.dump()
    assert len(dump.segments) > 1 and dump.segments[-1].snapshot is not None
    assert b"secret" not in msgspec.msgpack.encode(dump)
    assert sum(replay(dump)) > 0
