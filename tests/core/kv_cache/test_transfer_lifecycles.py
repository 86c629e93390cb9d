"""Loads and sends of a KV connector from their start to their end, with failures, aborts and too few blocks between."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.connector import ExternalMatch
from engine.core.state.request import Request, RequestStatus
from engine.protocol.config import LoadFailurePolicy
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.client_view import Key
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector

LOADED, OTHER = 1, 2
"""Requests with this seed are loaded, or computed."""


def load_seeded(*, is_async: bool = True, most: int = 100) -> ModelConnector:
    """Let the connector load up to `most` tokens of the requests with the seed `LOADED`."""

    def match(request: Request, num_computed_tokens: int) -> ExternalMatch:
        if request.params.seed != LOADED:
            return ExternalMatch(0)
        return ExternalMatch(min(most, request.num_tokens - num_computed_tokens), is_async)

    return ModelConnector(match)


def starts(harness: Harness, key: Key) -> list[int]:
    """Return how many tokens of a request were computed or loaded at each of its starts."""
    return [
        new.num_computed_tokens
        for step in harness.steps
        for new in step.new_requests
        if new.request_id == key
    ]


def is_loading(harness: Harness, key: Key) -> bool:
    return harness.request(key).status is RequestStatus.WAITING_FOR_REMOTE_KVS


@pytest.mark.parametrize("reports", [((0, 2),), ((1,), (2,)), ((2,), (1,)), ((2,), (1,), (0,))])
@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_blocks_that_fail_one_after_another_are_computed_from_the_first(reports, policy):
    connector = load_seeded()
    harness = Harness(connector=connector, max_in_flight=1, load_failure_policy=policy)
    pool = harness.scheduler.kv_cache_manager.pool
    harness.worker.transfers.get_delay = lambda: len(reports) + 1
    bad, good = harness.add([1] * 16, 3, seed=LOADED), harness.add([3] * 16, 3, seed=LOADED)
    harness.step()
    (blocks,) = harness.scheduler.kv_cache_manager.reserved[harness.request(bad).transfer_id]
    lost = {index for report in reports for index in report}
    harness.worker.transfers.find_bad_blocks = lambda load: (
        lost if load.block_ids == blocks else set()
    )
    for report in reports:
        harness.worker.transfers.invalid += [blocks[index] for index in report]
        harness.step()
        # Nothing is found, and nothing ends, before the load has ended.
        assert is_loading(harness, bad)
        assert pool.num_cached == 0
    harness.drain()
    assert starts(harness, good) == [15]
    assert sum(stats.kv_connector.num_failed_loads for stats in harness.stats) == 1
    if policy is LoadFailurePolicy.FAIL:
        assert harness.received[bad].reason is FinishReason.ERROR
        assert starts(harness, bad) == []
    else:
        assert starts(harness, bad) == [4 * min(lost)]
    assert [key for key, _ in connector.ended].count(bad) == 1
    # Every token is compared with that of the request run alone, so no invalid block may be found.
    connector.match = lambda request, computed: ExternalMatch(0)
    again = harness.add([1] * 16, 3, seed=LOADED)
    harness.drain()
    assert starts(harness, again) == [0 if policy is LoadFailurePolicy.FAIL else 12]


@pytest.mark.parametrize("policy", LoadFailurePolicy)
@pytest.mark.parametrize("state", ["running", "preempted", "reserved", "held", "loading"])
def test_a_block_that_turns_out_invalid_affects_every_request_that_shares_it(state, policy):
    """The workers report a block late, when another request has found it."""
    connector = load_seeded(is_async=False, most=8)
    harness = Harness(
        connector=connector,
        max_in_flight=2,
        load_failure_policy=policy,
        max_num_seqs=2,
        num_blocks=7 if state == "held" else 64,
    )
    harness.worker.transfers.get_delay = lambda: 1 if state == "reserved" else 4
    first = harness.add([1] * 8 + [2], 4 if state == "held" else 20, seed=LOADED)
    harness.step()
    (tables,) = harness.scheduler.kv_cache_manager.blocks
    bad = tables[0][0]
    if state in ("reserved", "held", "loading"):
        connector.match = lambda request, computed: ExternalMatch(
            8 if request.num_prompt_tokens == 17 else 0, True
        )
    if state == "held":
        harness.worker.is_late = True
        ending = harness.add([4] * 9, 4, seed=OTHER)
        harness.schedule()
        harness.abort(ending)
    second = harness.add([1] * 8 + [3] * 9, 6, seed=LOADED)
    step = harness.schedule()
    if state == "running":
        assert tables[harness.request(second).slot][0] == bad
    elif state == "preempted":
        harness.preempt(second)
    else:
        assert is_loading(harness, second)
        assert state != "held" or step is None or not step.kv_connector_metadata
    if state == "reserved":
        harness.add([5] * 5, 20, seed=OTHER)
        while is_loading(harness, second):
            harness.step()
        assert harness.request(second).num_reserved_tokens
    harness.worker.transfers.invalid = [bad]
    for offset in range(4):
        harness.worker.kv_cache[bad][offset] = -1
    harness.drain()
    assert harness.received[first].reason is (
        FinishReason.ERROR if policy is LoadFailurePolicy.FAIL else FinishReason.LENGTH
    )


def test_a_load_begins_when_its_blocks_fit():
    connector = load_seeded()
    harness = Harness(connector=connector, num_blocks=6, max_in_flight=1)
    running = harness.add([1] * 8, 3, seed=OTHER)
    harness.step()
    harness.step()
    waiting = harness.add([2] * 12, 2, seed=LOADED)
    step = harness.schedule()
    assert step is not None
    assert not is_loading(harness, waiting)
    assert not step.kv_connector_metadata
    while not harness.received[running].is_over:
        harness.update()
        harness.schedule()
    assert is_loading(harness, waiting)
    harness.drain()
    assert starts(harness, waiting) == [11]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_blocks", [6, 7])
def test_a_loaded_request_without_room_for_its_first_token_continues_from_its_blocks(
    num_blocks, depth
):
    harness = Harness(connector=load_seeded(), num_blocks=num_blocks, max_in_flight=depth)
    running = harness.add([1] * 8, 4, seed=OTHER)
    harness.step()
    loaded = harness.add([2] * 8, 6, seed=LOADED)
    harness.drain()
    assert harness.received[running].num_events(EventKind.PREEMPTED) == 0
    assert starts(harness, running) == [0]
    # At most the last token is computed again, however often the request was preempted.
    num_tokens = [7, *(8 + number for number in range(6))]
    assert all(count in num_tokens for count in starts(harness, loaded))
    assert harness.worker.num_prompt_tokens_computed <= 8 + 3


def test_blocks_of_a_load_and_its_cached_prefix_are_not_evicted_or_preempted():
    """A running request that needs the blocks of a load preempts itself, and continues when the load has ended."""
    connector = load_seeded(most=8)
    harness = Harness(connector=connector, num_blocks=7, max_in_flight=1)
    harness.worker.transfers.get_delay = lambda: 12
    prefix = harness.add([1] * 5, 1, seed=OTHER)
    harness.drain()
    assert harness.received[prefix].is_over
    loading = harness.add([1] * 4 + [2] * 8, 2, seed=OTHER)
    connector.match = lambda request, computed: ExternalMatch(
        request.num_tokens - computed if request.num_prompt_tokens == 12 else 0, True
    )
    running = harness.add([3] * 8, 12, seed=OTHER)
    harness.step()
    assert is_loading(harness, loading)
    for _ in range(8):
        harness.step()
    assert is_loading(harness, loading)
    harness.drain()
    assert harness.received[running].num_events(EventKind.PREEMPTED) >= 1
    assert starts(harness, loading)[0] == 11


def test_loads_are_bounded_by_blocks_and_running_requests_by_max_num_seqs():
    harness = Harness(connector=load_seeded(), num_blocks=8, max_num_seqs=2, max_in_flight=1)
    harness.worker.transfers.get_delay = lambda: 3
    keys = [harness.add([number] * 8, 3, seed=LOADED) for number in range(1, 6)]
    harness.step()
    assert [is_loading(harness, key) for key in keys] == [True, True, True, False, False]
    harness.drain()
    assert all(harness.received[key].reason is FinishReason.LENGTH for key in keys)


@pytest.mark.parametrize("is_expired", [False, True])
def test_a_second_report_of_a_sent_transfer_frees_nothing(is_expired):
    connector = ModelConnector(delays_free=lambda request: True)
    harness = Harness(connector=connector, max_in_flight=1, transfer_timeout_s=9.0)
    harness.worker.transfers.get_delay = lambda: 100 if is_expired else 2
    harness.add(8, 1)
    harness.drain()
    assert connector.expired == ([0] if is_expired else [])
    harness.worker.transfers.get_delay = lambda: 3
    second = harness.add(8, 1)
    harness.step()
    harness.worker.transfers.report.finished_sending += [0, 0]
    # The blocks of the second request, which hold the same content, stay until they have been fetched.
    harness.drain()
    assert harness.received[second].finished.kv_transfer_params == {"remote_id": 1}
    assert connector.expired == ([0] if is_expired else [])


def test_an_abort_that_comes_too_late_frees_the_blocks_being_sent():
    """The client that aborts a request after its end does not pass on where its blocks are."""
    connector = ModelConnector(delays_free=lambda request: True)
    harness = Harness(connector=connector, max_in_flight=1)
    harness.worker.transfers.get_delay = lambda: 3
    sending, running = harness.add(8, 1), harness.add([9] * 8, 8)
    harness.step()
    assert harness.received[sending].is_over
    harness.scheduler.finish_requests([sending], FinishReason.ABORT)
    assert connector.expired == [0]
    # The worker reports the end of the transfer once more.
    harness.worker.transfers.report.finished_sending.append(0)
    harness.drain()
    assert connector.ended == [(sending, FinishReason.LENGTH), (running, FinishReason.LENGTH)]


def test_a_load_into_blocks_of_an_aborted_failed_load_succeeds():
    """A step reports a block of a request that has ended, when a load into the same block is about to begin."""
    connector = load_seeded(is_async=False)
    harness = Harness(
        connector=connector,
        num_blocks=4,
        max_in_flight=2,
        load_failure_policy=LoadFailurePolicy.FAIL,
    )
    harness.worker.is_late = True
    harness.worker.transfers.find_bad_blocks = lambda load: set() if load.is_async else {1}
    ending = harness.add([1] * 9, 3, seed=LOADED)
    harness.schedule()
    harness.abort(ending)
    connector.match = lambda request, computed: ExternalMatch(8 - computed, True)
    loading = harness.add([2] * 9, 2, seed=LOADED)
    harness.schedule()
    assert is_loading(harness, loading)
    harness.drain()
    assert harness.received[loading].reason is FinishReason.LENGTH
    assert starts(harness, loading) == [8]
