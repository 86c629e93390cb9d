"""The event log replays to the same decisions."""

from __future__ import annotations

import random
from enum import Enum
from fractions import Fraction
from functools import cached_property, partial
from inspect import getattr_static

import msgspec
import pytest
from engine.core.kv_cache import gradual_list
from engine.core.kv_cache.block_pool import BlockPool
from engine.core.kv_cache.connector import ExternalMatch, RequestEnd
from engine.core.replay import dump as event_dump
from engine.core.replay import log as event_log_module
from engine.core.replay.__main__ import main
from engine.core.replay.dump import write_dump
from engine.core.replay.events import Update
from engine.core.replay.frozen_state import (
    changing_names,
    field_names,
    is_engine_class,
    is_given,
    untouched_fields,
)
from engine.core.replay.replayer import Difference, Replayer
from engine.core.scheduler.queues.request_queue import FCFSQueue
from engine.core.scheduler.scheduler import Scheduler
from engine.core.state.request import Request
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import KVTransferConfig, SpeculativeConfig
from engine.protocol.messages import FinishReason
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from engine.protocol.worker_messages import DraftTokenIds, ModelRunnerOutput
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector
from support.scheduler.recorded_harness import RecordedHarness, replay
from support.scheduler.recorded_traffic import SMALL_SEGMENT, contended, record
from support.scheduler.traffic import Traffic, random_harness
from support.suite.reachable import reachable

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", range(10))
def test_i6_recorded_traffic_replays_from_the_start(seed):
    harness = record(seed, 1 << 30)
    dump = harness.dump()
    assert [segment.snapshot for segment in dump.segments] == [None]
    assert replay(dump)[0] > 50


@pytest.mark.parametrize("seed", range(20, 40))
def test_i6_recorded_traffic_replays_from_the_middle(seed, monkeypatch):
    # With few blocks copied per step, the pool changes while its contents are being copied.
    monkeypatch.setattr(gradual_list, "COPIED_AT_ONCE", 1 + seed % 4)
    harness = record(seed, SMALL_SEGMENT)
    dump = harness.dump()
    assert all(segment.snapshot is not None for segment in dump.segments)
    assert len(dump.segments) == 2
    assert sum(replay(dump)) > 5
    # The state that the replay ends with is the recorded one: what follows is the same, too.
    replayer = Replayer(dump.setup, dump.segments[-1])
    for _ in replayer.run():
        pass
    assert replayer.scheduler.get_request_counts() == harness.scheduler.get_request_counts()
    assert replayer.scheduler.check_invariants() == []
    pools = replayer.scheduler.kv_cache_manager.pool, harness.scheduler.kv_cache_manager.pool
    assert pools[0].ref_counts == pools[1].ref_counts
    assert pools[0].describe_blocks() == pools[1].describe_blocks()


@pytest.mark.parametrize("seed", range(4))
def test_untouched_requests_have_the_values_that_they_arrived_with(seed):
    rng = random.Random(seed)
    harness = random_harness(rng, RecordedHarness)
    traffic = Traffic(harness, rng)
    num_untouched = 0
    for _ in range(150):
        traffic.act()
        for request in filter(
            lambda request: request.is_untouched, harness.scheduler.requests.values()
        ):
            num_untouched += 1
            fields = {name: getattr(request, name) for name in changing_names(Request)}
            fields["_block_hashes"] = None
            assert fields == untouched_fields(request)
    assert num_untouched


class UnrecordedHarness(Harness):
    """The same harness as a recorded one, without the recording."""

    LOADED = RecordedHarness.LOADED


@pytest.mark.parametrize("seed", range(3))
def test_recording_changes_no_decision(seed):
    def decisions(make_harness):
        rng = random.Random(seed)
        harness = random_harness(rng, make_harness)
        traffic = Traffic(harness, rng)
        for _ in range(300):
            traffic.act()
        harness.drain(50_000)
        return harness.steps

    recorded = partial(RecordedHarness, segment_bytes=SMALL_SEGMENT)
    assert decisions(recorded) == decisions(UnrecordedHarness)


