"""Encoder inputs. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from engine.core.scheduler.features.encoder_cache import EncoderCacheManager
from engine.core.scheduler.features.encoder_cache_connector import EncoderCacheConnector
from engine.core.state.request import Request
from engine.protocol.arrays import int32_view
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.messages import AppendInputs, EventKind, FinishReason
from engine.protocol.worker_messages import SchedulerOutput
from support.scheduler.growing import grow, part
from support.scheduler.harness import Harness, preempted
from support.scheduler.recorded_harness import RecordedHarness, replay


def place(position: int, num_tokens: int, content: str, size: int = 4) -> EncoderInput:
    return EncoderInput(position, num_tokens, content.encode(), size, b"pixels")


def computed(step: SchedulerOutput) -> list[list[int]]:
    """Return the computed inputs as pairs of slot and input index."""
    return int32_view(step.encoders.computed).reshape(-1, 2).tolist()


def test_7_1_an_input_is_computed_when_the_decoder_reaches_it():
    harness = Harness(max_num_batched_tokens=8, max_in_flight=1, block_size=1)
    harness.add(30, 2, inputs=[place(2, 4, "a"), place(9, 4, "b"), place(20, 4, "c")])
    steps = []
    while not steps or harness.has_work:
        steps.append(computed(harness.schedule()))
        harness.update()
    assert steps[:4] == [[[0, 0]], [[0, 1]], [[0, 2]], []]
    assert harness.steps[0].new_requests[0].encoder_inputs[0].data == b"pixels"
    harness.drain()


def test_7_1_tokens_stop_before_an_input_over_the_budget_of_a_step():
    harness = Harness(max_num_encoder_input_tokens=5, max_in_flight=1, encoder_cache_size=20)
    harness.add(20, 2, inputs=[place(2, 4, "a"), place(10, 4, "b")])
    harness.schedule()
    assert harness.batch == {0: 10}
    harness.update()
    harness.schedule()
    assert harness.batch == {0: 10}
    harness.update()
    harness.drain()


def test_7_1_the_budget_is_shared_and_the_next_request_waits():
    harness = Harness(max_num_encoder_input_tokens=5, encoder_cache_size=20)
    harness.add([1] * 8, 2, inputs=[place(0, 4, "a")])
    harness.add([2] * 8, 2, inputs=[place(0, 4, "b")])
    harness.schedule()
    assert harness.batch == {0: 8}
    harness.drain()


def test_7_1_tokens_stop_before_an_input_that_does_not_fit_in_the_cache():
    harness = Harness(encoder_cache_size=6, max_in_flight=1)
    harness.add(20, 2, inputs=[place(2, 4, "a"), place(10, 4, "b")])
    harness.schedule()
    assert harness.batch == {0: 10}
    harness.update()
    step = harness.schedule()
    # The first input has been passed, so it can be evicted.
    assert step.encoders.freed_hashes == [b"a"]
    assert computed(step) == [[0, 1]]
    harness.update()
    harness.drain()


@pytest.mark.parametrize("split", [False, True])
def test_7_1_with_disable_chunked_mm_input_an_input_is_never_split(split):
    harness = Harness(max_num_batched_tokens=10, disable_chunked_mm_input=not split)
    harness.add(20, 2, inputs=[place(6, 8, "a")])
    chunks = []
    for _ in range(3):
        harness.schedule()
        chunks.append(harness.batch[0])
        harness.update()
    assert chunks == ([10, 10, 1] if split else [6, 10, 4])
    harness.drain()


def test_7_1_an_unsplit_input_may_exceed_the_share_of_its_prompt():
    harness = Harness(long_prefill_token_threshold=3, disable_chunked_mm_input=True)
    harness.add([1] * 20, 2, inputs=[place(2, 8, "a")])
    harness.add([2] * 20, 2, inputs=[place(2, 8, "b")])
    harness.schedule()
    assert harness.batch == {0: 10, 1: 10}
    harness.drain()


def test_7_2_equal_contents_are_computed_once():
    harness = Harness()
    harness.add([1] * 8, 2, inputs=[place(0, 4, "a")])
    harness.add([2] * 8, 2, inputs=[place(0, 4, "a"), place(4, 4, "a")])
    assert computed(harness.schedule()) == [[0, 0]]
    harness.drain()
    # No request references it anymore, but it stays cached.
    harness.add([3] * 8, 2, inputs=[place(1, 4, "a")])
    assert computed(harness.schedule()) == []
    harness.drain()


def test_7_2_the_least_recently_used_output_is_evicted_on_the_workers_too():
    harness = Harness(encoder_cache_size=12, max_in_flight=1)
    for n, content in enumerate("abcad"):
        harness.add([n + 1] * 8, 1, inputs=[place(0, 4, content)])
        harness.drain()
    freed = [content for step in harness.steps for content in step.encoders.freed_hashes]
    assert freed == [b"b"]


def test_7_2_references_are_counted():
    cache = EncoderCacheManager(8)
    assert cache.add_reference(b"a", 5)
    assert not cache.add_reference(b"a", 5)
    cache.remove_reference(b"a")
    assert cache.num_available == 3
    cache.remove_reference(b"a")
    assert cache.num_available == 8
    assert cache.add_reference(b"b", 6)
    assert cache.take_freed() == [b"a"]
    assert cache.take_freed() == []


def test_7_2_an_output_keeps_its_first_size():
    harness = Harness(encoder_cache_size=12, max_in_flight=1)
    harness.add([1] * 8, 1, inputs=[place(0, 4, "a", size=6)])
    harness.add([2] * 8, 1, inputs=[place(0, 4, "b", size=4)])
    harness.drain()
    # "a" is cached with six embeddings, whatever size this request states; "c" and "d" may use only the remaining
    # space.
    harness.add([3] * 4, 1, inputs=[place(0, 4, "a", size=1)])
    harness.add([4] * 8, 1, inputs=[place(0, 4, "c"), place(4, 4, "d")])
    harness.drain()


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_7_2_an_invalid_output_is_computed_again(max_in_flight):
    harness = Harness(max_num_batched_tokens=6, max_in_flight=max_in_flight)
    harness.add([1] * 8, 4, inputs=[place(0, 8, "a")])
    harness.worker.nan_next.add(0)
    harness.step()
    # With two steps in flight, the next one has been scheduled, and no request references the input anymore.
    harness.step()
    harness.add([2] * 8, 2, inputs=[place(0, 4, "a")])
    step = harness.schedule()
    assert step.encoders.freed_hashes == [b"a"]
    assert computed(step) == [[1, 0]]
    harness.drain()


def test_7_2_an_output_used_by_other_requests_survives_a_failure():
    cache = EncoderCacheManager(8)
    cache.add_reference(b"a", 5)
    cache.add_reference(b"a", 5)
    cache.invalidate_output(b"a")
    cache.remove_reference(b"a")
    assert not cache.has_output(b"a") and cache.take_freed() == []
    assert cache.add_reference(b"a", 5)
    assert cache.num_unused == 3
    cache.remove_reference(b"a")
    cache.remove_reference(b"a")
    assert cache.has_output(b"a")


@pytest.mark.parametrize("budget", [4, 64])
def test_7_3_the_encoder_runs_before_the_first_decoder_token(budget):
    harness = Harness(
        max_num_encoder_input_tokens=budget, max_in_flight=1, max_num_batched_tokens=64
    )
    for content in "ab":
        harness.add(6, 4, inputs=[place(0, 0, content)])
    step = harness.schedule()
    assert computed(step) == ([[0, 0]] if budget == 4 else [[0, 0], [1, 0]])
    assert len(harness.batch) == len(computed(step))
    harness.drain()


def test_7_3_a_resumed_request_runs_its_encoder_again():
    harness = Harness(inject_preemption=0.4, encoder_cache_size=4, max_in_flight=1)
    for content in "ab":
        harness.add(6, 12, inputs=[place(0, 0, content)])
    harness.drain()
    assert sum(len(computed(step)) for step in harness.steps) > 2


def test_7_3_a_cached_prefix_does_not_replace_the_encoder():
    cross = KVCacheGroup(AttentionKind.CROSS, 4)
    harness = Harness(groups=(KVCacheGroup(), cross), block_size=4, encoder_cache_size=4)
    keys = []
    for content in "aaba":
        keys.append(harness.add(10, 2, inputs=[place(0, 0, content)]))
        harness.drain()
    work = [computed(step) for step in harness.steps if step.new_requests]
    assert work == [[[0, 0]], [], [[0, 0]], [[0, 0]]]
    events = [harness.received[key].events for key in keys]
    cached = [
        next(e.num_cached_tokens for e in e4 if e.kind == EventKind.SCHEDULED) for e4 in events
    ]
    assert cached == [0, 8, 0, 8]


def test_7_3_a_request_needs_one_source_that_fits():
    cross = KVCacheGroup(AttentionKind.CROSS, 4)
    harness = Harness(groups=(KVCacheGroup(), cross), block_size=4, encoder_cache_size=64)
    for inputs in ([], [place(0, 0, "a", 5)], [place(0, 4, "a")]):
        key = harness.add(10, 2, inputs=inputs)
        harness.drain()
        assert "reads one source of at most 4" in harness.received[key].finished.message


def read(position: int, content: str, until: int, follows: bool = False) -> EncoderInput:
    """Return an image that cross attention reads."""
    return EncoderInput(
        position, 1, content.encode(), 4, b"pixels", read_until=until, follows=follows
    )


def test_7_3_a_chunk_begins_at_each_image_that_cross_attention_reads():
    cross = KVCacheGroup(AttentionKind.CROSS, 8, is_optional=True)
    options = {"block_size": 4, "max_num_encoder_input_tokens": 4, "encoder_cache_size": 8}
    harness = Harness(groups=(KVCacheGroup(), cross), max_in_flight=1, **options)
    images = [read(2, "a", 6), read(6, "b", 99), read(7, "c", 99, follows=True)]
    prompt = list(range(1, 14))

    def run(inputs):
        first = len(harness.steps)
        harness.add(prompt, 2, inputs=inputs)
        harness.drain()
        steps = harness.steps[first:]
        blocks = [len(ids) // 4 for ids in steps[0].new_requests[0].block_ids]
        return [work for step in steps if (work := computed(step))], blocks

    # The last images are read together, so their embeddings have places next to each other.
    assert run(images) == ([[[0, 0]], [[0, 1]], [[0, 2]]], [1, 2])
    # After a cached prefix of 12 tokens only these are stored again, from the encoder cache.
    assert run(images) == ([], [4, 2])
    assert run([read(2, "d", 6), read(6, "e", 99)])[0] == [[[0, 0]], [[0, 1]]]
    # In a step of their own, images that are read together may exceed the budget.
    assert run(images)[0] == [[[0, 1], [0, 2]]]
    # Without images, a request has no blocks for them.
    prompt = list(range(20, 33))
    assert run([]) == ([], [4, 0])
    key = harness.add(10, 2, inputs=[*images[1:], read(8, "f", 99, follows=True)])
    harness.drain()
    assert "consecutive ones 12" in harness.received[key].finished.message


def test_7_1_a_request_waiting_for_cache_space_yields_the_token_budget():
    """The second request shares the first one's input and must compute past it before the first can continue."""
    harness = Harness(max_num_batched_tokens=16, encoder_cache_size=4, max_in_flight=1)
    harness.add([1] * 33, 2, inputs=[place(5, 4, "a"), place(9, 9, "b")])
    harness.add([2] * 70, 2, inputs=[place(3, 9, "a")])
    harness.schedule()
    assert harness.batch == {0: 9, 1: 7}
    harness.update()
    harness.schedule()
    assert harness.batch == {1: 16}
    harness.update()
    harness.drain()


