from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engine.frontend.client.output_processor import OutputProcessor
from engine.frontend.client.replicas.core_load import CoreLoad
from engine.frontend.client.request_group import RequestGroup, Sequence
from engine.frontend.client.sequence_io import Delta
from engine.frontend.observability.metrics.metrics import Metrics
from engine.frontend.tokenizer.detokenizer import IncrementalDetokenizer
from engine.protocol.arrays import float32_bytes, int32_bytes
from engine.protocol.config import SchedulerConfig
from engine.protocol.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EventKind,
    FinishedRequest,
    FinishReason,
    RequestEvents,
    TokenLogprobs,
)
from engine.protocol.sampling_params import RepetitionDetectionParams, SamplingParams
from hypothesis import given
from hypothesis import strategies as st
from support.servers.engine_fixtures import (
    engine_config,
    on_event_loop,
    read_next,
    smollm2_tokenizer,
)

TEXT = "Once there was a naïve café 🙂 owner. She said: STOP here, or STOP there?\n\nUser: no"
TOKENS = smollm2_tokenizer().encode(TEXT)
EOS = smollm2_tokenizer().eos_token_id


def finished(index: int, reason: FinishReason, **more: Any) -> FinishedRequest:
    return FinishedRequest(index, reason, **more)


@dataclass
class Harness:
    """An output processor with its sequences; `aborted` lists the requests that it aborted at the core."""

    aborted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.load = CoreLoad(SchedulerConfig())
        self.metrics = Metrics(engine_config(Path("unused")))
        self.processor = OutputProcessor(
            self.metrics, lambda sequence: self.aborted.append(sequence.request_index)
        )
        self._next_index = 0

    def group(self, *params: SamplingParams) -> RequestGroup:
        return RequestGroup(
            "r",
            [self._sequence(p) for p in params],
            [len(params)],
            stream_interval=1,
            on_abort=lambda group: None,
            wake_soon=self.processor.wake_soon,
        )

    def _sequence(self, params: SamplingParams) -> Sequence:
        request = EngineCoreRequest(
            self._next_index, int32_bytes([1, 2, 3]), params, arrival_time=time.monotonic()
        )
        self._next_index += 1
        detokenizer = IncrementalDetokenizer(
            smollm2_tokenizer(),
            [1, 2, 3],
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            min_tokens=params.min_tokens,
        )
        sequence = Sequence(request, params, 3, detokenizer)
        sequence.assign(0, self.load, [])
        self.processor.sequences[request.request_index] = sequence
        self.load.record_submitted(3, [])
        return sequence

    def feed(self, tokens: dict[int, list[int]], *done: FinishedRequest, **more: Any) -> None:
        counts = [len(each) for each in tokens.values()]
        self.processor.process(
            EngineCoreOutputs(
                0,
                0,
                time.monotonic(),
                request_indices=int32_bytes(list(tokens)),
                token_ids=int32_bytes([token for each in tokens.values() for token in each]),
                num_tokens=b"" if set(counts) <= {1} else int32_bytes(counts),
                finished=list(done),
                **more,
            )
        )


def whole(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        [token for delta in deltas for token in delta.token_ids],
        None,
        last.finish_reason,
        last.stop_reason,
        last.error,
    )


Read = Callable[[Sequence], Delta]


def read_available(group: RequestGroup, read: Read = Sequence.read) -> list[tuple[int, Delta]]:
    return [(sequence.position, read(sequence)) for sequence in group.take_updates()]


def read_json_if_possible(sequence: Sequence) -> Delta:
    if sequence.finished:
        return sequence.read()
    start = sequence.num_read_tokens
    text = sequence.read_as_json()
    return Delta(json.loads(b'"%b"' % text), sequence.token_ids[start:].tolist())