def test_a_grammar_rejection_is_replayed():
    harness = RecordedHarness()
    constrained = StructuredOutput(GrammarKind.JSON_OBJECT, '{"secret": 1}')
    key = harness.add([1, 2, 3], 8, structured_output=constrained)
    harness.compile_grammars()
    for _ in range(3):
        harness.step()
    harness.grammar.num_accepted[key] += 1  # The next token will have the wrong parity.
    harness.step()
    harness.step()
    assert harness.received[key].finished is not None
    replay(harness.dump())


def test_frames_dropped_by_the_core_do_not_change_the_decision_hash():
    class NoisyHarness(RecordedHarness):
        def _receive(self, outputs):
            for message in outputs.values():
                if message.stats is not None:
                    message.stats.num_dropped_frames = 3
            super()._receive(outputs)

    harness = NoisyHarness()
    harness.add([1, 2, 3], 5)
    harness.drain()
    assert replay(harness.dump())[0] > 5


def test_drafts_that_arrive_after_the_output_are_replayed():
    harness = RecordedHarness(speculative=SpeculativeConfig(3), async_scheduling=False)
    key = harness.add([1, 2, 3], 9)
    harness.schedule()
    harness.update()
    slot = harness.request(key).slot
    harness.scheduler.update_draft_token_ids(
        DraftTokenIds(1, int32_bytes(slot), int32_bytes(3), int32_bytes([4, 5, 6]))
    )
    harness.schedule()
    assert harness.batch[slot] == 4
    replay(harness.dump())


def raise_error(*args):
    raise RuntimeError("the store is not reachable")


def answer_nonsense(*args):
    return "nonsense"


def answer_late(request, num_computed_tokens):
    request.tenant += "x"
    return ExternalMatch(8, True) if len(request.tenant) > 3 else None


ANSWERS = {
    "late": {"get_num_new_matched_tokens": answer_late},
    "asynchronous": {"get_num_new_matched_tokens": lambda *args: ExternalMatch(8, True)},
    "synchronous": {"get_num_new_matched_tokens": lambda *args: ExternalMatch(8)},
    "too much": {"get_num_new_matched_tokens": lambda *args: ExternalMatch(1 << 70)},
    "half a token": {"get_num_new_matched_tokens": lambda *args: ExternalMatch(0.5)},
    "no match": {"get_num_new_matched_tokens": answer_nonsense},
    "no question": {"get_num_new_matched_tokens": raise_error},
    "no allocation": {
        "get_num_new_matched_tokens": lambda *args: ExternalMatch(8),
        "update_state_after_alloc": raise_error,
    },
    "no end": {"request_finished": raise_error},
    "an end of nonsense": {"request_finished": answer_nonsense},
    "parameters of nonsense": {
        "request_finished": lambda *args: RequestEnd(False, {"a": object()})
    },
}


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("num_bad_blocks", [0, 1])
def test_8_1_i6_answers_of_a_connector_are_replayed(name, num_bad_blocks):
    """Late, failing and wrong answers are in the log, and other requests are unaffected."""

    class Connector(ModelConnector):
        pass

    for method, answer in ANSWERS[name].items():
        usual = getattr(ModelConnector, method)

        def ask(self, request, *args, usual=usual, answer=answer):
            told = usual(self, request, *args)
            if request.request_index != 1:
                return told
            told = answer(request, *args)
            if isinstance(told, ExternalMatch) and told.num_tokens == 8:
                self._matched[request.transfer_id] = args[0], told.is_async
            return told

        setattr(Connector, method, ask)
    harness = RecordedHarness(connector=Connector(), enable_prefix_caching=False)
    harness.worker.transfers.find_bad_blocks = lambda load: set(range(num_bad_blocks))
    for index in range(3):
        harness.add([index + 1] * 12, 6)
    harness.drain()
    is_wrong = name.startswith(("too", "half", "no", "an end", "parameters"))
    expected = FinishReason.ERROR if is_wrong else FinishReason.LENGTH
    assert [received.reason for received in harness.received.values()] == [
        FinishReason.LENGTH,
        expected,
        FinishReason.LENGTH,
    ]
    replay(harness.dump())


def test_8_4_i6_late_and_missing_fetches_of_blocks_are_replayed():
    connector = ModelConnector(delays_free=lambda request: True)
    harness = RecordedHarness(connector=connector, transfer_timeout_s=20.0)
    delays = iter((3, 30, 300))
    harness.worker.transfers.get_delay = lambda: next(delays)
    for index in range(3):
        harness.add([index + 1] * 12, 6)
    harness.drain()
    assert len(connector.expired) == 2
    replay(harness.dump())