class Store(EncoderCacheConnector):
    def __init__(self, contents: Sequence[bytes]) -> None:
        self.contents = contents
        self.loads: list[tuple[tuple[int, int], int]] = []

    def has_cache_item(self, request: Request, index: int) -> bool:
        content_hash = request.encoder_inputs[index].content_hash
        if content_hash == b"broken":
            raise RuntimeError("no answer")
        return content_hash in self.contents

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput, loads: Sequence[tuple[Request, int]]
    ) -> bytes:
        self.loads += [(request.key, index) for request, index in loads]
        return b"%d" % len(loads)


def test_7_4_outputs_of_a_connector_cost_no_encoder_budget():
    store = Store([b"a"])
    harness = Harness(
        encoder_connector=store, max_num_encoder_input_tokens=4, encoder_cache_size=12
    )
    key = harness.add(12, 2, inputs=[place(0, 4, "a"), place(4, 4, "b")])
    step = harness.schedule()
    assert harness.batch == {0: 12}
    assert computed(step) == [[0, 1]]
    assert int32_view(step.encoders.loaded).tolist() == [0, 0]
    assert step.encoders.connector_metadata == b"1"
    assert store.loads == [(key, 0)]
    harness.drain()


@pytest.mark.parametrize("position", [0, 9])
def test_a_failing_answer_ends_one_request_with_a_reason(position):
    harness = Harness(encoder_connector=Store([]), max_num_batched_tokens=8)
    bad = harness.add([1] * 14, 4, inputs=[place(position, 4, "broken")])
    good = harness.add([2] * 9, 4, inputs=[place(0, 4, "a")])
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert harness.received[bad].finished.message == "encoder-cache connector: no answer"
    assert harness.received[good].reason is FinishReason.LENGTH


