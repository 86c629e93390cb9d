"""Simulated figures equal those computed by hand."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from engine.core.replay.dump import write_dump
from engine.core.replay.recorder import Setup
from engine.core.simulation.__main__ import main
from engine.core.simulation.draft_model import DraftModel, measure_drafts
from engine.core.simulation.fleet.remote_prefill import PrefillReplicas
from engine.core.simulation.frontend_times import FrontendTimes, measure_frontend
from engine.core.simulation.simulate import simulate
from engine.core.simulation.step_time import (
    SIZES,
    StepClock,
    StepLoad,
    StepSample,
    StepTimeModel,
    fit,
    measure_steps,
)
from engine.core.simulation.trace import TraceRequest, read_trace, trace_from_dump
from engine.protocol.arrays import float32_bytes
from engine.protocol.config import CacheConfig, SchedulerConfig, SchedulingPolicy, SpeculativeConfig
from engine.protocol.errors import ConfigError, EngineError
from support.scheduler.model_worker import propose_by_chance
from support.scheduler.recorded_harness import RecordedHarness

pytestmark = pytest.mark.slow


def setup(num_blocks: int = 100, **limits: object) -> Setup:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits})
    return Setup(config, CacheConfig(block_size=4), 128, 1, num_blocks)


ONE_SECOND = StepTimeModel(1.0, 0.0, 0.0, 0.0)
RATIOS = ((1.0, 1.5, 0.9), *[(1.1,)] * len(SIZES))


def test_two_overlapping_requests_have_the_expected_latencies():
    """Each step takes a second. The second request arrives during the first one's second step."""
    trace = [TraceRequest(0.0, 8, 3), TraceRequest(1.5, 8, 2)]
    result = simulate(setup(async_scheduling=False), trace, ONE_SECOND, 1)
    # First: tokens at 1, 2, 3. Second: waits until 2 for a step, tokens at 3, 4.
    assert result.latencies.first_token.tolist() == [1.0, 1.5]
    assert sorted(result.latencies.inter_token.tolist()) == [1.0, 1.0, 1.0]
    assert sorted(result.latencies.whole.tolist()) == [2.5, 3.0]
    summary = result.summary()
    assert summary["seconds"] == 4.0
    assert summary["output_tokens_per_s"] == pytest.approx(5 / 4, abs=0.1)
    assert summary["ttft_p50_ms"] == 1250.0
    assert summary["ttft_p90_ms"] == 1450.0
    assert summary["finished"] == 2


@pytest.mark.parametrize(
    ("num_stages", "is_async", "num_in_flight"),
    [
        (1, False, 1),
        (1, True, 2),
        (2, False, 2),
        (2, True, 3),
        (3, True, 4),
        (4, True, 5),
        (8, True, 9),
    ],
)
def test_an_arrival_waits_for_the_steps_in_flight(num_stages, is_async, num_in_flight):
    trace = [TraceRequest(0.0, 4, 40), TraceRequest(0.0, 4, 40), TraceRequest(10.5, 4, 1)]
    replica = setup(num_micro_batches=num_stages, async_scheduling=is_async)
    result = simulate(replica, trace, ONE_SECOND, 1)
    # It takes half a second until the next step ends and the request's own step is sent, after the others.
    assert result.latencies.first_token[2] == 0.5 + num_in_flight
    # Alone or together, requests get a token in every step; alternating, in every second one.
    assert max(result.latencies.inter_token) == min(num_stages, 2)


def test_step_time_depends_on_the_content_of_the_step():
    trace = [TraceRequest(0.0, 8, 2)]
    model = StepTimeModel(base=1.0, per_token=0.1, per_sequence=0.01, per_kv_token=0.001)
    result = simulate(setup(async_scheduling=False), trace, model, 1)
    # The prompt: 8 tokens, 1 sequence, 8 in the cache; then 1 token, 1 sequence, 9 in the cache.
    assert result.latencies.first_token[0] == pytest.approx(1 + 0.8 + 0.01 + 0.008)
    assert result.latencies.inter_token[0] == pytest.approx(1 + 0.1 + 0.01 + 0.009)