def test_a_crash_of_a_connector_is_reproduced(tmp_path, capsys):
    connector = ModelConnector()
    connector.build_connector_meta = raise_error
    harness = RecordedHarness(connector=connector)
    harness.add([1, 2, 3], 5)
    with pytest.raises(RuntimeError):
        harness.schedule()
    path = write_dump(harness.scheduler, str(tmp_path), reason="crash", wall_time=0.0, now=9.0)
    assert main([str(path)]) == 0
    assert "build_connector_meta raised an error" in capsys.readouterr().out


def test_a_different_call_of_a_connector_is_reported():
    class Forgetful(Scheduler):
        """Never calls the connector."""

        def add_request(self, client_index, message, now):
            super().add_request(client_index, message, now)
            for request in self.requests.values():
                request.computes_locally = True

    harness = RecordedHarness(connector=ModelConnector(lambda *args: ExternalMatch(4)))
    harness.add([1] * 9, 3)
    harness.drain()
    with pytest.raises(
        Difference,
        match=r"1 more answers from external dependencies .* call=get_num_new_matched_tokens, about=0, value=\[4; False\]",
    ):
        replay(harness.dump(), Forgetful)


def test_a_dump_contains_no_connector_name():
    harness = RecordedHarness(connector=ModelConnector())
    dump = harness.dump()
    assert dump.setup.kv_transfer == KVTransferConfig(
        "recorded",
        kv_connector_module_path="recorded",
        transfer_timeout_s=1000.0,
        load_timeout_s=1000.0,
    )


def test_too_many_requests_for_a_snapshot_leave_a_gap_that_closes(monkeypatch):
    monkeypatch.setattr(event_log_module, "MAX_FROZEN_REQUESTS", 3)
    harness = RecordedHarness(segment_bytes=2_000)
    for index in range(20):
        harness.add([index] * 5, 4)
    for _ in range(3):
        harness.step()
    dump = harness.dump()
    assert not dump.segments[-1].is_whole
    with pytest.raises(event_dump.EngineError, match="no starting state"):
        Replayer(dump.setup, dump.segments[-1])
    harness.drain()
    for _ in range(20):
        harness.add([1, 2], 4)
        harness.drain()
    assert all(segment.is_whole for segment in harness.dump().segments)
    replay(harness.dump())


def test_an_error_in_the_log_affects_no_request(monkeypatch):
    def broken(scheduler):
        raise RuntimeError("no snapshot today")

    monkeypatch.setattr(event_log_module, "FrozenState", broken)
    harness = record(3, SMALL_SEGMENT)
    harness.drain(50_000)
    assert "no snapshot today" in harness.dump().problem


def test_a_snapshot_contains_every_attribute_of_an_object():
    harness = record(21, 1 << 30)
    instances = [
        item
        for item in reachable(harness.scheduler.scheduler)
        if hasattr(item, "__dict__")
        and is_engine_class(type(item))
        and not (is_given(type(item)) or isinstance(item, Enum))
    ]
    assert len(instances) > 15
    for instance in instances:
        computed = {
            n
            for n in vars(instance)
            if isinstance(getattr_static(type(instance), n, None), cached_property)
        }
        assert vars(instance).keys() - computed <= set(field_names(type(instance)))


def test_a_restored_snapshot_keeps_the_configuration_of_its_scheduler():
    snapshot = record(21, SMALL_SEGMENT).dump().segments[-1].snapshot
    assert snapshot is not None
    assert not [layout for layout in snapshot.layouts if ".config" in layout.name]


def test_events_are_kept_when_the_state_cannot_be_serialized():
    harness = RecordedHarness(segment_bytes=SMALL_SEGMENT)
    harness.scheduler.invariant_violations.append(Fraction(1, 3))
    for index in range(200):
        harness.add([index] * 5, 4)
        harness.step()
    dump = harness.dump()
    assert dump.problem == "a fractions.Fraction cannot be captured"
    assert not dump.segments[-1].is_whole
    assert len(dump.segments[-1].events) > 5


# a changed scheduler


class LastComeFirstServed(FCFSQueue):
    def _insert(self, request):
        self._arrivals.appendleft(request)


