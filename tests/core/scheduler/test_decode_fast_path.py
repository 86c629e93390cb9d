"""The decode fast path skips planning and makes the same decisions."""

from __future__ import annotations

import pytest
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.config import SchedulingPolicy, SpeculativeConfig
from engine.protocol.messages import EventKind, FinishReason
from engine.protocol.worker_messages import SchedulerOutput
from hypothesis import given
from hypothesis import strategies as st
from support.scheduler.recorded_harness import PlanningScheduler, RecordedHarness, replay
from support.suite.examples import examples


class CountingScheduler(Scheduler):
    num_planned = 0

    def _plan_step(self, now: float) -> SchedulerOutput | None:
        type(self).num_planned += 1
        return super()._plan_step(now)


def run_on(harness: RecordedHarness, num_steps: int) -> None:
    for _ in range(num_steps):
        harness.schedule()
        while harness.num_in_flight >= harness.max_in_flight:
            harness.update()


@pytest.mark.parametrize("speculative", [None, SpeculativeConfig(4)])
def test_decode_steps_are_planned_only_after_a_change(speculative):
    harness = RecordedHarness(num_blocks=200, speculative=speculative)
    for length in (3, 4, 9, 16):
        harness.add(length, 70)
    run_on(harness, 60)
    CountingScheduler.num_planned = 0
    (num_decisions,) = replay(harness.dump(), CountingScheduler)
    assert num_decisions > 100
    assert CountingScheduler.num_planned < 10


def test_an_arrival_is_the_only_planned_step():
    harness = RecordedHarness(num_blocks=200)
    for length in (3, 4, 9, 16):
        harness.add(length, 70)
        run_on(harness, 10)
    CountingScheduler.num_planned = 0
    replay(harness.dump(), CountingScheduler)
    assert CountingScheduler.num_planned == 4


def test_steps_with_drafts_are_planned():
    harness = RecordedHarness(
        num_blocks=200,
        speculative=SpeculativeConfig(4),
        propose=lambda row: [7, 7] if 20 <= len(row.token_ids) < 25 else [],
    )
    harness.add(5, 70)
    harness.drain()
    CountingScheduler.num_planned = 0
    replay(harness.dump(), CountingScheduler)
    assert sum(len(step.drafts) > 0 for step in harness.steps) >= 3
    # This includes the steps after the last drafts.
    assert 5 <= CountingScheduler.num_planned < 30


def test_changes_between_steps_take_effect_in_the_next_step():
    harness = RecordedHarness(num_blocks=200)
    harness.add(5, 100)
    other = harness.add(7, 100)
    run_on(harness, 20)
    harness.abort(other)
    assert harness.schedule().removed_slots
    run_on(harness, 20)
    harness.add(6, 10)
    harness.update()
    assert [len(new.token_ids) // 4 for new in harness.schedule().new_requests] == [6]
    run_on(harness, 20)
    late = harness.add(5, 100, deadline=harness.now + 5)
    run_on(harness, 30)
    assert harness.received[late].reason is FinishReason.EXPIRED


def test_statistics_count_every_step_but_are_sent_with_few():
    harness = RecordedHarness(num_blocks=200)
    harness.add(5, 100)
    harness.drain()
    assert sum(stats.num_steps for stats in harness.stats) >= 100
    assert len(harness.stats) < 25
    assert harness.stats[-1].num_running == 0


def test_running_out_of_blocks_preempts():
    harness = RecordedHarness(num_blocks=24, block_size=4)
    harness.add(4, 60)
    second = harness.add(5, 60)
    run_on(harness, 60)
    assert harness.received[second].num_events(EventKind.PREEMPTED)
    harness.drain()


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    max_tokens=st.lists(st.integers(1, 60), min_size=6, max_size=6),
    eos=st.sampled_from(((), (3,), (2, 5, 11), tuple(range(0, 24, 2)))),
    depth=st.integers(1, 4),
    block_size=st.sampled_from((1, 3, 4)),
    num_blocks=st.sampled_from((30, 60, 200)),
    segment_bytes=st.sampled_from((3_000, 1 << 30)),
    pauses=st.lists(st.integers(1, 25), max_size=6),
    max_num_seqs=st.sampled_from((2, 8)),
    max_num_batched_tokens=st.sampled_from((3, 8, 64)),
    policy=st.sampled_from(SchedulingPolicy),
)
def test_the_fast_path_makes_the_decisions_of_planning(
    lengths,
    max_tokens,
    eos,
    depth,
    block_size,
    num_blocks,
    segment_bytes,
    pauses,
    max_num_seqs,
    max_num_batched_tokens,
    policy,
):
    harness = RecordedHarness(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=90,
        vocab_size=64,
        max_in_flight=depth,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        policy=policy,
        priority_preemption=True,
        segment_bytes=segment_bytes,
    )
    for number, length in enumerate(lengths):
        harness.add(length, max_tokens[number], eos=eos, priority=-number)
        run_on(harness, pauses[number] if number < len(pauses) else 0)
    harness.drain()
    dump = harness.dump()
    assert replay(dump, PlanningScheduler) == replay(dump)
