"""The scheduler side of several KV connectors. Every token is compared with that of the request run alone."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from engine.core.kv_cache.connector import BlockConnector
from engine.core.kv_cache.connectors.multi_connector import MultiConnector
from engine.core.state.request import Request, RequestStatus
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import LoadFailurePolicy
from engine.protocol.kv_cache_groups import FULL_ATTENTION, AttentionKind, KVCacheGroup
from engine.protocol.kv_transfer.multi import MultiCommands
from engine.protocol.messages import FinishReason
from engine.protocol.worker_messages import KVConnectorOutput, SchedulerOutput
from support.scheduler.harness import Harness

PROMPT = [*range(1, 18)]
"""Four blocks and one token."""

WINDOW = (KVCacheGroup(AttentionKind.SLIDING_WINDOW, 8),)


class Shelf(BlockConnector):
    """A store of given blocks.

    Attributes:
        contents: By key, the content of each block of the store.
        num_deferred: How many times `find_blocks` defers its answer.
        num_held_back: How many steps start none of the loads.
        raises: The name of a method that raises an error.
    """

    def __init__(self) -> None:
        self.contents: dict[bytes, list[int]] = {}
        self.num_deferred = 0
        self.num_held_back = 0
        self.raises = ""
        self.keys: list[bytes] = []
        self.ended: list[FinishReason] = []
        self._loads: list[tuple[int, Sequence[bytes], Sequence[int]]] = []

    def find_blocks(self, request: Request, keys: Sequence[bytes]) -> bytes | None:
        if self.raises == "find_blocks":
            raise RuntimeError("the shelf is gone")
        if self.num_deferred:
            self.num_deferred -= 1
            return None
        return bytes(key in self.contents for key in keys)

    def load_blocks(
        self, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        if self.raises == "load_blocks":
            raise RuntimeError("the shelf is gone")
        self._loads.append((request.transfer_id, keys, block_ids))

    def needs_step(self) -> bool:
        return bool(self._loads)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> bytes:
        if self._loads and self.num_held_back:
            self.num_held_back -= 1
            return b""
        loads, self._loads = self._loads, []
        return msgspec.msgpack.encode(loads) if loads else b""

    def blocks_cached(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        self.keys += keys

    def request_finished(self, request: Request, block_ids: Sequence[int], reason: FinishReason):
        if self.raises == "request_finished":
            raise RuntimeError("the shelf is gone")
        self.ended.append(reason)
        return super().request_finished(request, block_ids, reason)


class Worker:
    """The worker side: it fills blocks in the step that starts a load, and reports its end when the test says so."""

    def __init__(self, harness: Harness, shelves: list[Shelf]) -> None:
        self._harness, self._shelves = harness, shelves
        self.loaded: list[list[bytes]] = [[] for _ in shelves]
        self.bad: set[bytes] = set()
        self._left: dict[int, int] = {}
        self._invalid: list[int] = []
        harness.worker.transfers = self

    def receive(self, metadata: bytes) -> None:
        """Do nothing: commands are applied when their step begins."""

    def begin_step(self, metadata: bytes) -> None:
        if not metadata:
            return
        commands = msgspec.msgpack.decode(metadata, type=MultiCommands)
        self._left |= dict(commands.loads)
        self._invalid += int32_view(commands.lost_blocks).tolist()
        for number, data in enumerate(commands.metadata):
            for transfer_id, keys, blocks in msgspec.msgpack.decode(data) if data else ():
                for key, block in zip(keys, blocks, strict=True):
                    self.loaded[number].append(key)
                    if key in self.bad:
                        self._invalid.append(block)
                    self._harness.worker.kv_cache[block][:] = (
                        [-1] * 4 if key in self.bad else self._shelves[number].contents[key]
                    )
                self._left[transfer_id] -= 1

    def end_step(self) -> None:
        return None

    def run(self) -> None:
        """Process steps until nothing happens, and report the ends of loads meanwhile."""
        while self._harness.step() or self._left or self._harness.has_work:
            ended = [transfer_id for transfer_id, left in self._left.items() if not left]
            for transfer_id in ended:
                del self._left[transfer_id]
            report = KVConnectorOutput(
                finished_recving=ended, invalid_block_ids=int32_bytes(self._invalid)
            )
            self._invalid = []
            self._harness.scheduler.update_from_connector(0, report, self._harness.now)
        self._harness.check_empty()


def start(
    *numbers: set[int], **settings: object
) -> tuple[Harness, Worker, list[Shelf], list[bytes]]:
    """Start with one store per set, which has the blocks of `PROMPT` with these numbers."""
    first = Shelf()
    harness = Harness(connector=MultiConnector([first]))
    harness.add(PROMPT, 2)
    harness.drain()
    keys = first.keys[:4]
    pool = harness.scheduler.kv_cache_manager.pool
    contents = [list(harness.worker.kv_cache[pool.get_cached_block(key)]) for key in keys]
    shelves = [Shelf() for _ in numbers]
    for shelf, having in zip(shelves, numbers, strict=True):
        shelf.contents = {keys[number]: contents[number] for number in having}
    harness = Harness(connector=MultiConnector(shelves), **settings)
    return harness, Worker(harness, shelves), shelves, keys


@pytest.mark.parametrize(
    ("first", "second", "loads", "num_computed"),
    [
        ({0}, {0, 1, 2, 3}, ([0], [1, 2, 3]), 16),
        (set(), {0, 1}, ([], [0, 1]), 8),
        ({1, 3}, {0, 2}, ([1, 3], [0, 2]), 16),
        ({0, 1, 2, 3}, {0, 1, 2, 3}, ([0, 1, 2, 3], []), 16),
        ({2}, {0}, ([], [0]), 4),
        ({1}, {2}, ([], []), 0),
    ],
)
@pytest.mark.parametrize("num_deferred", [0, 2])
def test_each_block_is_loaded_from_the_first_connector_that_has_it(
    first, second, loads, num_computed, num_deferred
):
    harness, worker, shelves, keys = start(first, second)
    shelves[0].num_deferred = shelves[1].num_deferred = num_deferred
    harness.add(PROMPT, 3)
    worker.run()
    assert worker.loaded == [[keys[number] for number in numbers] for numbers in loads]
    starts = [new.num_computed_tokens for step in harness.steps for new in step.new_requests]
    assert starts == [num_computed]
    assert [shelf.ended for shelf in shelves] == [[FinishReason.LENGTH]] * 2


@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_a_block_that_one_of_the_connectors_cannot_load_cuts_the_load_short(policy):
    harness, worker, shelves, keys = start({0, 3}, {1, 2}, load_failure_policy=policy)
    worker.bad = {keys[2]}
    key = harness.add(PROMPT, 3)
    worker.run()
    starts = [new.num_computed_tokens for step in harness.steps for new in step.new_requests]
    fails = policy is LoadFailurePolicy.FAIL
    reason = FinishReason.ERROR if fails else FinishReason.LENGTH
    assert starts == ([] if fails else [8])
    assert harness.received[key].reason is reason
    assert [shelf.ended for shelf in shelves] == [[reason]] * 2


@pytest.mark.parametrize("bad", [2, 3])
def test_a_window_that_is_loaded_only_in_part_is_computed(bad):
    """A shorter prefix needs blocks before those that were loaded."""
    harness, worker, _, keys = start({0, 1, 2, 3}, groups=WINDOW)
    worker.bad = {keys[bad]}
    harness.add(PROMPT, 3)
    worker.run()
    assert worker.loaded == [[keys[2], keys[3]]]
    starts = [new.num_computed_tokens for step in harness.steps for new in step.new_requests]
    assert starts == [0]


@pytest.mark.parametrize(("groups", "is_held"), [(FULL_ATTENTION, False), (WINDOW, True)])
def test_a_load_waits_for_steps_in_flight_that_may_use_blocks_freed_by_a_window(groups, is_held):
    harness, worker, _, keys = start({0, 1, 2, 3}, groups=groups, max_in_flight=3)
    harness.worker.is_late = True
    harness.add([50] * 20, 8)
    harness.schedule()
    key = harness.add(PROMPT, 3)
    step = harness.schedule()
    assert harness.request(key).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert bool(step.kv_connector_metadata) is not is_held
    worker.run()
    assert worker.loaded == [keys if groups is FULL_ATTENTION else keys[2:]]


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_a_search_fails_the_request_and_no_other(number):
    harness, worker, shelves, _ = start({0, 1}, {2, 3})
    shelves[number].raises = "find_blocks"
    bad = harness.add(PROMPT, 3)
    harness.schedule()
    shelves[number].raises = ""
    good = harness.add(PROMPT, 3)
    worker.run()
    assert harness.received[bad].finished.message == "KV connector: the shelf is gone"
    assert harness.received[good].reason is FinishReason.LENGTH


@pytest.mark.parametrize("held_back", [(1, 1), (1, 3), (2, 0)])
@pytest.mark.parametrize("raises", ["", "load_blocks"])
def test_a_load_may_begin_some_steps_later(raises, held_back):
    harness, worker, shelves, _ = start({0, 3}, {1, 2})
    shelves[0].raises = raises
    for shelf, count in zip(shelves, held_back, strict=True):
        shelf.num_held_back = count
    harness.add(PROMPT, 3)
    worker.run()
    starts = [new.num_computed_tokens for step in harness.steps for new in step.new_requests]
    assert starts == [0 if raises else 16]


@pytest.mark.parametrize("policy", LoadFailurePolicy)
@pytest.mark.parametrize("number", [0, 1])
def test_blocks_stay_in_use_if_one_connector_fails_to_begin_and_another_loads(number, policy):
    harness, worker, shelves, _ = start({0, 1}, {2, 3}, num_blocks=8, load_failure_policy=policy)
    shelves[number].raises = "load_blocks"
    cut = harness.add(PROMPT, 3)
    harness.schedule()
    # It needs blocks that the other connector may still write to.
    other = harness.add([9] * 16, 5)
    worker.run()
    starts = [new for step in harness.steps for new in step.new_requests]
    if policy is LoadFailurePolicy.FAIL:
        assert harness.received[cut].reason is FinishReason.ERROR
    else:
        computed = next(new.num_computed_tokens for new in starts if new.request_id == cut)
        assert computed == 8 * number
    assert harness.received[other].reason is FinishReason.LENGTH


def test_an_error_of_the_only_connector_that_loads_fails_the_request():
    harness, worker, shelves, _ = start({0, 1}, set())
    shelves[0].raises = "load_blocks"
    key = harness.add(PROMPT, 3)
    worker.run()
    assert harness.received[key].finished.message == "KV connector: the shelf is gone"
    assert worker.loaded == [[], []]


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_at_the_end_of_a_request_is_raised_after_all_connectors_received_it(number):
    harness, worker, shelves, _ = start({0, 1}, {2, 3})
    shelves[number].raises = "request_finished"
    key = harness.add(PROMPT, 3)
    worker.run()
    assert harness.received[key].reason is FinishReason.ERROR
    assert harness.received[key].finished.message == "KV connector: the shelf is gone"
    assert shelves[1 - number].ended == [FinishReason.LENGTH]