def test_replicas_share_the_requests():
    trace = [TraceRequest(0.0, 8, 4) for _ in range(4)]
    one = simulate(setup(max_num_seqs=1), trace, ONE_SECOND, 1)
    four = simulate(setup(max_num_seqs=1), trace, ONE_SECOND, 4)
    assert four.latencies.first_token.tolist() == [1.0, 1.0, 1.0, 1.0]
    assert one.seconds >= 4 * four.seconds
    assert one.output_tokens == four.output_tokens == 16


def test_policies_order_the_queue():
    trace = [TraceRequest(0.0, 4, 4), TraceRequest(0.1, 4, 4, priority=2)]
    trace += [TraceRequest(0.2, 4, 4, priority=1)]
    limits = {"max_num_seqs": 1, "async_scheduling": False}
    fcfs = simulate(setup(**limits), trace, ONE_SECOND, 1)
    priority = simulate(setup(policy=SchedulingPolicy.PRIORITY, **limits), trace, ONE_SECOND, 1)
    assert fcfs.latencies.first_token[1] < fcfs.latencies.first_token[2]
    assert priority.latencies.first_token[2] < priority.latencies.first_token[1]


def random_trace(count: int, rate: float) -> list[TraceRequest]:
    rng, trace, now = random.Random(1), [], 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        length, prefix = rng.randrange(1, 60), rng.choice(["", "a", "b"])
        shared = rng.randrange(length) if prefix else 0
        trace.append(
            TraceRequest(now, length, rng.randrange(1, 60), prefix=prefix, prefix_tokens=shared)
        )
    return trace


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(("rate", "num_replicas"), [(0.4, 1), (2.0, 1), (5.0, 3)])
def test_skipping_steps_changes_nothing(rate, num_replicas, is_async):
    model = StepTimeModel(0.1, 0.004, 0.01, 1e-4, ratios=RATIOS)
    trace = random_trace(120, rate)
    # Prompts take twice as long as the last decode step, which may have been skipped.
    replica = setup(num_blocks=60, async_scheduling=is_async, prefill_step_ms=1.0)
    fast, slow = (
        simulate(replica, trace, model, num_replicas, can_skip=skips) for skips in (True, False)
    )
    for name in ("first_token", "whole"):
        expected = getattr(slow.latencies, name)
        assert getattr(fast.latencies, name) == pytest.approx(expected, abs=1e-9)
    between = [np.sort(result.latencies.inter_token) for result in (fast, slow)]
    assert between[0] == pytest.approx(between[1], abs=1e-9)
    for name in ("num_finished", "output_tokens", "num_preemptions", "cached_tokens"):
        assert getattr(fast, name) == getattr(slow, name)
    assert slow.num_preemptions > 0 or rate < 1
    assert slow.cached_tokens > 0


@pytest.mark.parametrize("num_prefill", [0, 1])
def test_the_number_of_processes_changes_nothing(num_prefill):
    model = StepTimeModel(0.1, 0.001, 0.01, 1e-4, ratios=RATIOS)
    frontend = FrontendTimes(submission=(0.01, 0.0), delivery=(0.02, 0.0))
    prefill = PrefillReplicas(num_prefill, min_tokens=20)
    results = [
        simulate(
            setup(num_blocks=60),
            random_trace(120, 5.0),
            model,
            3,
            frontend=frontend,
            prefill=prefill,
            num_processes=count,
        )
        for count in (1, 2)
    ]
    for one, two in zip(*(result.latencies for result in results), strict=True):
        assert np.sort(one).tolist() == np.sort(two).tolist()
    assert results[0][1:] == results[1][1:]
    assert results[0].num_finished == 120


def test_an_error_in_a_process_is_raised():
    with pytest.raises(ConfigError):
        simulate(setup(num_blocks=1), random_trace(4, 5.0), ONE_SECOND, 2, num_processes=2)


def test_a_short_trace_begins_at_several_places_of_the_log():
    model = ONE_SECOND._replace(ratios=((1.0, 3.0) * 6, *[()] * len(SIZES)))
    trace = [TraceRequest(0.0, 4, 2), TraceRequest(100.0, 4, 2)]
    result = simulate(setup(async_scheduling=False), trace, model, 1)
    assert sorted({*result.latencies.first_token.tolist()}) == [1.0, 3.0]
    assert (result.num_finished, result.output_tokens) == (2, 4)


