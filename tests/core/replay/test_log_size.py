"""The event log keeps the latest events in bounded memory, and only what a replay reads."""

from __future__ import annotations

import msgspec
import pytest
from engine.core.replay.events import AddRequest, Update
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.scheduler.recorded_harness import RecordedHarness, replay
from support.scheduler.recorded_traffic import SMALL_SEGMENT


def test_memory_is_bounded_and_the_latest_events_are_kept():
    harness = RecordedHarness(segment_bytes=SMALL_SEGMENT, num_blocks=200)
    log = harness.scheduler.log
    for index in range(300):
        harness.add([index] * 5, 6)
        harness.step()
        assert len(log.segments) <= 2
        assert sum(len(segment.events) for segment in log.segments) < 400
    arrivals = [e for s in log.segments for e in s.events if isinstance(e, AddRequest)]
    assert arrivals[-1].message.request_index == 299


LARGE = 100_000
CONTENTS = {
    "media": {"inputs": [EncoderInput(0, 2, bytes(32), 2, bytes(LARGE))]},
    "a grammar": {"structured_output": StructuredOutput(GrammarKind.REGEX, "a" * LARGE)},
    "biases": {"logit_bias": dict.fromkeys(range(LARGE // 8), 1.5)},
    "bad words": {"bad_words_token_ids": ((70_000,) * LARGE,)},
    "allowed tokens": {"allowed_token_ids": (1,) * LARGE},
    "parameters of a connector": {"kv_transfer_params": {"name": "a" * LARGE}},
    "a trace": {"trace_headers": {"tracestate": "a" * LARGE}},
}
"""Parts of requests that no replay reads."""


@pytest.mark.parametrize("content", CONTENTS)
def test_content_that_no_replay_reads_is_not_kept(content):
    harness = RecordedHarness(max_num_encoder_input_tokens=4, encoder_cache_size=4)
    harness.add(5, 2, **CONTENTS[content])
    harness.compile_grammars()
    harness.drain()
    [segment] = harness.scheduler.log.segments
    assert len(msgspec.msgpack.encode(segment.events)) < 3_000
    replay(harness.dump())


@pytest.mark.parametrize(
    ("params", "size"),
    [
        ({"stop_token_ids": tuple(range(1000))}, 4_000),
        ({"predicted": [1] * 1000}, 4_000),
        ({"inputs": [EncoderInput(1, 2, bytes(32), 2, places=bytes(4_000))]}, 4_000),
    ],
)
def test_the_size_of_the_log_includes_what_a_replay_reads(params, size):
    harness = RecordedHarness()
    harness.add(5, 2, **params)
    harness.scheduler.end_turn()
    assert harness.scheduler.log.num_bytes > size


def test_steps_of_the_log_share_their_empty_lists():
    harness = RecordedHarness()
    harness.add(5, 9)
    harness.drain()
    log = harness.scheduler.log
    log.flush()
    updates = [event for event in log.events if isinstance(event, Update)]
    results = [event.result for event in updates]
    lists = [
        each for r in results for each in (r.logprobs, r.prompt_logprobs, r.pooled, r.failed_slots)
    ]
    lists += [event.reports for event in updates]
    assert len(lists) >= 45
    assert len({id(each) for each in lists if not each}) == 1
