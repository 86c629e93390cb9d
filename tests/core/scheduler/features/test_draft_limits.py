"""The number of drafts depends on measured acceptance and costs."""

from __future__ import annotations

import numpy as np
import pytest
from engine.core.scheduler.features.draft_limits import DraftLimits, StepCosts
from engine.core.state.slots import Slots
from engine.protocol.arrays import int32_view
from engine.protocol.config import ProposerMethod, SpeculativeConfig
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.slow

MOST = 8
NUM_LEVELS = SpeculativeConfig(MOST).num_levels


def memory_bound(num_rows: int) -> float:
    return 0.01 * (1 + 0.05 * (num_rows - 1))


def compute_bound(num_rows: int) -> float:
    return 0.01 * num_rows


def make(num_slots: int, method: ProposerMethod = ProposerMethod.NGRAM) -> DraftLimits:
    limits = DraftLimits(SpeculativeConfig(MOST, method), Slots(64, 100))
    limits.take_changes(np.arange(num_slots))
    return limits


def run(
    limits: DraftLimits, num_slots: int, cost, share: float, num_steps: int = 400
) -> list[float]:
    """Simulate steps whose drafts are accepted with probability `share`. Return the mean limit of each."""
    slots, rng, means = np.arange(num_slots), np.random.default_rng(0), []
    for _ in range(num_steps):
        verified = limits.limits[slots, 0].astype(np.int64)
        tries = rng.random((num_slots, MOST)) < share
        accepted = np.minimum(np.cumprod(tries, axis=1).sum(axis=1), verified)
        limits.record_drafts(slots, accepted, verified)
        num_rows = num_slots + int(verified.sum())
        limits.record_step(num_rows, cost(num_rows), 0.0, 0)
        limits.take_changes(slots)
        means.append(float(verified.mean()))
    return means[num_steps // 2 :]


@pytest.mark.parametrize("num_slots", (1, 4, 16))
def test_drafts_are_taken_where_wider_steps_are_cheap(num_slots):
    assert min(run(make(num_slots), num_slots, memory_bound, 0.95)) >= 3


@pytest.mark.parametrize("num_slots", (1, 4, 32))
def test_drafts_turn_off_where_a_row_costs_as_much_as_a_token(num_slots):
    """A few are still tried, which costs less than 4 %."""
    means = run(make(num_slots), num_slots, compute_bound, 0.9, 1024)
    assert np.mean(means) < 0.04
    assert max(means) > 0


@pytest.mark.parametrize("num_slots", (1, 4, 32))
def test_wrong_drafts_turn_off_and_right_ones_on_again(num_slots):
    limits = make(num_slots)
    assert np.mean(run(limits, num_slots, memory_bound, 0.0, 1024)) < 0.05
    assert max(run(limits, num_slots, memory_bound, 1.0, 8192)) > 2


def test_each_request_has_a_limit_of_its_own():
    limits = make(2)
    slots = np.arange(2)
    for _ in range(100):
        limits.record_drafts(slots, np.array([4, 0]), np.array([4, 4]))
        limits.record_step(6, memory_bound(6), 0.0, 0)
        limits.record_step(2, memory_bound(2), 0.0, 0)
    rows = int32_view(limits.take_changes(slots)).reshape(-1, 1 + NUM_LEVELS).tolist()
    assert rows[0] == [0, *limits.limits[0]]
    assert limits.limits[1, 0] < 2 < limits.limits[0, 0]
    # A limit is sent once.
    assert limits.take_changes(slots) == b""


def test_a_new_request_in_a_slot_does_not_try_the_maximum():
    """The acceptance of earlier requests bounds it before the next decision, which may come some steps later."""
    slots = Slots(64, 100)
    limits = DraftLimits(SpeculativeConfig(MOST), slots)
    run(limits, 1, memory_bound, 0.1, 40)
    slots.generation[0] += 1
    limits.take_changes(np.arange(1))
    assert limits.limits[0, 0] < MOST // 2


def test_cost_of_draft_model_passes_limits_drafts():
    limits = make(1, ProposerMethod.DRAFT_MODEL)
    for draft_seconds, is_worth in ((0.0001, True), (0.1, False)):
        for _ in range(100):
            limits.record_drafts(np.zeros(1, np.intp), np.array([3]), np.array([4]))
            limits.record_step(5, memory_bound(5), 4 * draft_seconds, 4)
            limits.record_step(1, memory_bound(1), 0.0, 0)
        limits.take_changes(np.zeros(1, np.intp))
        assert (limits.limits[0, 0] > 0) == is_worth


def test_each_level_of_confidence_has_a_limit_of_its_own():
    limits, slots = make(1), np.zeros(1, np.intp)
    for _ in range(100):
        for level, accepted in ((0, 0), (3, 4)):
            limits.set_levels(slots, np.array([level], np.int32))
            limits.record_drafts(slots, np.array([accepted]), np.array([4]))
            limits.record_step(5, memory_bound(5), 0.0, 0)
        limits.record_step(1, memory_bound(1), 0.0, 0)
    limits.take_changes(slots)
    assert limits.limits[0, 0] < 2
    assert limits.limits[0, 3] == limits.largest(slots)[0] == MOST


@given(
    st.lists(st.tuples(st.integers(1, 300), st.floats(1e-5, 10)), max_size=30),
    st.integers(1, 64),
)
def test_wider_steps_never_seem_cheaper(measured, first):
    costs = StepCosts()
    for num_rows, seconds in measured:
        costs.record(num_rows, seconds)
    estimated = costs.estimate(first + np.arange(200.0))
    assert (estimated > 0).all()
    assert (np.diff(estimated) >= 0).all()


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, MOST), st.booleans()), max_size=60))
def test_limits_stay_in_range_for_any_outcome(outcomes):
    limits = make(8)
    slots = np.arange(8)
    for accepted, verified, reports in outcomes:
        counts = np.full(8, verified)
        limits.record_drafts(slots, np.minimum(counts, accepted), counts)
        limits.record_step(8 + int(counts.sum()), 0.01 if reports else 0.0, 0.0, 0)
        rows = int32_view(limits.take_changes(slots)).reshape(-1, 1 + NUM_LEVELS)
        assert (rows[:, 1:] >= 0).all()
        assert (rows[:, 1:] <= MOST).all()
