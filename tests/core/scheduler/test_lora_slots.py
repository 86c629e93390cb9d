"""Adapters in a step. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.protocol.config import SchedulingPolicy
from engine.protocol.messages import EventKind
from support.scheduler_harness import Harness


def start(harness: Harness, key: tuple[int, int]) -> float:
    events = harness.received[key].events
    return next(event.timestamp for event in events if event.kind is EventKind.SCHEDULED)


def test_1_5_at_most_max_loras_adapters_run_and_other_requests_pass():
    harness = Harness(max_loras=2)
    names = ("x", "y", "z", "", "x")
    keys = [harness.add([n + 1] * 5, 6, lora_name=name) for n, name in enumerate(names)]
    step = harness.schedule()
    assert [new.lora_name for new in step.new_requests] == ["x", "y", "", "x"]
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