class ImpatientScheduler(Scheduler):
    """Admits the latest request first."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._queue.__class__ = LastComeFirstServed


class StingyScheduler(Scheduler):
    """A scheduler that has one free block fewer from its 20th step on."""

    def schedule(self, now):
        if self._step == 19:
            self.kv_cache_manager.pool.allocate_blocks(1)
        return super().schedule(now)


def test_a_changed_admission_order_is_located():
    with pytest.raises(Difference) as caught:
        replay(contended().dump(), ImpatientScheduler)
    message = str(caught.value)
    assert "scheduling of step 1," in message
    assert "new_requests, recorded: [slot=0, request_id=[0; 0]" in message
    assert "new_requests, now:      [slot=0, request_id=[0; 11]" in message


def test_a_changed_block_is_located_at_the_first_step_that_differs():
    with pytest.raises(Difference, match="scheduling of step 20,"):
        replay(contended().dump(), StingyScheduler)


def test_a_changed_input_is_reported():
    dump = contended().dump()
    updates = [event for event in dump.segments[0].events if isinstance(event, Update)]
    ended = next(event for event in updates if event.reports and event.reports[0].finished_set)
    ended.result.failed_slots = [(0, "")]
    with pytest.raises(Difference, match=f"output of step {ended.result.step}"):
        replay(dump)


def test_a_changed_class_is_named():
    dump = record(20, SMALL_SEGMENT).dump()
    snapshot = dump.segments[0].snapshot
    layout = next(
        layout for layout in snapshot.layouts if layout.name == "core.state.request:Request"
    )
    index = snapshot.layouts.index(layout)
    old = msgspec.structs.replace(layout, fields=("colour", *layout.fields[1:]))
    snapshot.layouts[index] = old
    with pytest.raises(event_dump.EngineError, match="the class has changed"):
        replay(dump)


def test_a_changed_enumeration_is_named():
    dump = record(20, SMALL_SEGMENT).dump()
    snapshot = dump.segments[0].snapshot
    node = snapshot.root
    for name in ("_admission", "stop"):
        fields = node.fields
        position = snapshot.layouts[node.layout].fields.index(name)
        node = fields[position]
    fields[position] = msgspec.structs.replace(node, value="bored")
    with pytest.raises(event_dump.EngineError, match=r"'bored'.* the enumeration has changed"):
        replay(dump)


@pytest.mark.parametrize(
    "name", ["os:system", "core.request:os", "builtins:eval", "core.request:Nobody", "core.x:y"]
)
def test_a_snapshot_creates_only_objects_of_known_classes(name):
    dump = record(20, SMALL_SEGMENT).dump()
    snapshot = dump.segments[0].snapshot
    snapshot.layouts[-1] = msgspec.structs.replace(snapshot.layouts[-1], name=name)
    with pytest.raises(event_dump.EngineError, match="unknown class"):
        replay(dump)


# crashes


def test_a_crash_of_the_scheduler_is_reproduced(monkeypatch, tmp_path, capsys):
    def fail(self, blocks):
        raise ZeroDivisionError("released once too often")

    harness = RecordedHarness()
    harness.add([1, 2, 3], 5)
    monkeypatch.setattr(BlockPool, "release_blocks", fail)
    with pytest.raises(ZeroDivisionError):
        harness.drain()
    path = write_dump(harness.scheduler, str(tmp_path), reason="crash", wall_time=0.0, now=9.0)
    assert main([str(path)]) == 0
    assert "ZeroDivisionError: released once too often" in capsys.readouterr().out
    monkeypatch.undo()
    assert main([str(path)]) == 1
    assert "the recorded scheduler raised an error, but this one did not" in capsys.readouterr().out


def test_an_invalid_output_is_still_dumped():
    harness = RecordedHarness()
    harness.add([1, 2, 3], 5)
    step = harness.schedule()
    with pytest.raises(event_dump.EngineError):
        harness.scheduler.update_from_output(step, ModelRunnerOutput(1, b"12345678"), 1.0)
    replayer = Replayer(harness.dump().setup, harness.dump().segments[0])
    for _ in replayer.run():
        pass
    assert "returned 2 tokens for 1 row" in replayer.reproduced_error
    with pytest.raises(ValueError):
        harness.scheduler.update_from_output(step, ModelRunnerOutput(1, b"12345"), 1.0)
    assert len(harness.dump().segments[0].events) == 4