async def generate(
    params: SamplingParams,
    steps: list[list[int]],
    end: FinishedRequest,
    reads: set[int],
    read: Read = Sequence.read,
) -> tuple[Delta, Harness]:
    """Feed one sequence step by step, reading after the steps in `reads` and at the end."""
    harness = Harness()
    group = harness.group(params)
    deltas = []
    for number, tokens in enumerate(steps):
        last = number == len(steps) - 1
        harness.feed({0: tokens}, *([end] if last else []))
        if number in reads:
            deltas += [delta for _, delta in read_available(group, read)]
    deltas += [delta for _, delta in read_available(group, read)]
    assert await read_next(group) == []
    return whole(deltas), harness


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[int]], set[int]]:
    """Draw TOKENS split into steps, and the steps after which the reader reads."""
    cuts = sorted(draw(st.sets(st.integers(1, len(TOKENS) - 1))))
    edges = [0, *cuts, len(TOKENS)]
    steps = [TOKENS[a:b] for a, b in itertools.pairwise(edges)]
    return steps, draw(st.sets(st.integers(0, len(steps))))


@pytest.mark.parametrize("read", [Sequence.read, read_json_if_possible])
@given(split=splits())
@on_event_loop
async def test_text_and_tokens_do_not_depend_on_steps_or_reads(split: Any, read: Read) -> None:
    steps, reads = split
    end = finished(0, FinishReason.LENGTH)
    delta, harness = await generate(SamplingParams(), steps, end, reads, read)
    assert delta == Delta(TEXT, TOKENS, None, "length")
    assert harness.aborted == []


@pytest.mark.parametrize(
    ("repetitions", "more", "num_tokens", "reason"),
    [
        ((4, 0, 3), {}, 7, "repetition_detected"),
        ((3, 3, 2), {}, 13, "repetition_detected"),
        ((4, 0, 3), {"min_tokens": 7}, 7, "repetition_detected"),
        ((4, 0, 3), {"min_tokens": 8}, 17, "repetition_detected"),
        ((4, 0, 3), {"stop": (" c d",)}, 7, "repetition_detected"),
        ((4, 0, 3), {"stop": ("b a b a b",)}, 7, "b a b a b"),
        ((4, 0, 3), {"detokenize": False}, 7, "repetition_detected"),
        ((1, 0, 4), {}, 18, None),
        ((0, 0, 0), {}, 18, None),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 18])
@on_event_loop
async def test_a_repetition_ends_the_output(
    repetitions: tuple[int, int, int],
    more: dict[str, Any],
    num_tokens: int,
    reason: str | None,
    step: int,
) -> None:
    tokens = smollm2_tokenizer().encode("x a b a b a b c d e c d e f g g g h")
    params = SamplingParams(repetition_detection=RepetitionDetectionParams(*repetitions), **more)
    steps = [tokens[start : start + step] for start in range(0, len(tokens), step)]
    delta, harness = await generate(params, steps, finished(0, FinishReason.LENGTH), {0, 3})
    assert (delta.token_ids, delta.stop_reason) == (tokens[:num_tokens], reason)
    assert len(tokens) == 18
    ends = {None: "length", "repetition_detected": "repetition"}
    assert delta.finish_reason == ends.get(reason, "stop")
    if "stop" not in more:
        assert delta.text == smollm2_tokenizer().decode(delta.token_ids)
    assert harness.aborted == ([0] if num_tokens <= len(tokens) - len(steps[-1]) else [])


@on_event_loop
async def test_the_token_limit_comes_before_a_repetition() -> None:
    tokens = smollm2_tokenizer().encode(" a a a")
    params = SamplingParams(repetition_detection=RepetitionDetectionParams(1, 0, 3))
    delta, _ = await generate(params, [tokens], finished(0, FinishReason.LENGTH), set())
    assert delta.finish_reason == "length"


