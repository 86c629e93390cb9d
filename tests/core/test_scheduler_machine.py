"""Random traffic: the invariants hold after every step, and every output is that of the request alone."""

from __future__ import annotations

import random

import pytest
from engine.protocol.config import PreemptionMode
from engine.protocol.kv_cache_groups import FULL_ATTENTION
from engine.protocol.messages import SchedulerOutput
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)
from support.recorded_harness import RecordedHarness, replay
from support.traffic import HYBRIDS, SALTS, Traffic, random_harness, run_traffic


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses limits, arrivals, aborts and how far the workers lag behind; all of it is replayed."""

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.sampled_from((1, 2, 4)),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 40),
        threshold=st.sampled_from((0, 0, 3)),
        max_in_flight=st.integers(1, 4),
        caching=st.booleans(),
        segment_bytes=st.sampled_from((3_000, 10_000, 1 << 30)),
        groups=st.sampled_from((FULL_ATTENTION, *HYBRIDS)),
        num_host_blocks=st.sampled_from((0, 2, 100)),
        preemption_mode=st.sampled_from(PreemptionMode),
    )
    def start(
        self,
        num_blocks,
        block_size,
        max_num_seqs,
        budget,
        threshold,
        max_in_flight,
        caching,
        segment_bytes,
        groups,
        num_host_blocks,
        preemption_mode,
    ):
        self.harness = RecordedHarness(
            segment_bytes=segment_bytes,
            num_blocks=num_blocks * len(groups),
            groups=groups,
            num_host_blocks=num_host_blocks,
            preemption_mode=preemption_mode,
            block_size=block_size,
            max_model_len=40,
            vocab_size=32,
            max_in_flight=max_in_flight,
            enable_prefix_caching=caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            long_prefill_token_threshold=threshold,
        )

    @rule(
        length=st.integers(1, 30),
        fork=st.integers(0, 30),
        salt=st.sampled_from(SALTS),
        max_tokens=st.sampled_from((1, 2, 7, None)),
        client=st.integers(0, 2),
        eos=st.sampled_from(((), (3,), (2, 5, 11))),
        min_tokens=st.integers(0, 1),
        constrained=st.booleans(),
    )
    def add(self, length, fork, salt, max_tokens, client, eos, min_tokens, constrained):
        prompt = [5 if index < fork else 6 + fork % 7 for index in range(length)]
        self.harness.add(
            prompt,
            max_tokens,
            client=client,
            salt=salt,
            seed=SALTS.index(salt),
            eos=eos,
            min_tokens=min_tokens,
            structured_output=StructuredOutput(GrammarKind.JSON_OBJECT) if constrained else None,
        )

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(list(self.harness.scheduler.requests))))

    @rule()
    def compile_grammars(self):
        self.harness.compile_grammars()

    @precondition(lambda self: self.harness.num_in_flight < self.harness.max_in_flight)
    @rule()
    def schedule(self):
        self.harness.schedule()

    @precondition(lambda self: self.harness.num_in_flight > 0)
    @rule()
    def update(self):
        self.harness.update()

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running):
        self.harness.scheduler.reset_prefix_cache(reset_running, self.harness.now)

    @precondition(lambda self: self.harness.worker.rows)
    @rule(data=st.data())
    def fail_a_row(self, data):
        slot = data.draw(st.sampled_from(sorted(self.harness.worker.rows)))
        self.harness.worker.fail_next[slot] = "broken"

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.drain()
            replay(self.harness.dump())


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.parametrize("first_seed", range(0, 240, 24))
def test_random_traffic(first_seed):
    """Ten thousand steps each time, with seeds and limits that differ."""
    num_steps, seed = 0, first_seed
    while num_steps < 10_000:
        num_steps += run_traffic(seed, 300)
        seed += 1000


def test_i6_same_inputs_same_decisions():
    def decisions(seed: int) -> list[SchedulerOutput]:
        rng = random.Random(seed)
        harness = random_harness(rng)
        traffic = Traffic(harness, rng)
        for _ in range(300):
            traffic.act()
        harness.drain(50_000)
        return harness.steps

    assert decisions(4242) == decisions(4242)
