"""Random traffic: the invariants hold after every step, and every request has the same output as when it runs alone."""

from __future__ import annotations

import random

import pytest
from engine.protocol.config import (
    LoadFailurePolicy,
    PreemptionMode,
    SchedulingPolicy,
    SpeculativeConfig,
)
from engine.protocol.kv_cache_groups import FULL_ATTENTION
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from engine.protocol.worker_messages import SchedulerOutput
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from support.scheduler.growing import grow, part
from support.scheduler.model_connector import (
    ChanceEncoderCache,
    chance_connector,
    find_bad_blocks_by_chance,
)
from support.scheduler.model_worker import propose_by_chance
from support.scheduler.recorded_harness import PlanningScheduler, RecordedHarness, replay
from support.scheduler.traffic import (
    HYBRIDS,
    SALTS,
    Traffic,
    proposers,
    random_harness,
    run_traffic,
)
from support.suite.examples import examples, share

VOCAB_SIZE = 32
JSON = StructuredOutput(GrammarKind.JSON_OBJECT)
JSON_APART = StructuredOutput(GrammarKind.JSON_OBJECT, is_isolated=True)


@st.composite
def limits(draw):
    """Draw the settings of a harness, from comfortable to absurd."""
    groups = draw(st.sampled_from((FULL_ATTENTION, FULL_ATTENTION, *HYBRIDS)))
    num_host_blocks = draw(st.sampled_from((0, 0, 2, 100)))
    may_transfer = groups == FULL_ATTENTION and not num_host_blocks
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    proposer = draw(st.sampled_from(proposers(groups)))
    num_drafts = draw(st.sampled_from((0, 0, 1, 4))) if proposer else 0
    return rng, {
        "segment_bytes": draw(st.sampled_from((3_000, 10_000, 1 << 30))),
        "num_blocks": draw(st.integers(4, 40)) * len(groups),
        "groups": groups,
        "num_host_blocks": num_host_blocks,
        "preemption_mode": draw(st.sampled_from(PreemptionMode)),
        "block_size": draw(st.sampled_from((1, 2, 4))),
        "max_model_len": 40,
        "vocab_size": VOCAB_SIZE,
        "max_in_flight": draw(st.integers(1, 4)),
        "async_scheduling": draw(st.booleans()),
        "num_micro_batches": draw(st.sampled_from((1, 1, 2, 3))),
        "enable_prefix_caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(SchedulingPolicy)),
        "priority_preemption": draw(st.booleans()),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(1, 40)),
        "long_prefill_token_threshold": draw(st.sampled_from((0, 0, 3))),
        "max_num_partial_prefills": draw(st.sampled_from((0, 0, 1, 3))),
        "max_loras": draw(st.integers(1, 2)),
        "max_num_encoder_input_tokens": draw(st.sampled_from((0, 4, 9))),
        "encoder_cache_size": draw(st.sampled_from((0, 4, 12))),
        "disable_chunked_mm_input": draw(st.booleans()),
        "encoder_connector": ChanceEncoderCache(rng) if draw(st.booleans()) else None,
        "connector": chance_connector(rng) if may_transfer and draw(st.booleans()) else None,
        "load_failure_policy": draw(st.sampled_from(LoadFailurePolicy)),
        "transfer_timeout_s": draw(st.sampled_from((3.0, 1000.0))),
        "speculative": SpeculativeConfig(num_drafts, proposer) if num_drafts else None,
        "propose": propose_by_chance(rng, VOCAB_SIZE, num_drafts) if num_drafts else None,
    }


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses limits, arrivals, aborts and how far the workers lag behind; all of it is replayed."""

    @initialize(limits=limits())
    def start(self, limits):
        self.rng, settings = limits
        self.harness = RecordedHarness(**settings)
        transfers = self.harness.worker.transfers
        transfers.find_bad_blocks = find_bad_blocks_by_chance(self.rng)
        transfers.get_delay = lambda: self.rng.choice((0, 1, 5))
        self.harness.worker.is_late = settings["block_size"] != 2
        self.traffic = Traffic(self.harness, self.rng)

    @rule(
        length=st.integers(1, 30),
        fork=st.integers(0, 30),
        salt=st.sampled_from(SALTS),
        max_tokens=st.sampled_from((1, 2, 7, None)),
        client=st.integers(0, 2),
        eos=st.sampled_from(((), (3,), (2, 5, 11))),
        min_tokens=st.integers(0, 1),
        grammar=st.sampled_from((None, None, JSON, JSON_APART)),
        priority=st.integers(-1, 1),
        tenant=st.sampled_from("ab"),
        patience=st.sampled_from((None, None, 1, 30)),
        lora_name=st.sampled_from(("", "", "x", "y", "z")),
        has_inputs=st.booleans(),
    )
    def add(
        self,
        length,
        fork,
        salt,
        max_tokens,
        client,
        eos,
        min_tokens,
        grammar,
        priority,
        tenant,
        patience,
        lora_name,
        has_inputs,
    ):
        prompt = [5 if index < fork else 6 + fork % 7 for index in range(length)]
        self.harness.add(
            prompt,
            max_tokens,
            client=client,
            salt=salt,
            seed=SALTS.index(salt),
            eos=eos,
            min_tokens=min_tokens,
            structured_output=grammar,
            priority=priority,
            tenant=tenant,
            deadline=self.harness.now + patience if patience else 0.0,
            lora_name=lora_name,
            inputs=self.traffic.encoder_inputs(length) if has_inputs else (),
        )

    @precondition(lambda self: self.harness.speculative is None)
    @rule(length=st.integers(1, 9), num_ready=st.integers(0, 5))
    def open(self, length, num_ready):
        """Add a request whose inputs grow."""
        inputs = [part(0, length + num_ready, self.rng.randrange(3))]
        if inputs[0].size <= self.harness.scheduler.lifecycle.requirements.max_encoder_input_size:
            self.harness.add(length, None, inputs=inputs, is_open=True)

    @precondition(lambda self: any(r.is_open for r in self.harness.scheduler.requests.values()))
    @rule(num_tokens=st.integers(1, 4), is_last=st.sampled_from((False, False, True)))
    def grow(self, num_tokens, is_last):
        for key, request in list(self.harness.scheduler.requests.items()):
            if request.is_open:
                grow(self.harness, key, num_tokens, is_last=is_last)

    @precondition(lambda self: self.harness.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(list(self.harness.scheduler.requests))))

    @rule(num_preempted=st.integers(1, 6))
    def preemption_storm(self, num_preempted):
        """Add long prompts that need all blocks, so that the scheduler runs short of them."""
        for _ in range(num_preempted):
            self.harness.add(self.rng.choices(range(6, 12), k=12), None, client=1)

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

    @precondition(lambda self: self.harness.connector is None)
    @rule(is_fatal=st.sampled_from((False, False, True)))
    def lose_core(self, is_fatal):
        """Lose the core in one of three calls, because some states need many steps without a crash."""
        if is_fatal:
            replay(self.harness.dump())
            self.harness.lose_core()

    @rule(num_steps=st.integers(2, 12))
    def run_on(self, num_steps):
        """Run some steps without other events."""
        for _ in range(num_steps):
            self.harness.schedule()
            while self.harness.num_in_flight >= self.harness.max_in_flight:
                self.harness.update()

    @rule(reset_running=st.booleans())
    def reset_prefix_cache(self, reset_running):
        self.harness.scheduler.reset_prefix_cache(reset_running, self.harness.now)

    @precondition(lambda self: self.harness.worker.rows)
    @rule(data=st.data())
    def fail_a_row(self, data):
        slot = data.draw(st.sampled_from(sorted(self.harness.worker.rows)))
        self.harness.worker.fail_next[slot] = "broken"

    @precondition(lambda self: self.harness.worker.rows)
    @rule(data=st.data())
    def corrupt_a_row(self, data):
        slot = data.draw(st.sampled_from(sorted(self.harness.worker.rows)))
        self.harness.worker.nan_next.add(slot)

    def teardown(self):
        if hasattr(self, "harness"):
            self.grow(1, is_last=True)
            self.harness.drain()
            dump = self.harness.dump()
            assert replay(dump, PlanningScheduler) == replay(dump)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = examples(
    40,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 240, 48))
def test_invariants_i1_i2_i4_i5_hold_in_random_traffic(first_seed):
    """Run thousands of steps with different seeds and limits.

    The harness counts references after every step (I1) and looks for free blocks at the end, where it compares each
    output with that of the request alone (I4); the model worker detects a block with two writers (I2), and its state is
    compared with the scheduler's (I5).
    """
    num_steps, seed = 0, first_seed
    while num_steps < share(5_000):
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