@given(splits(), st.integers(0, len(TEXT) - 1), st.integers(1, 12), st.booleans())
@on_event_loop
async def test_4_7_nothing_after_a_stop_string_reaches_the_reader(
    split: Any, start: int, length: int, include: bool
) -> None:
    steps, reads = split
    stop = TEXT[start : start + length]
    params = SamplingParams(stop=(stop, "not in it"), include_stop_str_in_output=include)
    delta, harness = await generate(params, steps, finished(0, FinishReason.LENGTH), reads)
    found = TEXT.index(stop)
    end = found + len(stop)
    assert delta.text == TEXT[: end if include else found]
    assert (delta.finish_reason, delta.stop_reason) == ("stop", stop)
    decode = smollm2_tokenizer().decode
    assert stop in decode(delta.token_ids)
    assert stop not in decode(delta.token_ids[:-1])
    ended_in_last_step = len(delta.token_ids) > len(TOKENS) - len(steps[-1])
    assert harness.aborted == ([] if ended_in_last_step else [0])


@pytest.mark.parametrize("include", [False, True])
@on_event_loop
async def test_a_stop_token_is_in_the_tokens_but_not_in_the_text(include: bool) -> None:
    steps = [TOKENS[:5], TOKENS[5:6]]
    params = SamplingParams(stop_token_ids=(TOKENS[5],), include_stop_str_in_output=include)
    end = finished(0, FinishReason.STOP, stop_reason=TOKENS[5])
    delta, _ = await generate(params, steps, end, {0})
    assert delta.token_ids == TOKENS[:6]
    assert delta.text == smollm2_tokenizer().decode(TOKENS[: 6 if include else 5])
    assert (delta.finish_reason, delta.stop_reason) == ("stop", TOKENS[5])


@on_event_loop
async def test_a_stop_token_ends_before_a_stop_string_that_it_would_complete() -> None:
    tokenizer = smollm2_tokenizer()
    words = tokenizer.encode("one two")
    params = SamplingParams(stop=("two",))
    end = finished(0, FinishReason.STOP, stop_reason=words[-1])
    delta, harness = await generate(params, [words], end, set())
    assert (delta.text, delta.stop_reason) == ("one", words[-1])
    assert harness.aborted == []


@on_event_loop
async def test_the_end_of_sequence_token_adds_no_text() -> None:
    assert EOS is not None
    end = finished(0, FinishReason.STOP)
    params = SamplingParams(skip_special_tokens=False)
    delta, _ = await generate(params, [TOKENS, [EOS]], end, {0})
    assert delta == Delta(TEXT, [*TOKENS, EOS], None, "stop", None)


@on_event_loop
async def test_text_withheld_for_a_stop_string_is_sent_at_the_end() -> None:
    tokens = smollm2_tokenizer().encode("I said ST")
    delta, _ = await generate(
        SamplingParams(stop=("STOP",)), [[t] for t in tokens], finished(0, FinishReason.LENGTH), {8}
    )
    assert delta.text == "I said ST"


@on_event_loop
async def test_partial_characters_are_not_sent() -> None:
    tokens = smollm2_tokenizer().encode("🙂")
    assert len(tokens) > 1
    harness = Harness()
    group = harness.group(SamplingParams())
    for token in tokens[:-1]:
        harness.feed({0: [token]})
        assert [d.text for _, d in await read_next(group)] == [""]
    harness.feed({0: tokens[-1:]})
    assert [d.text for _, d in await read_next(group)] == ["🙂"]
    harness.feed({0: tokens[:-1]}, finished(0, FinishReason.LENGTH))
    [(_, delta)] = await read_next(group)
    assert (delta.text, delta.token_ids) == ("", tokens[:-1])


@on_event_loop
async def test_stop_strings_are_ignored_before_min_tokens() -> None:
    tokens = smollm2_tokenizer().encode("a b a b a b")
    params = SamplingParams(stop=("b",), min_tokens=4)
    delta, _ = await generate(
        params, [[t] for t in tokens], finished(0, FinishReason.LENGTH), set()
    )
    assert delta.text == "a b a b a "


@on_event_loop
async def test_late_tokens_of_ended_and_unknown_sequences_are_ignored() -> None:
    harness = Harness()
    group = harness.group(SamplingParams(stop=("STOP",)), SamplingParams())
    for token in TOKENS:
        harness.feed({0: [token], 1: [token], 77: [token]}, finished(78, FinishReason.STOP))
    harness.feed({0: [5]}, finished(0, FinishReason.LENGTH))
    update = dict(await read_next(group))
    assert update[0].text == TEXT[: TEXT.index("STOP")]
    assert update[0].finish_reason == "stop"
    assert update[1].text == TEXT
    assert harness.aborted == [0]
    assert harness.load.num_inflight == 1


