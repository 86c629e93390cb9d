"""Guarantees of the fair policy and of partial prefills for any traffic."""

from __future__ import annotations

import pytest
from engine.protocol.config import SchedulingPolicy
from hypothesis import example, given
from hypothesis import strategies as st
from support.scheduler.client_view import Key
from support.scheduler.harness import Harness
from support.suite.examples import examples

pytestmark = pytest.mark.slow

OUTPUT = 10
"""Tokens that each request of a crowd generates, after a prompt of one token."""


def fair_harness(max_num_seqs: int, **weights: float) -> Harness:
    return Harness(
        policy=SchedulingPolicy.FAIR,
        tenant_weights=weights,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=64,
        max_model_len=128,
        num_blocks=80,
        enable_prefix_caching=False,
    )


def served(harness: Harness, keys: list[Key]) -> int:
    return sum(len(harness.received[key].token_ids) for key in keys)


def add_crowd(harness: Harness, tenant: str, count: int) -> list[Key]:
    return [harness.add([1], OUTPUT, tenant=tenant) for _ in range(count)]


weights = st.sampled_from((0.5, 1.0, 2.0, 4.0))


@examples(60)
@given(
    past=st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(1, 40)), max_size=4
    ),
    max_num_seqs=st.integers(1, 4),
    weight=weights,
)
def test_2_2_for_any_traffic_tokens_used_without_competition_do_not_count(
    past, max_num_seqs, weight
):
    """An idle tenant earns no credit either."""
    harness = fair_harness(max_num_seqs, a=weight)
    for tenant, num_prompt, num_output in past:
        harness.add(num_prompt, num_output, tenant=tenant)
        while harness.scheduler.get_request_counts()[0] == max_num_seqs:
            harness.step()
        harness.step()
    harness.drain()
    crowds = {tenant: add_crowd(harness, tenant, 12) for tenant in "ba"}
    while sum(served(harness, keys) for keys in crowds.values()) < 100:
        harness.step()
        level = {tenant: served(harness, keys) for tenant, keys in crowds.items()}
        # Requests that run are finished before others start.
        most = (OUTPUT + 2) * max_num_seqs * (1 / weight + 1)
        assert abs(level["a"] / weight - level["b"]) <= most
    harness.abort(*crowds["a"], *crowds["b"])
    harness.drain()


@examples(60)
@given(used=st.integers(10, 80), weight=weights, num_before=st.integers(0, 10))
def test_2_2_for_any_traffic_tokens_used_in_competition_count(used, weight, num_before):
    """The others get the same service, by their weights, before the tenant's next turn."""
    harness = fair_harness(1, a=weight)
    first = harness.add([1], num_before + used, tenant="a")
    while served(harness, [first]) < num_before:
        harness.step()
    others = add_crowd(harness, "b", 20)
    back = harness.add([1], 1, tenant="a")
    paid = 0
    while not harness.received[back].is_over:
        if harness.request(back).slot < 0:
            paid = served(harness, others)
        harness.step()
    owed = min(used / weight, 20 * OUTPUT)
    # Turns are whole requests, and tokens in flight are not served yet.
    assert abs(paid - owed) <= 2 * OUTPUT + 4 / weight
    harness.abort(*others)
    harness.drain()


@examples(60)
@example(prompts=[1, 7, 15, 15, 16, 15], most=4, budget=60, block_size=8, is_caching=True)
@given(
    prompts=st.lists(st.integers(1, 90), min_size=1, max_size=8),
    most=st.integers(1, 4),
    budget=st.integers(8, 64),
    block_size=st.sampled_from((2, 4, 8)),
    is_caching=st.booleans(),
)
def test_2_4_for_any_traffic_partial_prefills_have_equal_shares(
    prompts, most, budget, block_size, is_caching
):
    harness = Harness(
        max_num_partial_prefills=most,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        max_in_flight=1,
        block_size=block_size,
        num_blocks=400,
        enable_prefix_caching=is_caching,
    )
    keys = [harness.add([n + 1] * length, 1) for n, length in enumerate(prompts)]
    whole_blocks = block_size if is_caching else 1

    def round_down(share: int) -> int:
        return share // whole_blocks * whole_blocks or share

    while True:
        waiting = [key for key in keys if key in harness.scheduler.requests]
        if not waiting:
            break
        slots = harness.scheduler.slots
        computed = {
            key: int(slots.num_computed_tokens[slot])
            if (slot := harness.request(key).slot) >= 0
            else 0
            for key in waiting
        }
        assert harness.schedule() is not None
        parts = []
        for key in waiting:
            request = harness.request(key)
            if request.slot < 0:
                continue
            now = int(slots.num_computed_tokens[request.slot])
            if now < request.num_prompt_tokens:
                parts.append(now - computed[key])
        assert sum(harness.batch.values()) <= budget
        assert len(parts) <= most
        if parts:
            # The last one gets what is left of the budget if that is less than its share, in whole blocks or not.
            is_full = sum(harness.batch.values()) == budget
            equal = parts[:-1] if is_full else parts
            assert len(set(equal)) <= 1 and parts[-1] < parts[0] + whole_blocks
            assert parts[0] >= round_down(budget // most) or (is_full and len(parts) == 1)
        if len(waiting) == 1 and parts:
            # No request can join, so no budget is reserved.
            assert parts == [round_down(budget)]
        harness.update()
    harness.drain()
