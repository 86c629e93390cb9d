"""What readers see of a step: requests instead of slots."""

from __future__ import annotations

import random

import pytest
from engine.core.scheduler.step_views import StepView, StepViews, req_id
from engine.protocol.config import SpeculativeConfig
from engine.protocol.worker_messages import SchedulerOutput
from support.scheduler_harness import Harness
from support.traffic import Traffic, random_harness


class ViewedHarness(Harness):
    """Looks at every step as soon as it is scheduled."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.views: list[StepView] = []
        self.reader = StepViews(self.scheduler)

    def schedule(self) -> SchedulerOutput | None:
        step = super().schedule()
        if step is not None:
            self.views.append(self.reader.read(step))
        return step


def test_a_request_from_its_first_step_to_its_last():
    harness = ViewedHarness(block_size=4, max_num_batched_tokens=6, max_in_flight=1)
    name = req_id(harness.add(9, 2, client=3))
    assert name == "3-0"
    harness.drain()
    first, second, third, last = harness.views
    assert [view.num_scheduled_tokens for view in harness.views] == [
        {name: 6},
        {name: 3},
        {name: 1},
        {},
    ]
    assert [data.request_id for data in first.scheduled_new_reqs] == [(3, 0)]
    assert first.scheduled_cached_reqs == ([], set(), [], [])
    assert second.scheduled_new_reqs == third.scheduled_new_reqs == []
    assert second.scheduled_cached_reqs.req_ids == third.scheduled_cached_reqs.req_ids == [name]
    assert second.scheduled_cached_reqs.num_computed_tokens == [6]
    assert third.scheduled_cached_reqs.num_computed_tokens == [9]
    # Its third block came with the step that needed it, and the rest of that is enough.
    assert [len(view.scheduled_cached_reqs.new_block_ids[0][0]) for view in (second, third)] == [
        1,
        0,
    ]
    assert (last.finished_req_ids, last.total_num_scheduled_tokens) == ({name}, 0)
    assert not any(view.finished_req_ids for view in harness.views[:-1])


def test_a_preempted_request_is_resumed_with_all_its_blocks():
    harness = ViewedHarness(
        num_blocks=9, block_size=4, max_in_flight=1, enable_prefix_caching=False
    )
    keys = [harness.add([n + 1] * 10, 14) for n in range(2)]
    harness.drain()
    _, victim = map(req_id, keys)
    [preempted] = [view for view in harness.views if view.preempted_req_ids]
    [resumed] = [view for view in harness.views if view.scheduled_cached_reqs.resumed_req_ids]
    assert preempted.preempted_req_ids == resumed.scheduled_cached_reqs.resumed_req_ids == {victim}
    assert victim not in preempted.num_scheduled_tokens
    assert resumed.scheduled_new_reqs == []
    cached = resumed.scheduled_cached_reqs
    position = cached.req_ids.index(victim)
    assert cached.num_computed_tokens[position] == 0
    num_tokens = resumed.num_scheduled_tokens[victim]
    assert len(cached.new_block_ids[position][0]) == -(-num_tokens // 4)


def test_what_is_preempted_and_aborted_between_two_steps_has_finished():
    harness = ViewedHarness(max_in_flight=1)
    key = harness.add(9, 20)
    harness.step()
    harness.scheduler.reset_prefix_cache(True, harness.now)
    harness.abort(key)
    harness.drain()
    assert harness.views[-1].finished_req_ids == {req_id(key)}


@pytest.mark.parametrize("is_async", [False, True])
def test_drafts_are_known_unless_the_worker_keeps_them(is_async):
    harness = ViewedHarness(
        speculative=SpeculativeConfig(2),
        propose=lambda row: [7, 8],
        async_scheduling=is_async,
        max_in_flight=1,
    )
    name = req_id(harness.add(5, 6))
    harness.drain()
    drafts = [view.scheduled_spec_decode_tokens for view in harness.views]
    expected = [-1, -1] if is_async else [7, 8]
    assert {name: expected} in drafts
    for view in harness.views:
        for req, tokens in view.scheduled_spec_decode_tokens.items():
            assert view.num_scheduled_tokens[req] == 1 + len(tokens)


@pytest.mark.parametrize("seed", range(8))
def test_views_of_random_traffic_add_up(seed):
    rng = random.Random(seed)
    harness = random_harness(rng, ViewedHarness)
    traffic = Traffic(harness, rng)
    for _ in range(150):
        traffic.act()
    harness.drain(100_000)
    running: set[str] = set()
    seen: set[str] = set()
    for view in harness.views:
        assert view.finished_req_ids | view.preempted_req_ids <= running
        assert not view.finished_req_ids & view.preempted_req_ids
        running -= view.finished_req_ids | view.preempted_req_ids
        new = {req_id(data.request_id) for data in view.scheduled_new_reqs}
        cached = view.scheduled_cached_reqs
        assert not new & seen
        assert cached.resumed_req_ids <= seen - running
        seen |= new
        running |= new | cached.resumed_req_ids
        assert set(view.num_scheduled_tokens) == new & set(view.num_scheduled_tokens) | set(
            cached.req_ids
        )
        assert set(view.num_scheduled_tokens) <= running
        assert min(cached.num_computed_tokens, default=0) >= 0
        assert view.scheduled_spec_decode_tokens.keys() <= view.num_scheduled_tokens.keys()
        assert set(view.structured_output_request_ids) <= set(cached.req_ids) | new
    assert running == set()
    assert sum(view.total_num_scheduled_tokens for view in harness.views) == sum(
        stats.num_scheduled_tokens for stats in harness.stats
    )