def test_a_fleet_sends_requests_with_equal_prefixes_to_the_same_replica():
    trace = [
        TraceRequest(5.0 * n, 40, 1, prefix=f"system{n % 3}", prefix_tokens=32) for n in range(12)
    ]
    # Each of the three prefixes is computed once, on whichever replica.
    assert simulate(setup(), trace, ONE_SECOND, 4).cached_tokens == 9 * 32


def test_only_shared_prefixes_are_cached():
    shared = [TraceRequest(5.0 * n, 40, 1, prefix="system", prefix_tokens=32) for n in range(3)]
    assert simulate(setup(), shared, ONE_SECOND, 1).cached_tokens == 64
    alone = [TraceRequest(5.0 * n, 40, 1) for n in range(3)]
    assert simulate(setup(), alone, ONE_SECOND, 1).cached_tokens == 0


def test_requests_that_cannot_run_are_counted():
    trace = [TraceRequest(0.0, 500, 4), TraceRequest(0.0, 4, 4), TraceRequest(0.0, 4, 4)]
    trace[2].deadline = 0.5
    result = simulate(setup(max_num_seqs=1, async_scheduling=False), trace, ONE_SECOND, 1)
    assert (result.num_finished, result.num_refused, result.num_expired) == (1, 1, 1)


@pytest.mark.parametrize("limit", ["max_num_queued_reqs", "max_num_queued_reqs_per_tenant"])
def test_requests_rejected_by_a_full_queue_are_counted(limit):
    trace = [TraceRequest(0.0, 8, 4) for _ in range(5)]
    result = simulate(setup(max_num_seqs=1, **{limit: 1}), trace, ONE_SECOND, 1)
    assert (result.num_finished, result.num_refused, result.num_expired) == (2, 3, 0)