def test_3_2_equal_tokens_with_different_inputs_share_no_block():
    harness = Harness(block_size=4)
    hits = []
    for inputs in (
        [place(5, 4, "a")],
        [place(5, 4, "a")],
        [place(5, 4, "b")],
        [place(6, 3, "a")],
        [],
    ):
        harness.add([1] * 17, 6, inputs=inputs)
        hits.append(harness.schedule().new_requests[0].num_computed_tokens)
        harness.drain()
    assert hits == [0, 16, 4, 4, 4]


def test_an_open_request_computes_only_what_its_inputs_reach():
    harness = RecordedHarness(max_num_seqs=4)
    key = harness.add(6, None, inputs=[part(0, 7)], is_open=True)
    while harness.step():
        pass
    # The seventh token is computed, and the eighth, which was sampled, has no input yet.
    assert len(harness.received[key].token_ids) == 2
    other = harness.add(9, 3)
    while harness.step():
        pass
    assert harness.received[other].is_over and harness.scheduler.has_requests()
    grow(harness, key, 1)
    grow(harness, key, 2)
    while harness.step():
        pass
    assert len(harness.received[key].token_ids) == 5
    grow(harness, key, 2, is_last=True)
    grow(harness, key, 2)
    harness.drain()
    assert len(harness.received[key].token_ids) == 6
    assert harness.received[key].reason is FinishReason.LENGTH
    # The cached blocks of one clip are not those of another.
    for salt in (0, 0, 1):
        key = harness.add(6, None, inputs=[part(0, 17, salt)], is_open=True)
        while harness.step():
            pass
        grow(harness, key, 16 - salt, is_last=True)
    harness.drain()
    replay(harness.dump())


