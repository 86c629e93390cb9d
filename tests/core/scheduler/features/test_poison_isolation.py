"""Requests that are resubmitted after a crash, and those suspected of causing it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from engine.core.scheduler.scheduler import Scheduler
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import CacheConfig, SchedulerConfig, SchedulingPolicy
from engine.protocol.messages import EngineCoreRequest, FinishReason
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import ModelRunnerOutput, SchedulerOutput
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector


def make_scheduler(**limits: int) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 16, **limits})  # type: ignore[arg-type]
    cache = CacheConfig(block_size=4)
    return Scheduler(config, cache, max_model_len=64, vocab_size=100, num_blocks=65)


def add(scheduler: Scheduler, index: int, *, prompt: int = 4, **fields: object) -> None:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    message = EngineCoreRequest(index, int32_bytes([7] * prompt), params, 0.0, **fields)  # type: ignore[arg-type]
    scheduler.add_request(0, message, 0.0)


def answer(scheduler: Scheduler, step: SchedulerOutput) -> list[int]:
    """Let the step's rows sample 9. Returns the request indices that got a token."""
    count = len(scheduler.get_step_in_flight(step).sampling)
    result = ModelRunnerOutput(step.step, sampled_token_ids=int32_bytes([9] * count))
    outputs = scheduler.update_from_output(step, result, 0.0)
    return [index for out in outputs.values() for index in int32_view(out.request_indices).tolist()]


def run(scheduler: Scheduler) -> Iterable[list[int]]:
    while scheduler.has_requests() and (step := scheduler.schedule(0.0)) is not None:
        yield answer(scheduler, step)


def test_a_resubmitted_request_generates_only_what_is_missing() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, output_token_ids=int32_bytes([9, 9]), is_resubmitted=True)
    step = scheduler.schedule(0.0)
    assert step is not None
    [new] = step.new_requests
    assert int32_view(new.token_ids).tolist() == [7, 7, 7, 7, 9, 9]
    assert new.num_prompt_tokens == 4
    got = [answer(scheduler, step), *run(scheduler)]
    assert sum(map(len, got)) == 4


def test_a_resubmitted_request_is_accepted_by_a_full_queue() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_reqs=1)
    for index in range(4):
        add(scheduler, index, is_resubmitted=True)
    assert scheduler.get_num_unfinished_requests() == 4
    add(scheduler, 4)
    assert scheduler.get_num_unfinished_requests() == 4


def test_suspected_requests_run_alone_until_they_have_a_token() -> None:
    scheduler = make_scheduler()
    for index in range(5):
        add(scheduler, index, prompt=24 if index == 3 else 4, is_suspect=index in (1, 3))
    got = list(run(scheduler))
    assert got[:4] == [[0], [1], [0, 1, 2], []]
    assert got[4] == [3]
    assert sum(map(len, got)) == 5 * 6
    assert got[5] == [0, 1, 2, 3, 4]


def test_a_suspected_request_waits_until_nothing_is_in_flight() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0)
    first = scheduler.schedule(0.0)
    add(scheduler, 1, is_suspect=True)
    assert first is not None and scheduler.schedule(0.0) is None
    answer(scheduler, first)
    alone = scheduler.schedule(0.0)
    assert alone is not None and scheduler.schedule(0.0) is None
    suspects_found = scheduler.find_crash_suspects()
    assert (
        suspects_found.poison_requests,
        suspects_found.suspects,
        suspects_found.unsuspected,
    ) == ([(0, 1)], [], [])
    assert answer(scheduler, alone) == [1]


def test_only_requests_computing_their_first_token_are_suspected() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0)
    step = scheduler.schedule(0.0)
    assert step is not None
    answer(scheduler, step)
    add(scheduler, 1, prompt=40)
    add(scheduler, 2)
    scheduler.schedule(0.0)
    scheduler.schedule(0.0)
    suspects_found = scheduler.find_crash_suspects()
    assert suspects_found.unsuspected == [(0, 0)]
    assert suspects_found.suspects == [(0, 1)]
    assert not suspects_found.poison_requests


def test_other_requests_run_while_a_suspected_request_does_not_fit() -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    cache = CacheConfig(block_size=4)
    scheduler = Scheduler(config, cache, max_model_len=64, vocab_size=100, num_blocks=17)
    add(scheduler, 0, prompt=40)
    step = scheduler.schedule(0.0)
    assert step is not None
    answer(scheduler, step)
    add(scheduler, 1, prompt=40, is_suspect=True)
    assert sum(map(len, run(scheduler))) == 5 + 6


def test_other_requests_run_while_a_suspected_request_waits_for_a_slot() -> None:
    harness = Harness(
        connector=ModelConnector(delays_free=lambda request: request.num_prompt_tokens == 8),
        max_num_seqs=2,
    )
    harness.worker.transfers.get_delay = lambda: 1000
    harness.add(8, 1)
    harness.step()
    keys = [harness.add([n] * 5, 20) for n in (1, 2)]
    harness.step()
    keys.append(harness.add([3] * 5, 3, is_suspect=True))
    for _ in range(60):
        harness.step()
    assert all(harness.received[key].is_over for key in keys)


@pytest.mark.parametrize("policy", SchedulingPolicy)
def test_a_suspected_request_gets_its_token_when_blocks_are_short(
    policy: SchedulingPolicy,
) -> None:
    harness = Harness(
        num_blocks=17, max_num_batched_tokens=16, policy=policy, enable_prefix_caching=False
    )
    harness.add([1] * 30, 20)
    harness.step()
    harness.step()
    harness.add([2] * 40, 20, is_suspect=True)
    harness.drain(500)
    assert all(received.reason is FinishReason.LENGTH for received in harness.received.values())
