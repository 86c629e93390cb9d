"""Violated invariants are found, named and counted."""

from __future__ import annotations

import pytest
from engine.core.scheduler import scheduler as scheduler_module
from engine.core.state.request import RequestStatus
from support.scheduler.harness import Harness


def busy() -> Harness:
    harness = Harness(max_num_seqs=2)
    for n in range(4):
        harness.add([n + 1] * 9, 30)
    harness.schedule()
    return harness


def lose_a_reference(harness: Harness) -> None:
    pool = harness.scheduler.kv_cache_manager.pool
    pool.ref_counts[harness.scheduler.kv_cache_manager.blocks[0][0][0]] += 1


def leak_a_block(harness: Harness) -> None:
    pool = harness.scheduler.kv_cache_manager.pool
    [block] = pool.allocate_blocks(1)
    pool.ref_counts[block] = 0


def forget_a_slot(harness: Harness) -> None:
    harness.scheduler.slots.requests[0] = None


def change_a_status(harness: Harness) -> None:
    harness.request((0, 3)).status = RequestStatus.RUNNING


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lose_a_reference, "blocks with a wrong reference count: 1 counted, 0 expected"),
        (leak_a_block, "free and held blocks: 62 counted, 63 expected"),
        (forget_a_slot, "requests in slots: 1 counted, 2 expected"),
        (change_a_status, "requests in the queue: 2 counted, 1 expected"),
    ],
)
def test_damaged_state_violates_an_invariant(damage, name):
    harness = busy()
    assert harness.scheduler.check_invariants() == []
    damage(harness)
    assert name in harness.scheduler.check_invariants()


def test_invariants_are_checked_while_running_and_violations_counted(monkeypatch):
    monkeypatch.setattr(scheduler_module, "INVARIANT_CHECK_INTERVAL", 4)
    harness = busy()
    leak_a_block(harness)
    scheduler = harness.scheduler
    counts = []
    steps = [harness.steps[0]]
    for _ in range(5):
        outputs = scheduler.update_from_output(steps[-1], harness.worker.next_output(), 0.0)
        counts.append(outputs[0].stats.num_invariant_violations)
        steps.append(scheduler.schedule(0.0))
        harness.worker.submit(steps[-1])
    assert counts == [0, 0, 0, 1, 0]
    assert scheduler.invariant_violations == ["free and held blocks: 62 counted, 63 expected"]