def test_an_open_request_that_waits_gives_up_its_slot_to_others():
    harness = Harness(max_num_seqs=1)
    key = harness.add(4, None, inputs=[part(0, 6)], is_open=True)
    for _ in range(4):
        harness.step()
    other = harness.add([9] * 5, 3)
    for _ in range(6):
        harness.step()
    assert harness.received[other].is_over
    assert preempted(harness, key) == 1
    grow(harness, key, 3, is_last=True)
    harness.drain()
    assert len(harness.received[key].token_ids) == 5
    # It had a token for the last input already, so it ends at once.
    key = harness.add(4, None, inputs=[part(0, 6, 2)], is_open=True)
    while harness.step():
        pass
    assert len(harness.received[key].token_ids) == 3
    grow(harness, key, 1, is_last=True)
    harness.drain()


@pytest.mark.parametrize(
    ("growth", "message"),
    [
        (AppendInputs(0, [part(5, 2)], False), "at position 5 instead of 4"),
        (AppendInputs(0, [part(4, 2), part(7, 2)], False), "at position 7 instead of 6"),
        (AppendInputs(0, [part(4, 900)], True), "makes 900 embeddings"),
    ],
)
def test_inputs_that_do_not_fit_end_an_open_request(growth: AppendInputs, message: str):
    harness = Harness()
    key = harness.add(3, None, inputs=[part(0, 4)], is_open=True)
    harness.scheduler.append_inputs(0, growth)
    harness.drain()
    assert message in harness.received[key].finished.message
