"""Decoding requests take turns, so that every stage of a pipeline has work.

Tests are named for the lines of the scheduler's specification.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from engine.protocol.arrays import int32_view
from engine.protocol.config import SpeculativeConfig
from support.scheduler.harness import Harness
from support.scheduler.model_worker import propose_by_chance

VOCAB_SIZE = 64


def decode_batches(num_requests: int, num_stages: int, num_tokens: int = 30) -> list[set[int]]:
    """Return the slots of each step after all prompts are computed, with one more step in flight than stages."""
    harness = Harness(
        num_micro_batches=num_stages,
        max_in_flight=num_stages + 1,
        max_model_len=64,
        num_blocks=256,
    )
    keys = [harness.add([n + 1] * 3, num_tokens) for n in range(num_requests)]
    harness.drain()
    assert all(len(harness.received[key].token_ids) == num_tokens for key in keys)
    batches, slots = [], set[int]()
    for step in harness.steps:
        slots = slots if step.slots is None else set(int32_view(step.slots).tolist())
        batches.append(slots)
    return batches[num_stages : -num_stages - 1]


@pytest.mark.parametrize(
    ("num_requests", "num_stages", "num_batches"),
    [(8, 2, 2), (7, 3, 3), (5, 4, 4), (3, 4, 3), (2, 4, 2), (8, 8, 8)],
)
def test_6_3_as_many_batches_as_stages_take_turns(num_requests, num_stages, num_batches) -> None:
    batches = decode_batches(num_requests, num_stages)
    for turn in zip(*(batches[i:] for i in range(num_batches)), strict=False):
        assert sum(map(len, turn)) == len(set.union(*turn)) == num_requests
        assert max(map(len, turn)) - min(map(len, turn)) <= 1


def test_6_3_a_single_request_is_in_every_step() -> None:
    assert set(map(frozenset, decode_batches(1, 4))) == {frozenset({0})}


def test_6_3_micro_batches_do_not_change_outputs() -> None:
    def outputs(**settings: int) -> list[list[int]]:
        harness = Harness(num_blocks=24, max_num_batched_tokens=12, **settings)
        keys = [harness.add([n + 1] * (3 + 2 * n), 12) for n in range(8)]
        harness.drain()
        return [harness.received[key].token_ids for key in keys]

    assert outputs(num_micro_batches=3, max_in_flight=4) == outputs()


def test_6_3_drafts_wait_for_tokens_and_change_no_outputs() -> None:
    def run(**settings: Any) -> tuple[list[list[int]], Harness]:
        harness = Harness(num_blocks=64, vocab_size=VOCAB_SIZE, **settings)
        keys = [harness.add([n + 1] * (3 + 2 * n), 24) for n in range(5)]
        harness.drain()
        return [harness.received[key].token_ids for key in keys], harness

    drafts = SpeculativeConfig(3, adaptive=False)
    shared = {"num_micro_batches": 3, "max_in_flight": 3, "async_scheduling": False}
    propose = propose_by_chance(random.Random(1), VOCAB_SIZE, 3)
    tokens, harness = run(**shared, speculative=drafts, propose=propose)
    assert tokens == run()[0]
    drafted = [step for step in harness.steps if step.drafts]
    assert drafted and all(step.draft_token_ids for step in drafted)
    slots, batches = set[int](), []
    for step in harness.steps:
        slots = slots if step.slots is None else set(int32_view(step.slots).tolist())
        batches.append(slots)
    # With five requests and three stages, neighboring steps compute different requests.
    assert not any(a & b for a, b in itertools.pairwise(batches[6:-6]))
