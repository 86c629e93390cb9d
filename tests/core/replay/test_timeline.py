"""The timeline of a request matches what happened to it."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.connector import ExternalMatch
from engine.core.replay.__main__ import main
from engine.core.replay.dump import write_dump
from engine.core.replay.events import Schedule, Update
from engine.core.replay.replayer import Replayer
from engine.core.replay.timeline import (
    NEXT_STEP,
    REASONS,
    WHY_FIRST,
    RequestTimeline,
    find_requests,
)
from engine.core.scheduler.queues.admission_stop import AdmissionStop
from engine.core.scheduler.queues.request_queue import WaitReason
from engine.protocol.config import SchedulingPolicy
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.messages import EventKind, FinishReason
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.scheduler.model_connector import ModelConnector
from support.scheduler.recorded_harness import RecordedHarness


def timeline_of(harness: RecordedHarness, key: tuple[int, int]) -> str:
    dump = harness.dump()
    timeline = RequestTimeline(key, dump.setup.config.policy)
    for segment in dump.segments:
        replayer = Replayer(dump.setup, segment)
        timeline.begin(replayer.scheduler)
        for moment in replayer.run():
            timeline.apply_moment(moment, replayer.scheduler)
    timeline.finish()
    return "\n".join([*timeline.lines, timeline.summary()])


def test_a_request_alone_has_no_wait_reasons():
    harness = RecordedHarness()
    key = harness.add(6, 4)
    harness.drain()
    text = timeline_of(harness, key)
    assert "queued: 6 prompt tokens, at most 4 to generate" in text
    assert "computed its prompt in 1 step; its tokens/all tokens: 6/6 in " in text
    assert "3 decode steps" in text
    assert "with 0.0 other requests" in text
    assert "ended: length" in text
    assert "preempted" not in text


def test_wait_for_max_num_seqs_is_reported():
    harness = RecordedHarness(max_num_seqs=1)
    first = harness.add(6, 4)
    second = harness.add(6, 4)
    harness.drain()
    text = timeline_of(harness, second)
    events = {event.kind: event.timestamp for event in harness.received[second].events}
    waited = events[EventKind.SCHEDULED] - events[EventKind.QUEUED]
    assert f"waited {waited:.3f} s" in text
    assert "max_num_seqs requests were running" in text
    assert "1 others waiting" in text
    assert "max_num_seqs" not in timeline_of(harness, first)


def test_wait_for_the_token_budget_is_reported():
    harness = RecordedHarness(max_num_batched_tokens=8)
    harness.add(30, 2)
    key = harness.add(6, 2)
    harness.drain()
    assert "the step was full: max_num_batched_tokens" in timeline_of(harness, key)


def test_wait_for_blocks_and_preemption_are_reported():
    harness = RecordedHarness(num_blocks=10, max_num_seqs=4, enable_prefix_caching=False)
    keys = [harness.add([index] * 10, 14) for index in range(1, 4)]
    harness.drain()
    num_preemptions = {key: harness.received[key].num_events(EventKind.PREEMPTED) for key in keys}
    assert sum(num_preemptions.values()) > 0
    for key, number in num_preemptions.items():
        text = timeline_of(harness, key)
        assert text.count("preempted with") == number
        assert text.count("admitted again") == number
        assert ("no KV-cache blocks were free" in text) == bool(number)
    waited = timeline_of(harness, keys[2])
    assert "the next in the queue did not fit into the free KV-cache blocks" in waited


def causes(harness: RecordedHarness, key: tuple[int, int]) -> set[str]:
    """Return the wait reasons of the request."""
    harness.drain()
    summary = timeline_of(harness, key).splitlines()[-1]
    return {part.split(" s: ")[1] for part in summary.split("; ") if " s: " in part}


def test_wait_for_the_turn_of_a_tenant_is_reported():
    harness = RecordedHarness(max_num_seqs_per_tenant=1)
    first = harness.add(6, 4, tenant="a")
    second = harness.add(6, 4, tenant="a")
    other = harness.add(6, 4, tenant="b")
    reason = "max_num_seqs_per_tenant requests of its tenant were running"
    assert causes(harness, second) == {NEXT_STEP, reason}
    assert causes(harness, first) == causes(harness, other) == {NEXT_STEP}


def test_wait_for_a_lora_slot_is_reported():
    harness = RecordedHarness(max_loras=1)
    harness.add(6, 4, lora_name="x")
    key = harness.add(6, 4, lora_name="y")
    assert causes(harness, key) == {
        NEXT_STEP,
        "requests of max_loras other adapters were running",
        "the workers were loading its adapter",
    }


def test_wait_behind_another_adapter_is_reported():
    harness = RecordedHarness(max_loras=1, max_in_flight=1)
    harness.add(6, 10, lora_name="x")
    harness.add(6, 4, lora_name="y")
    for _ in range(3):
        harness.step()
    key = harness.add(6, 4, lora_name="x")
    reason = "the next slot for an adapter was kept for a request that had waited longer"
    assert reason in causes(harness, key)


def test_wait_for_the_answer_of_a_connector_is_reported():
    answers = iter([None, None, None])
    connector = ModelConnector(lambda request, num_computed: next(answers, ExternalMatch(0)))
    harness = RecordedHarness(connector=connector)
    key = harness.add(6, 4)
    reason = "the KV connector did not know yet what it can load"
    assert causes(harness, key) == {NEXT_STEP, reason}


def test_wait_for_a_load_is_reported():
    connector = ModelConnector(lambda request, num_computed: ExternalMatch(4 - num_computed, True))
    harness = RecordedHarness(connector=connector)
    key = harness.add(6, 4)
    assert causes(harness, key) == {NEXT_STEP, "its KV cache was being loaded"}


def test_wait_as_a_long_prompt_and_then_for_max_num_seqs_is_reported():
    harness = RecordedHarness(
        max_num_seqs=3,
        max_num_batched_tokens=32,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=4,
    )
    harness.add([1] * 30, 20)
    key = harness.add([2] * 20, 1)
    for index in range(2):
        harness.add([3, index], 20)
    assert causes(harness, key) == {
        NEXT_STEP,
        "max_long_partial_prefills other long prompts were being computed",
        "max_num_seqs requests were running",
    }


def test_max_num_seqs_is_reported_before_the_token_budget():
    harness = RecordedHarness(max_num_seqs=1, max_num_batched_tokens=6)
    harness.add(6, 40)
    key = harness.add([2] * 6, 1)
    assert causes(harness, key) == {NEXT_STEP, "max_num_seqs requests were running"}


def test_wait_for_the_encoder_is_reported():
    harness = RecordedHarness(max_num_encoder_input_tokens=5, encoder_cache_size=20)
    for content in (b"a", b"b"):
        key = harness.add([1] * 8, 2, inputs=[EncoderInput(0, 4, content, 4, b"pixels")])
    reason = "the encoder budget of the step or the encoder cache was used up"
    assert causes(harness, key) == {NEXT_STEP, reason}


def test_wait_for_a_suspected_request_is_reported():
    harness = RecordedHarness()
    harness.add(6, 4)
    harness.step()
    harness.add([2] * 6, 4, is_suspect=True)
    key = harness.add([3] * 6, 4)
    reason = "a request suspected of having killed a worker ran alone"
    assert causes(harness, key) == {NEXT_STEP, reason}


def timed(harness: RecordedHarness) -> dict[int, float]:
    """Return the duration of each step in seconds."""
    seconds, last, sent = {}, 0.0, {}
    for event in harness.dump().segments[-1].events:
        if isinstance(event, Schedule) and event.step is not None:
            sent[event.step.step] = event.now
        elif isinstance(event, Update):
            number = event.result.step
            seconds[number] = event.now - max(sent[number], last)
            last = event.now
    return seconds


def test_steps_of_a_prompt_have_durations():
    harness = RecordedHarness(max_num_batched_tokens=8)
    key = harness.add(20, 2)
    harness.drain()
    first, second, third = (1e3 * timed(harness)[number] for number in (1, 2, 3))
    shown = f"8/8 in {first:.1f} ms, 8/8 in {second:.1f} ms, 4/4 in {third:.1f} ms"
    assert f"in 3 steps; its tokens/all tokens: {shown}" in timeline_of(harness, key)


def test_wait_for_steps_in_flight_names_the_slowest_step():
    harness = RecordedHarness()
    harness.add(40, 9)
    harness.schedule()
    harness.schedule()
    key = harness.add([2] * 6, 2)
    harness.now += 20.0
    harness.drain()
    text = timeline_of(harness, key)
    slowest = timed(harness)[1]
    assert slowest > 20
    detail = (
        f"{NEXT_STEP} (2 in flight, the slowest {slowest:.3f} s long with 40 tokens of 1 request)"
    )
    assert detail in text


@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_expired_deadline_is_reported_with_the_progress(is_waiting):
    harness = RecordedHarness(max_num_seqs=1)
    if is_waiting:
        harness.add([1] * 6, 20)
    key = harness.add([2] * 6, 30, deadline=10.5)
    harness.drain()
    assert harness.received[key].reason is FinishReason.EXPIRED
    text = timeline_of(harness, key)
    did = "waited" if is_waiting else "was running"
    assert f"ended: expired, its deadline passed 10.500 s after its arrival, while it {did}" in text
    assert ("max_num_seqs requests were running" in text) == is_waiting
    for line in text.splitlines():
        assert not line.rstrip().endswith(":"), "each wait has a cause"
        if "waited" in line and "ended" not in line:
            assert line.split(": ")[1]
    whole, *parts = (float(part.split(" s")[0]) for part in text.splitlines()[-1].split("; "))
    assert sum(parts) == pytest.approx(whole)


def test_requests_admitted_earlier_are_reported_with_the_policy():
    harness = RecordedHarness(max_num_seqs=1, policy="priority")
    harness.add(6, 4, priority=1)
    harness.step()
    key = harness.add([2] * 6, 4, priority=5)
    for index in range(5):
        harness.add([3, index], 2, priority=2)
    harness.drain()
    text = timeline_of(harness, key)
    who = "overtaken by 5 requests (0/2, 0/3, 0/4, …) that came later"
    assert f"{who}: the priority policy puts smaller values first" in text
    assert "overtaken" not in timeline_of(harness, (0, 2))


def test_a_request_set_aside_reports_which_requests_were_admitted_earlier():
    harness = RecordedHarness(max_num_seqs_per_tenant=1)
    harness.add(6, 8, tenant="a")
    second = harness.add(6, 4, tenant="a")
    harness.add([5] * 6, 4, tenant="b")
    harness.drain()
    who = "overtaken by 1 request (0/2) that came later"
    assert f"{who}: requests behind one that is set aside may pass it" in timeline_of(
        harness, second
    )


def test_every_wait_reason_has_a_description():
    assert WHY_FIRST.keys() == set(SchedulingPolicy)
    assert REASONS.keys() == {*AdmissionStop, *WaitReason}


def test_displacement_by_priority_is_reported():
    harness = RecordedHarness(max_num_seqs=1, policy="priority", priority_preemption=True)
    low = harness.add(6, 10, priority=5)
    harness.step()
    harness.add([9] * 6, 2, priority=0)
    harness.drain()
    assert "a request of higher priority took its place" in timeline_of(harness, low)


def test_wait_for_a_grammar_and_abort_are_reported():
    harness = RecordedHarness()
    other = harness.add(6, 30)
    key = harness.add(
        [7] * 6, 20, structured_output=StructuredOutput(GrammarKind.JSON_OBJECT, "{}")
    )
    for _ in range(3):
        harness.step()
    harness.compile_grammars()
    for _ in range(3):
        harness.step()
    harness.abort(key)
    harness.drain()
    text = timeline_of(harness, key)
    assert "its grammar was being compiled" in text
    assert "ended: aborted by the client or its frontend" in text
    assert "grammar" not in timeline_of(harness, other)


def test_a_request_that_is_older_than_the_log_has_a_partial_timeline():
    harness = RecordedHarness(segment_bytes=4_000, num_blocks=200, max_model_len=128)
    key = harness.add(6, 100)
    for index in range(12):
        harness.add([index] * 5, 3)
        for _ in range(4):
            harness.step()
    text = timeline_of(harness, key)
    assert "queued, before the log begins" in text
    assert "still running where the log ends" in text


def test_durations_of_a_timeline_add_up():
    harness = RecordedHarness(num_blocks=10, max_num_seqs=2, enable_prefix_caching=False)
    keys = [harness.add([index] * 10, 14) for index in range(1, 5)]
    harness.drain()
    for key in keys:
        summary = timeline_of(harness, key).splitlines()[-1]
        whole, *parts = (float(part.split(" s")[0]) for part in summary.split("; "))
        assert sum(parts) == pytest.approx(whole)


def test_requests_are_found_by_their_names(tmp_path, capsys):
    harness = RecordedHarness()
    for key in (harness.add(4, 2), harness.add(5, 2)):
        harness.scheduler.requests[key].request_id = "unused"
    for event in harness.scheduler.log.events:
        event.message.request_id = f"req-{event.message.request_index}-abcdef"
    harness.drain()
    assert find_requests(harness.dump(), "req-1") == [(0, 1)]
    assert find_requests(harness.dump(), "0/0") == [(0, 0)]
    assert find_requests(harness.dump(), "req-") == [(0, 0), (0, 1)]
    assert find_requests(harness.dump(), "") == []
    path = write_dump(harness.scheduler, str(tmp_path), reason="test", wall_time=0.0, now=0.0)
    assert main([str(path), "--why", "req-1"]) == 0
    assert "request 0/1" in capsys.readouterr().out
    assert main([str(path), "--why", "nobody"]) == 2
    assert "req-1-abcdef" in capsys.readouterr().err