def test_the_fit_finds_the_coefficients_and_none_is_negative():
    rng = np.random.default_rng(1)
    limits = np.log((2048, 64, 10**5, 10**6))
    loads = [StepLoad(*map(int, np.exp(rng.uniform(0, limits)))) for _ in range(200)]
    # Half of the steps compute prompts, beside requests that decode.
    loads += [load._replace(prompt_tokens=load.tokens * 3 // 4) for load in loads]
    truth = StepTimeModel(2e-3, 3e-5, 1e-5, 2e-8, 1e-8, per_prompt_token=6e-5)
    fitted = fit([StepSample(load, truth.seconds(load)) for load in loads])
    for name, value in truth.coefficients().items():
        assert fitted.model.coefficients()[name] == pytest.approx(value, rel=1e-3, abs=1e-12)
    assert fitted.mean_error < 1e-6 and fitted.held_out_error < 1e-6
    falling = [StepSample(StepLoad(n, 1, 1), 1.0 - n / 1000) for n in range(100)]
    assert min(fit(falling).model[:5]) >= 0
    with pytest.raises(EngineError, match="no step was recorded"):
        fit([])


def test_the_variation_of_recorded_steps_of_each_size_is_repeated_in_order():
    # Steps of middle size take longer than any sum of coefficients says.
    means = {1: 1.0, 100: 9.0, 1000: 20.0}
    loads = [StepLoad(tokens, 1, tokens) for tokens in means] * 40
    samples = [StepSample(load, means[load.tokens] * (1 + n % 2)) for n, load in enumerate(loads)]
    clock = StepClock(fit(samples).model)
    seconds = [clock.take(load) for load in loads * 2]
    assert seconds == pytest.approx([sample.seconds for sample in samples] * 2)


def test_clients_see_the_times_in_the_frontend():
    trace = [TraceRequest(0.0, 8, 3), TraceRequest(10.0, 8, 3)]
    frontend = FrontendTimes(submission=(0.5, 0.0), delivery=(0.25,))
    replica = setup(async_scheduling=False)
    result = simulate(replica, trace, ONE_SECOND, 1, frontend=frontend)
    assert result.latencies.first_token.tolist() == [1.75, 1.25]
    assert result.latencies.inter_token.tolist() == [1.0] * 4


def test_the_times_in_the_frontend_are_read_from_the_log():
    harness = RecordedHarness()
    harness.add(8, 4, delivery_times=float32_bytes([0.25, 0.5]))
    harness.drain()
    times = measure_frontend([harness.dump()])
    assert times.delivery == (0.25, 0.5) and times.submission == (0.0,)


def recorded() -> RecordedHarness:
    harness = RecordedHarness(max_num_seqs=4)
    for index in range(12):
        harness.add([1, 2, 3, 4, 5, 6, 7, 8, index], 5 + index)
        harness.step()
    harness.drain()
    return harness


def test_a_log_becomes_a_trace_with_measured_steps():
    harness = recorded()
    trace = trace_from_dump(harness.dump())
    assert [request.prompt_tokens for request in trace] == [9] * 12
    assert [request.output_tokens for request in trace] == [
        len(received.token_ids) for received in harness.received.values()
    ]
    samples = measure_steps(harness.dump())
    # The last step only removes the requests from the worker.
    assert len(samples) == len(harness.steps) - 1
    num_tokens = sum(stats.num_scheduled_tokens for stats in harness.stats)
    assert sum(sample.load.tokens for sample in samples) == num_tokens
    result = simulate(harness.dump().setup, trace, fit(samples).model, 1)
    assert result.num_finished == 12
    assert result.cached_tokens > 0


def test_the_answers_of_a_conversation_are_cached():
    harness = RecordedHarness(max_num_seqs=4)
    prompt = list(range(1, 14))
    for _ in range(4):
        key = harness.add(prompt, 11)
        harness.drain()
        prompt = [*prompt, *harness.received[key].token_ids, *range(50, 55)]
    trace = trace_from_dump(harness.dump())
    result = simulate(harness.dump().setup, trace, ONE_SECOND, 1)
    recorded_tokens = sum(stats.prefix_cache_hits for stats in harness.stats)
    assert result.cached_tokens == recorded_tokens > 3 * 13


def test_a_log_with_drafts_becomes_a_trace_of_tokens():
    harness = RecordedHarness(
        speculative=SpeculativeConfig(3), propose=propose_by_chance(random.Random(1), 512, 3)
    )
    keys = [harness.add(6 + index, 20 + index) for index in range(3)]
    harness.drain()
    trace = trace_from_dump(harness.dump())
    assert {request.prompt_tokens: request.output_tokens for request in trace} == {
        6 + index: len(harness.received[key].token_ids) for index, key in enumerate(keys)
    }


ALWAYS_TWO = DraftModel([0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [1.0])


@pytest.mark.parametrize(
    ("is_async", "seconds", "num_accepted"),
    [
        # 1 token, then 3 in every step until there are 9: no more drafts than tokens are wanted.
        (False, 4.0, 5),
        # The second step was scheduled before any drafts were known.
        (True, 5.0, 4),
    ],
)
def test_drafts_that_are_right_save_steps(is_async, seconds, num_accepted):
    trace = [TraceRequest(0.0, 8, 9)]
    replica = setup(async_scheduling=is_async, speculative=SpeculativeConfig(2))
    result = simulate(replica, trace, ONE_SECOND, 1, ALWAYS_TWO)
    assert (result.seconds, result.output_tokens) == (seconds, 9)
    assert result.accepted_tokens == num_accepted
    without = simulate(replica, trace, ONE_SECOND, 1)
    assert (without.seconds, without.draft_tokens) == (9.0, 0)


def test_drafts_that_are_wrong_change_nothing():
    trace = [TraceRequest(0.3 * n, 8, 6 + n) for n in range(5)]
    replica = setup(speculative=SpeculativeConfig(2))
    wrong = simulate(replica, trace, ONE_SECOND, 1, ALWAYS_TWO._replace(acceptance=[0.0]))
    without = simulate(replica, trace, ONE_SECOND, 1)
    assert wrong.draft_tokens > 0 and wrong.accepted_tokens == 0
    assert wrong.seconds == without.seconds
    assert wrong.latencies.first_token.tolist() == without.latencies.first_token.tolist()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_log_with_drafts_is_simulated_with_the_same_number(is_async):
    harness = RecordedHarness(
        num_blocks=200,
        max_in_flight=1 + is_async,
        async_scheduling=is_async,
        speculative=SpeculativeConfig(3),
        propose=propose_by_chance(random.Random(1), 512, 3),
    )
    for index in range(12):
        harness.add([index] * 6, 90)
        harness.step()
    harness.drain()
    dump = harness.dump()
    model = measure_drafts([dump])
    assert model is not None
    # A draft is correct with probability 0.7, and 0, 1, 2 or 3 drafts are equally likely.
    assert model.acceptance == pytest.approx([0.7] * 3, abs=0.2)
    assert model.after_some == pytest.approx([0.25] * 4, abs=0.1)
    result = simulate(dump.setup, trace_from_dump(dump), fit(measure_steps(dump)).model, 1, model)
    drafts = [stats.spec_decoding for stats in harness.stats if stats.spec_decoding is not None]
    num_accepted = sum(each.num_accepted_tokens for each in drafts)
    assert result.num_finished == 12
    assert result.accepted_tokens == pytest.approx(num_accepted, rel=0.15)
    assert measure_drafts([recorded().dump()]) is None


def test_the_recorded_policy_and_drafts_are_simulated(tmp_path, capsys):
    harness = RecordedHarness(
        policy="priority",
        speculative=SpeculativeConfig(3),
        propose=propose_by_chance(random.Random(1), 512, 3),
    )
    for index in range(4):
        harness.add(6 + index, 20)
    harness.drain()
    dump = str(write_dump(harness.scheduler, str(tmp_path), reason="t", wall_time=0.0, now=0.0))

    def run(*arguments: str) -> dict[str, object]:
        assert main([dump, "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)

    recorded_server = run()
    assert recorded_server["policy"] == "priority" and recorded_server["accepted_tokens"] > 0
    assert run("--policy", "fcfs")["policy"] == "fcfs"
    assert run("--drafts", "0,0")["draft_tokens"] == 0
    perfect = run("--drafts", "1,1")
    assert perfect["accepted_tokens"] == perfect["draft_tokens"] > 0
    assert main([dump, "--drafts", "1,2"]) == 2
    assert "--drafts needs two numbers from 0 to 1" in capsys.readouterr().err


def test_simulate_command_prints_a_report(tmp_path, capsys):
    harness = recorded()
    dump = write_dump(harness.scheduler, str(tmp_path), reason="test", wall_time=0.0, now=0.0)
    picture = tmp_path / "plot.svg"
    argv = [str(dump), "--policy", "fcfs,fair", "--replicas", "1,2", "--plot", str(picture)]
    assert main([*argv, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["policy"], line["replicas"]) for line in lines] == [
        ("fcfs", 1),
        ("fcfs", 2),
        ("fair", 1),
        ("fair", 2),
    ]
    assert all(line["finished"] == 12 and line["ttft_p50_ms"] > 0 for line in lines)
    root = ElementTree.fromstring(picture.read_text())
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 8
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("a step: ") and table[1].split()[:2] == ["policy", "replicas"]
    assert len({len(line) for line in table[1:]}) == 1


def test_a_saved_trace_can_be_loaded(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 7, "prompt_tokens": 8, "output_tokens": 2, "tenant": "b"}\n\n'
        '{"arrival": 5.5, "prompt_tokens": 4, "output_tokens": 1}\n'
    )
    assert [request.arrival for request in read_trace(path)] == [0.0, 1.5]
    argv = [str(path), "--num-blocks", "10", "--step-time", "1,0,0,0", "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == 3.5
    assert main([*argv, "--rate", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] < 3.5


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"arrival": 1}', "line 1: Object missing required field `prompt_tokens`"),
        ("nonsense", "line 1: JSON is malformed"),
        (
            '{"arrival": 1, "prompt_tokens": 0, "output_tokens": 1}',
            "prompt_tokens must be at least 1",
        ),
        ('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1, "x": 1}', "unknown field `x`"),
    ],
)
def test_an_invalid_trace_is_rejected(line, problem, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(line + "\n")
    assert main([str(path), "--num-blocks", "10", "--step-time", "1,0,0,0"]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "give --fit DUMP or --step-time"),
        (["--step-time", "1,0,0,0"], "give --num-blocks"),
        (["--step-time", "1,2"], "four numbers"),
        (["--num-blocks", "10", "--step-time", "1,0,0,0", "--rate", "0"], "--rate"),
        (["--num-blocks", "10", "--step-time", "1,0,0,0", "--rate", "nan"], "--rate"),
    ],
)
def test_missing_and_invalid_arguments_are_named(argv, problem, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 1, "prompt_tokens": 1, "output_tokens": 1}\n')
    assert main([str(path), *argv]) == 2
    assert problem in capsys.readouterr().err