@on_event_loop
async def test_unchanged_rows_are_matched_to_the_current_sequences() -> None:
    harness = Harness()
    group = harness.group(*[SamplingParams()] * 3)
    leaves, moves, stays = group.sequences
    for token in TOKENS[:4]:
        harness.feed({0: [token], 1: [token], 2: [token]})
    harness.processor.finish(leaves, FinishReason.ABORT)
    harness.processor.resubmit(moves, 7, 0.0)
    harness.feed({0: [9], 1: [9], 2: TOKENS[4:5]})
    harness.feed({7: TOKENS[4:5], 2: TOKENS[5:6]})
    lengths = [len(sequence.token_ids) for sequence in group.sequences]
    assert lengths == [4, 5, 6]
    assert moves.read().token_ids == TOKENS[:5]
    assert stays.read().token_ids == TOKENS[:6]


@on_event_loop
async def test_logprobs_are_truncated_with_their_tokens() -> None:
    def rows(tokens: list[int]) -> TokenLogprobs:
        n = len(tokens)
        ids = [[token, 7, 8] for token in tokens]
        values = [[-0.5, -1.0, -2.0]] * n
        ranks = list(range(1, n + 1))
        return TokenLogprobs(0, n, int32_bytes(ids), float32_bytes(values), int32_bytes(ranks))

    harness = Harness()
    group = harness.group(SamplingParams(logprobs=2, stop=("STOP",)))
    harness.feed({0: TOKENS[:3]}, logprobs=[rows(TOKENS[:3])])
    harness.feed({0: TOKENS[3:]}, logprobs=[rows(TOKENS[3:])])
    [(_, delta)] = await read_next(group)
    assert delta.finish_reason == "stop" and len(delta.token_ids) < len(TOKENS)
    assert delta.logprobs is not None
    assert [p.token_id for p in delta.logprobs] == delta.token_ids
    assert [p.rank for p in list(delta.logprobs)[:5]] == [1, 2, 3, 1, 2]
    assert next(iter(delta.logprobs)).top == [(7, -1.0), (8, -2.0)]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        (FinishReason.ERROR, "error"),
        (FinishReason.IGNORED, "ignored"),
        (FinishReason.ABORT, "abort"),
        (FinishReason.EXPIRED, "expired"),
    ],
)
@on_event_loop
async def test_a_failure_at_the_core_is_reported_to_the_reader(
    reason: FinishReason, word: str
) -> None:
    harness = Harness()
    group = harness.group(SamplingParams(), SamplingParams())
    harness.feed({1: TOKENS}, finished(0, reason, message="needs 9 blocks, 8 exist"))
    update = dict(await read_next(group))
    assert (update[0].finish_reason, update[0].error) == (word, "needs 9 blocks, 8 exist")
    assert update[1].finish_reason is None
    assert [sequence.finished for sequence in group.sequences] == [True, False]


@on_event_loop
async def test_a_sequence_unknown_to_the_core_does_not_hang() -> None:
    harness = Harness()
    group = harness.group(SamplingParams())
    harness.feed({}, finished_set=int32_bytes([0, 55]))
    [(_, delta)] = await read_next(group)
    assert delta.finish_reason == "error" and delta.error


