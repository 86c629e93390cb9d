"""Outputs that clients receive. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import random

import pytest
from engine.protocol.arrays import float32_bytes, int32_bytes, int32_view
from engine.protocol.config import SpeculativeConfig
from engine.protocol.errors import EngineError
from engine.protocol.messages import EventKind, FinishReason
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from engine.protocol.worker_messages import ModelRunnerOutput, RowLogprobs
from support.scheduler.harness import Harness
from support.scheduler.model_worker import propose_by_chance
from support.scheduler.recorded_harness import RecordedHarness, replay


def generated(prompt: list[int], max_tokens: int) -> list[int]:
    """Return the tokens that a prompt generates when nothing stops it."""
    harness = Harness()
    key = harness.add(prompt, max_tokens)
    harness.drain()
    return harness.received[key].token_ids


PROMPT = [3, 1, 4, 1, 5]


def test_4_1_eos_ends_a_request_and_its_stop_reason_is_none():
    tokens = generated(PROMPT, 8)
    harness = Harness()
    key = harness.add(PROMPT, 8, eos=(tokens[3],))
    harness.drain()
    assert harness.received[key].token_ids == tokens[:4]
    assert harness.received[key].finished.reason is FinishReason.STOP
    assert harness.received[key].finished.stop_reason is None


def test_4_1_ignore_eos_generates_up_to_the_limit():
    tokens = generated(PROMPT, 8)
    harness = Harness()
    key = harness.add(PROMPT, 8, eos=(tokens[3],), ignore_eos=True)
    harness.drain()
    assert harness.received[key].token_ids == tokens
    assert harness.received[key].reason is FinishReason.LENGTH


def test_4_1_a_stop_token_is_the_stop_reason():
    tokens = generated(PROMPT, 8)
    harness = Harness()
    key = harness.add(PROMPT, 8, stop_token_ids=(tokens[2],))
    harness.drain()
    assert harness.received[key].token_ids == tokens[:3]
    assert harness.received[key].finished.stop_reason == tokens[2]


def test_4_1_no_stop_condition_applies_before_min_tokens():
    tokens = generated(PROMPT, 8)
    harness = Harness()
    key = harness.add(PROMPT, 8, eos=(tokens[1], tokens[4]), min_tokens=4)
    harness.drain()
    assert harness.received[key].token_ids == tokens[:5]


def test_4_1_max_model_len_ends_a_request():
    harness = Harness(max_model_len=20)
    key = harness.add(15, None)
    harness.drain()
    assert len(harness.received[key].token_ids) == 5
    assert harness.received[key].reason is FinishReason.LENGTH


def test_4_1_a_request_that_fills_the_whole_cache_ends_by_length():
    harness = Harness(num_blocks=4, block_size=4)
    key = harness.add(5, None)
    harness.drain()
    assert len(harness.received[key].token_ids) == 3 * 4 + 1 - 5
    assert harness.received[key].reason is FinishReason.LENGTH


def test_4_1_outputs_are_grouped_by_client():
    harness = Harness()
    keys = [harness.add([n + 1] * 3, 5, client=n % 3) for n in range(6)]
    harness.drain()
    assert all(len(harness.received[key].token_ids) == 5 for key in keys)


def test_4_2_a_client_is_notified_of_ended_requests_without_tokens():
    harness = Harness()
    mine = harness.add(5, 50, client=1)
    harness.add(5, 3, client=0)
    harness.step()
    harness.abort(mine)
    harness.step()
    assert harness.received[mine].is_over
    assert harness.received[mine].finished is None
    harness.drain()


def test_4_2_an_end_outside_of_a_step_is_sent_at_once():
    harness = Harness(max_num_seqs=1)
    harness.add(5, 50)
    waiting = harness.add(5, 50, client=2)
    harness.schedule()
    harness.abort(waiting)
    outputs = harness.scheduler.take_outputs(7.0)
    assert int32_view(outputs[2].finished_set).tolist() == [waiting[1]]
    assert outputs[2].timestamp == 7.0
    assert outputs[2].stats is None
    assert harness.scheduler.take_outputs(8.0) == {}


def test_the_last_request_that_ends_outside_of_a_step_reports_that_none_waits():
    harness = Harness()
    harness.abort(harness.add(5, 50))
    (outputs,) = harness.scheduler.take_outputs(7.0).values()
    assert outputs.stats is not None
    assert (outputs.stats.num_running, outputs.stats.num_waiting) == (0, 0)


def test_another_client_learns_that_the_requests_of_a_lost_client_run_no_more():
    harness = Harness(max_num_seqs=2, max_in_flight=1)
    harness.add(4, 2)
    for _ in range(2):
        harness.add(4, 30, client=1)
    harness.step()
    harness.step()
    harness.scheduler.finish_client(1)
    (outputs,) = harness.scheduler.take_outputs(7.0).values()
    assert outputs.stats is not None
    assert (outputs.stats.num_running, outputs.stats.num_waiting) == (0, 0)
    assert harness.scheduler.take_outputs(8.0) == {}


def test_4_3_aborting_a_running_ended_or_unknown_request_is_harmless():
    harness = Harness(max_in_flight=3)
    key, other = harness.add(5, 50), harness.add(6, 5)
    harness.schedule()
    harness.schedule()
    harness.abort(key)
    harness.abort(key)
    harness.scheduler.finish_requests([(7, 7), key, key], FinishReason.ABORT)
    twice = harness.add(4, 5)
    harness.abort(twice, twice)
    harness.drain()
    assert harness.received[key].token_ids == []
    assert len(harness.received[other].token_ids) == 5


def test_4_3_all_requests_of_a_lost_client_end():
    harness = Harness(max_num_seqs=2)
    lost = [harness.add([n + 1] * 4, 30, client=1) for n in range(3)]
    kept = harness.add(5, 4)
    harness.schedule()
    harness.scheduler.finish_client(1)
    for key in lost:
        harness.received[key].is_over = harness.received[key].was_aborted = True
    harness.drain()
    assert len(harness.received[kept].token_ids) == 4
    assert all(harness.received[key].token_ids == [] for key in lost)


def test_4_4_a_partial_prefill_produces_no_output():
    harness = Harness(max_num_batched_tokens=8, max_in_flight=1)
    key = harness.add(20, 3)
    for expected in (0, 0, 1, 2, 3):
        harness.step()
        assert len(harness.received[key].token_ids) == expected
    harness.drain()


def row_logprobs(slot: int, token: int) -> RowLogprobs:
    return RowLogprobs(slot, 1, int32_bytes([token]), float32_bytes([-0.5]), int32_bytes([1]))


def test_4_4_prompt_logprobs_are_sent_once_with_the_first_token():
    harness = Harness(max_num_batched_tokens=4)
    scheduler = harness.scheduler
    harness.add(6, 4, prompt_logprobs=1)
    first = scheduler.schedule(0.0)
    result = ModelRunnerOutput(first.step, prompt_logprobs=[row_logprobs(0, 11)])
    outputs = scheduler.update_from_output(first, result, 0.0)
    assert outputs[0].prompt_logprobs == []
    second = scheduler.schedule(0.0)
    result = ModelRunnerOutput(
        second.step,
        int32_bytes([9]),
        prompt_logprobs=[row_logprobs(0, 12)],
        logprobs=[row_logprobs(0, 9)],
    )
    outputs = scheduler.update_from_output(second, result, 0.0)
    rows = outputs[0].prompt_logprobs
    assert [int32_view(row.token_ids).tolist() for row in rows] == [[11], [12]]
    assert [row.request_index for row in outputs[0].logprobs] == [0]
    third = scheduler.schedule(0.0)
    result = ModelRunnerOutput(third.step, int32_bytes([9]), prompt_logprobs=[row_logprobs(0, 12)])
    assert scheduler.update_from_output(third, result, 0.0)[0].prompt_logprobs == []


def test_4_4_logprobs_of_a_request_that_left_its_slot_are_dropped():
    harness = Harness()
    scheduler = harness.scheduler
    key = harness.add(6, 4)
    step = scheduler.schedule(0.0)
    harness.abort(key)
    result = ModelRunnerOutput(
        step.step, int32_bytes([9]), logprobs=[row_logprobs(0, 9)], nan_slots=int32_bytes([0])
    )
    outputs = scheduler.update_from_output(step, result, 0.0)
    assert outputs[0].logprobs == []
    assert outputs[0].stats.num_corrupted_requests == 0


def test_4_4_a_request_with_nans_is_counted_once():
    harness = Harness()
    scheduler = harness.scheduler
    harness.add(6, 8)
    counts = []
    for _ in range(3):
        step = scheduler.schedule(0.0)
        result = ModelRunnerOutput(step.step, int32_bytes([9]), nan_slots=int32_bytes([0]))
        counts.append(scheduler.update_from_output(step, result, 0.0)[0].stats)
    assert [stats.num_corrupted_requests for stats in counts] == [1, 0, 0]


def test_4_5_statistics_go_to_one_client_a_step_even_without_tokens():
    harness = Harness(max_num_batched_tokens=8, max_in_flight=1, max_num_seqs=2)
    harness.scheduler.add_client(0)
    for n in range(3):
        harness.add([n + 1] * 16, 3, client=1 + n % 2)
    harness.step()
    stats = harness.stats[-1]
    assert len(harness.stats) == 1
    assert (stats.num_running, stats.num_waiting) == (1, 2)
    assert (stats.num_steps, stats.num_scheduled_tokens) == (1, 8)
    assert stats.kv_cache_usage == pytest.approx(2 / 63)
    harness.drain()
    assert len(harness.stats) == len(harness.steps)
    assert sum(stats.num_scheduled_tokens for stats in harness.stats) == 3 * (16 + 2)


@pytest.mark.parametrize("is_async", [False, True])
def test_4_5_steps_count_prompts_once_and_every_generated_token(is_async):
    harness = Harness(
        num_blocks=14,
        max_num_batched_tokens=12,
        max_num_seqs=3,
        max_in_flight=1 + is_async,
        async_scheduling=is_async,
        speculative=SpeculativeConfig(3),
        propose=propose_by_chance(random.Random(1), 512, 3),
    )
    keys = [harness.add([1, 2, 3, 4, 5, 6, 7, 8, n % 2], 14) for n in range(5)]
    harness.drain()
    assert sum(stats.num_preemptions for stats in harness.stats) > 0
    assert sum(stats.prefix_cache_hits for stats in harness.stats) > 0
    num_tokens = [count for s in harness.stats for count in int32_view(s.step_tokens).tolist()]
    num_generated = sum(len(harness.received[key].token_ids) for key in keys)
    assert sum(num_tokens) == 5 * 9 + num_generated
    assert 0 not in num_tokens and len(num_tokens) <= len(harness.steps)


def test_4_6_events_have_increasing_times():
    harness = Harness(num_blocks=9, block_size=2, max_in_flight=1, max_num_seqs=4)
    keys = [harness.add([n] * 5, 8) for n in range(1, 7)]
    harness.drain()
    for key in keys:
        events = harness.received[key].events
        assert [event.kind for event in events[:2]] == [EventKind.QUEUED, EventKind.SCHEDULED]
        assert harness.received[key].num_events(EventKind.FIRST_TOKEN) == 1
        assert [e.timestamp for e in events] == sorted(e.timestamp for e in events)
        resumed = harness.received[key].num_events(EventKind.SCHEDULED) - 1
        assert resumed == harness.received[key].num_events(EventKind.PREEMPTED)


def test_trace_headers_are_returned_when_a_request_ends():
    harness = Harness(max_model_len=20)
    keys = [
        harness.add(size, 3, trace_headers={"traceparent": f"trace {size}"}) for size in (4, 20)
    ]
    harness.drain()
    for key, size in zip(keys, (4, 20), strict=True):
        assert harness.received[key].finished.trace_headers == {"traceparent": f"trace {size}"}
    without = harness.add(4, 3)
    harness.drain()
    assert harness.received[without].finished.trace_headers is None


def test_2_6_a_rejected_request_ends_with_its_reason():
    harness = Harness(max_model_len=20)
    key = harness.add(20, 3)
    assert not harness.scheduler.has_requests()
    harness.drain()
    assert harness.received[key].reason is FinishReason.IGNORED
    assert "20 tokens" in harness.received[key].finished.message


def test_a_full_queue_rejects_requests():
    harness = Harness(max_num_seqs=1, max_num_queued_reqs=2)
    harness.add(5, 5)
    harness.schedule()
    keys = [harness.add(5, 5) for _ in range(3)]
    harness.drain()
    assert [harness.received[key].reason for key in keys] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.REJECTED,
    ]
    assert "max_num_queued_reqs=2" in harness.received[keys[2]].finished.message


def num_cached(harness: Harness, prompt: list[int]) -> int:
    """Return how many tokens of a prompt another request finds in the cache."""
    key = harness.add(prompt, 1)
    while not harness.received[key].is_over:
        harness.step()
    return harness.received[key].events[1].num_cached_tokens


def test_a_row_without_allowed_tokens_ends_its_request_and_keeps_its_blocks_valid():
    harness = Harness()
    system = [1] * 12
    num_cached(harness, [*system, 2])
    bad, good = harness.add([*system, *[3] * 9], 30), harness.add([2] * 12, 6)
    harness.step()
    harness.worker.fail_next[0] = "the constraints left no token"
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert harness.received[bad].finished.message == "the constraints left no token"
    assert harness.received[good].reason is FinishReason.LENGTH
    assert num_cached(harness, [*system, *[3] * 9]) == 20


def test_blocks_computed_by_a_row_with_nans_are_uncached_but_not_its_prefix():
    harness = Harness()
    system, rest = [1] * 12, [3] * 9
    num_cached(harness, [*system, 2])
    bad = harness.add([*system, *rest], 100)
    harness.worker.nan_next.add(0)
    for _ in range(3):
        harness.step()
    assert num_cached(harness, [*system, *rest]) == 12
    # Blocks that another request has computed since stay cached.
    harness.worker.nan_next.add(harness.request(bad).slot)
    harness.step()
    harness.step()
    assert num_cached(harness, [*system, *rest]) == 20


def test_an_output_of_the_wrong_step_or_shape_is_rejected():
    harness = Harness()
    harness.add(5, 5)
    step = harness.scheduler.schedule(0.0)
    with pytest.raises(EngineError, match="output of step 2"):
        harness.scheduler.update_from_output(step, ModelRunnerOutput(2), 0.0)
    with pytest.raises(EngineError, match="0 tokens for 1 row"):
        harness.scheduler.update_from_output(step, ModelRunnerOutput(1), 0.0)


JSON = StructuredOutput(GrammarKind.JSON_OBJECT)
JSON_APART = StructuredOutput(GrammarKind.JSON_OBJECT, is_isolated=True)


def test_6_4_a_constrained_request_waits_for_its_grammar_and_keeps_its_place():
    harness = Harness(max_num_seqs=1)
    first = harness.add(5, 4, structured_output=JSON)
    second, third = harness.add(5, 4), harness.add(5, 4)
    harness.step()
    harness.compile_grammars()
    harness.drain()
    starts = {key: harness.received[key].events[1].timestamp for key in (first, second, third)}
    assert starts[second] < starts[first] < starts[third]


@pytest.mark.parametrize("is_async", [False, True])
def test_6_4_a_request_that_waits_for_its_mask_delays_no_other(is_async):
    harness = Harness(async_scheduling=is_async)
    slow = harness.add(5, 3, structured_output=JSON_APART)
    harness.compile_grammars()
    fast = harness.add(5, 12)
    while harness.step():
        pass
    assert len(harness.received[slow].token_ids) == 1
    assert len(harness.received[fast].token_ids) == 12
    harness.drain()
    assert [token % 2 for token in harness.received[slow].token_ids] == [0, 1, 0]


@pytest.mark.parametrize("waits", [False, True])
def test_6_4_a_preempted_request_waits_for_its_mask_too(waits):
    harness = RecordedHarness(async_scheduling=False)
    slow = harness.add(5, 4, structured_output=JSON_APART)
    harness.compile_grammars()
    harness.step()
    if not waits:
        harness.compile_grammars()
    harness.scheduler.reset_prefix_cache(reset_running_requests=True)
    step = harness.schedule()
    assert (len(step.new_requests) == 0) == waits
    harness.update()
    harness.drain()
    assert [token % 2 for token in harness.received[slow].token_ids] == [0, 1, 0, 1]
    replay(harness.dump())


def test_6_4_a_resubmitted_request_waits_for_the_mask_after_its_output():
    harness = Harness()
    harness.add(5, 4, structured_output=JSON_APART)
    for _ in range(2):
        harness.compile_grammars()
        harness.step()
    harness.lose_core()
    [received] = harness.received.values()
    assert len(received.token_ids) == 2
    harness.compile_grammars()
    harness.schedule()
    assert not harness.scheduler.slots.is_running.any()
    harness.drain()
    assert [token % 2 for token in received.token_ids] == [0, 1, 0, 1]


def test_6_4_a_grammar_lost_between_two_tokens_ends_only_its_request():
    harness = Harness()
    bad = harness.add(5, 8, structured_output=JSON_APART)
    harness.compile_grammars()
    good = harness.add(5, 8)
    harness.step()
    harness.grammar.compiling.clear()
    harness.scheduler.grammar_ready(bad, "the grammar takes more than 5 s")
    harness.drain()
    assert "5 s" in harness.received[bad].finished.message
    assert len(harness.received[good].token_ids) == 8


def test_6_4_the_bitmask_of_a_step_follows_the_previous_token():
    harness = Harness()
    key = harness.add(5, 6, structured_output=JSON)
    harness.add(9, 6)
    harness.drain()
    assert [token % 2 for token in harness.received[key].token_ids] == [0, 1, 0, 1, 0, 1]
    assert all(int32_view(step.grammar_slots).tolist() in ([0], []) for step in harness.steps)


def test_6_4_a_grammar_that_does_not_compile_ends_only_its_request():
    harness = Harness()
    bad, good = harness.add(5, 4, structured_output=JSON), harness.add(5, 4)
    harness.scheduler.grammar_ready(bad, "unbalanced parenthesis at 7")
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert harness.received[bad].finished.message == "unbalanced parenthesis at 7"
    assert harness.received[good].reason is FinishReason.LENGTH


@pytest.mark.parametrize("eos", [(), (7,)])
def test_6_4_a_token_against_the_grammar_ends_only_its_request(eos):
    harness = Harness()
    key = harness.add(5, 4, eos=eos, structured_output=JSON)
    harness.compile_grammars()
    step = harness.scheduler.schedule(0.0)
    outputs = harness.scheduler.update_from_output(
        step, ModelRunnerOutput(step.step, int32_bytes([7])), 0.0
    )
    assert outputs[0].finished[0].reason is FinishReason.ERROR
    assert "grammar" in outputs[0].finished[0].message
    assert key not in harness.scheduler.requests


def test_a_pooled_prompt_of_the_maximum_length_is_computed_in_one_step():
    harness = Harness(max_model_len=64, async_scheduling=True)
    key = harness.add(64, 1, pooling_params=PoolingParams(PoolingKind.CLS, True))
    step = harness.schedule()
    assert step is not None and int32_view(step.chunks).tolist() == [0, 64]
    # The step is in flight.
    assert harness.schedule() is None
    harness.drain()
    assert harness.received[key].finished is not None


def test_progress_of_long_prompts_is_reported_before_the_first_token_if_asked_for():
    harness = Harness(max_num_batched_tokens=16)
    asks = harness.add(50, 2, reports_progress=True)
    silent = harness.add(50, 2)
    harness.drain()
    events = [event for event in harness.received[asks].events if event.kind is EventKind.PROGRESS]
    counts = [event.num_cached_tokens for event in events]
    assert counts and counts == sorted(set(counts)) and counts[-1] < 50
    first = next(e for e in harness.received[asks].events if e.kind is EventKind.FIRST_TOKEN)
    assert all(event.timestamp <= first.timestamp for event in events)
    assert not harness.received[silent].num_events(EventKind.PROGRESS)