@pytest.mark.parametrize(
    "arrays",
    [
        {"request_indices": b"\0\0\0"},
        {"request_indices": int32_bytes([0]), "token_ids": int32_bytes([5, 6])},
        {
            "request_indices": int32_bytes([0]),
            "token_ids": int32_bytes([5]),
            "num_tokens": int32_bytes([2]),
        },
        {
            "request_indices": int32_bytes([0, 0]),
            "token_ids": int32_bytes([5]),
            "num_tokens": int32_bytes([2, -1]),
        },
        {
            "request_indices": int32_bytes([0]),
            "token_ids": int32_bytes([5]),
            "finished_set": b"\1",
        },
    ],
)
def test_an_invalid_message_changes_nothing(arrays: dict[str, bytes]) -> None:
    harness = Harness()
    group = harness.group(SamplingParams())
    with pytest.raises(ValueError):
        harness.processor.process(
            EngineCoreOutputs(
                0,
                0,
                1.0,
                finished=[finished(0, FinishReason.STOP)],
                events=[RequestEvents(EventKind.QUEUED, 1.0, int32_bytes([0]))],
                **arrays,
            )
        )
    assert not group.updates and not group.sequences[0].finished
    assert harness.load.num_queued == 0


@on_event_loop
async def test_a_token_that_cannot_be_decoded_fails_only_its_sequence() -> None:
    harness = Harness()
    group = harness.group(SamplingParams(stop=("STOP",)), SamplingParams(stop=("STOP",)))
    harness.feed({0: [-1], 1: TOKENS[:1]})
    harness.feed({1: TOKENS[1:2]}, finished(1, FinishReason.LENGTH))
    update = dict(await read_next(group))
    assert (update[0].finish_reason, update[1].finish_reason) == ("error", "length")
    assert update[0].error == "the generated tokens could not be decoded; see the server's log"
    assert update[1].token_ids == TOKENS[:2]
    assert harness.aborted == [0]


@on_event_loop
async def test_a_reader_whose_turn_fails_gets_another() -> None:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    harness = Harness()
    failing, other = harness.group(SamplingParams()), harness.group(SamplingParams())
    turns = iter([[], [False]])
    failing.on_update = lambda: next(turns).pop()
    waiting = asyncio.create_task(other.wait_for_updates())
    await asyncio.sleep(0)
    harness.feed({0: TOKENS[:1], 1: TOKENS[:1]})
    assert await waiting == other.sequences
    assert len(errors) == 1 and next(turns, None) is None


@on_event_loop
async def test_cached_tokens_are_those_of_the_first_scheduling() -> None:
    harness = Harness()
    group = harness.group(SamplingParams())
    one = int32_bytes([0])
    harness.feed({}, events=[RequestEvents(EventKind.QUEUED, 1.0, one)])
    assert (harness.load.num_queued, harness.load.num_unscheduled_tokens) == (1, 3)
    harness.feed({}, events=[RequestEvents(EventKind.SCHEDULED, 2.0, one, int32_bytes([2]))])
    harness.feed({}, events=[RequestEvents(EventKind.PREEMPTED, 3.0, one)])
    harness.feed({}, events=[RequestEvents(EventKind.SCHEDULED, 4.0, one, int32_bytes([0]))])
    assert group.sequences[0].num_cached_tokens == 2
    assert (harness.load.num_queued, harness.load.num_unscheduled_tokens) == (0, 0)


@on_event_loop
async def test_missed_output_can_be_read_in_parts() -> None:
    tokens = [300 + i % 500 for i in range(300)]
    for logprobs in (None, 3):
        harness = Harness()
        group = harness.group(SamplingParams(logprobs=logprobs))
        for at in range(0, len(tokens), 3):
            part = tokens[at : at + 3]
            entries = TokenLogprobs(
                0,
                3,
                int32_bytes([token for token in part for _ in range(4)]),
                float32_bytes([-1.0] * 12),
                int32_bytes([1] * 3),
            )
            harness.feed({0: part}, logprobs=[] if logprobs is None else [entries])
        harness.feed({}, finished(0, FinishReason.LENGTH))
        deltas = []
        while updates := await group.wait_for_updates():
            deltas += [sequence.read_some() for sequence in updates]
        result = whole(deltas)
        assert (result.token_ids, result.finish_reason) == (tokens, "length")
        assert result.text == smollm2_tokenizer().decode(tokens)
        if logprobs is not None:
            assert len(deltas) > 5
            read = [entry.token_id for delta in deltas for entry in delta.logprobs or ()]
            assert read == tokens
