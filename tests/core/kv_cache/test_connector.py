"""The scheduler side of KV connectors. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.connector import (
    ExternalMatch,
    KVConnector,
    create_connector,
    register_connector,
)
from engine.core.state.request import Request, RequestStatus
from engine.protocol.arrays import int32_view
from engine.protocol.config import KVTransferConfig, LoadFailurePolicy
from engine.protocol.errors import ConfigError
from engine.protocol.messages import EventKind, FinishReason
from engine.protocol.worker_messages import NewRequestData
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector


def load(num_tokens: int, *, is_async: bool = False) -> ModelConnector:
    """Let the connector load up to this many tokens beyond the computed ones, for any request."""

    def match(request: Request, num_computed_tokens: int) -> ExternalMatch:
        most = request.num_tokens - num_computed_tokens
        return ExternalMatch(min(num_tokens, most), is_async)

    return ModelConnector(match)


def num_held(harness: Harness) -> int:
    pool = harness.scheduler.kv_cache_manager.pool
    return pool.num_blocks - 1 - pool.num_free


def test_8_1_tokens_found_by_a_connector_add_to_the_local_hit():
    harness = Harness(connector=load(6))
    harness.add([7] * 8, 2)
    harness.drain()
    key = harness.add([7] * 8 + [9] * 12, 3)
    step = harness.schedule()
    assert step.new_requests[0].num_computed_tokens == 8 + 6
    assert harness.batch == {0: 20 - 14}
    harness.drain()
    assert harness.received[key].events[1].num_cached_tokens == 14
    assert sum(stats.kv_connector.prefix_cache_hits for stats in harness.stats) == 6 + 6
    assert sum(stats.kv_connector.prefix_cache_queries for stats in harness.stats) == 8 + 12
    assert sum(stats.prefix_cache_hits for stats in harness.stats) == 8


def test_8_1_a_prompt_with_prompt_logprobs_is_not_loaded():
    harness = Harness(connector=load(6), inject_preemption=0.2)
    harness.add(20, 30, prompt_logprobs=1)
    harness.drain()
    first, resumed, *_ = [data for step in harness.steps for data in step.new_requests]
    assert first.num_computed_tokens == 0
    # Some of its 24 tokens are found, and the others except the last one are loaded.
    assert resumed.num_computed_tokens == 23


def test_8_1_a_synchronous_load_leaves_the_last_token_to_compute():
    harness = Harness(connector=load(100))
    harness.add(12, 2)
    assert harness.schedule().new_requests[0].num_computed_tokens == 11
    harness.drain()


def test_8_1_a_request_waiting_for_the_connectors_answer_keeps_its_place():
    answers = {8: None}
    harness = Harness(
        connector=ModelConnector(
            lambda request, computed: answers.get(request.num_tokens, ExternalMatch(0))
        ),
        max_num_seqs=2,
        max_in_flight=1,
    )
    late, passing, behind = harness.add(8, 2), harness.add(5, 2), harness.add(5, 9)
    harness.step()
    assert harness.received[late].num_events(EventKind.SCHEDULED) == 0
    assert harness.received[passing].num_events(EventKind.SCHEDULED) == 1
    del answers[8]
    # One more request fits after `passing` ends.
    third = harness.add(6, 2)
    while not harness.received[third].num_events(EventKind.SCHEDULED):
        harness.step()
    starts = [harness.received[key].events[1].timestamp for key in (behind, late, third)]
    assert starts == sorted(starts)
    harness.drain()


def test_8_1_the_connector_is_asked_again_while_the_scheduler_is_idle():
    answers = iter((None, None, None, ExternalMatch(0)))
    harness = Harness(connector=ModelConnector(lambda request, computed: next(answers)))
    key = harness.add(8, 2)
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH


def test_8_1_the_connector_is_notified_once_of_the_end_and_its_reason():
    connector = ModelConnector()
    harness = Harness(connector=connector, max_num_seqs=1)
    done, waiting = harness.add(5, 2), harness.add(5, 2)
    harness.abort(waiting)
    harness.drain()
    assert connector.ended == [(waiting, FinishReason.ABORT), (done, FinishReason.LENGTH)]


def test_8_1_connectors_are_loaded_by_name_or_by_module():
    register_connector("by-name", lambda config: ModelConnector())
    assert isinstance(create_connector(KVTransferConfig("by-name")), ModelConnector)
    with pytest.raises(ValueError, match="already registered"):
        register_connector("by-name", lambda config: ModelConnector())
    with pytest.raises(
        ConfigError, match=r"kv_connector='absent' is not known; registered: .*by-name"
    ):
        create_connector(KVTransferConfig("absent"))
    here = "support.scheduler.model_connector"
    by_module = KVTransferConfig("ConfiguredConnector", kv_connector_module_path=here)
    assert isinstance(create_connector(by_module), KVConnector)
    for name, path in (("Absent", here), ("Transfer", here), ("Absent", "support.absent")):
        with pytest.raises(ConfigError, match=f"kv_connector='{name}'"):
            create_connector(KVTransferConfig(name, kv_connector_module_path=path))


def test_8_2_an_asynchronous_load_waits_without_a_slot_and_computes_the_last_token():
    harness = Harness(connector=load(100, is_async=True), max_in_flight=1)
    harness.worker.transfers.get_delay = lambda: 2
    key = harness.add(12, 2)
    step = harness.schedule()
    assert step.kv_connector_metadata and not step.new_requests
    assert harness.request(key).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert harness.scheduler.get_request_counts() == (0, 1)
    assert num_held(harness) == 3
    harness.drain()
    starts = [step for step in harness.steps if step.new_requests]
    assert [step.step for step in starts] == [4]
    assert starts[0].new_requests[0].num_computed_tokens == 11


def test_8_2_other_requests_run_during_a_load():
    harness = Harness(
        connector=ModelConnector(
            lambda request, computed: ExternalMatch(8 if request.num_tokens == 9 else 0, True)
        )
    )
    harness.worker.transfers.get_delay = lambda: 6
    slow, quick = harness.add(9, 2), harness.add(5, 4)
    while not harness.received[quick].is_over:
        harness.step()
    assert harness.request(slow).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert (harness.stats[-1].num_waiting, harness.stats[-1].num_deferred) == (1, 1)
    harness.drain()
    assert (harness.stats[-1].num_waiting, harness.stats[-1].num_deferred) == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_3_5_loaded_blocks_are_found_only_after_the_load_has_ended(is_async):
    harness = Harness(connector=load(8, is_async=is_async), max_in_flight=1)
    pool = harness.scheduler.kv_cache_manager.pool
    harness.worker.transfers.get_delay = lambda: 0
    harness.add(9, 9)
    harness.schedule()
    assert pool.num_cached == 0
    harness.update()
    assert pool.num_cached == 2
    harness.drain()


def test_8_3_a_failed_asynchronous_load_is_cut_back_to_the_valid_prefix():
    harness = Harness(connector=load(100, is_async=True), max_in_flight=1)
    harness.worker.transfers.find_bad_blocks = lambda transfer: {1}
    harness.add(12, 2)
    harness.drain()
    starts = [step.new_requests[0] for step in harness.steps if step.new_requests]
    # Nothing is loaded a second time.
    assert [start.num_computed_tokens for start in starts] == [4]
    assert sum(stats.kv_connector.num_failed_loads for stats in harness.stats) == 1
    assert_block_was_cleared_before_its_use(harness, starts[0])


def assert_block_was_cleared_before_its_use(harness: Harness, start: NewRequestData) -> None:
    """Assert that the second block of a request was filled with zeros, as a failed load may leave NaN in it."""
    (clearing,) = [step for step in harness.steps if step.cleared_blocks]
    assert int32_view(clearing.cleared_blocks).tolist() == [int32_view(start.block_ids[0])[1]]
    assert clearing.step <= next(step.step for step in harness.steps if start in step.new_requests)


@pytest.mark.parametrize("is_async", [False, True])
def test_8_3_the_workers_check_the_blocks_that_a_connector_from_a_module_loads(is_async):
    harness = Harness(connector=load(7, is_async=is_async), max_in_flight=1)
    harness.add([1] * 4 + [2], 2)
    harness.drain()
    key = harness.add([1] * 4 + [3] * 12, 2)
    harness.drain()
    (start,) = (new for step in harness.steps for new in step.new_requests if new.request_id == key)
    checked = [load for step in harness.steps for load in step.checked_loads][-1]
    # The first block is found in the prefix cache, and the last one is computed.
    assert int32_view(checked.block_ids).tolist() == int32_view(start.block_ids[0])[1:3].tolist()
    assert (checked.transfer_id is not None) == is_async
    assert checked.group == 0


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_8_3_a_failed_synchronous_load_skips_the_output_and_computes_from_the_valid_prefix(
    caching, depth
):
    harness = Harness(connector=load(9), max_in_flight=depth, enable_prefix_caching=caching)
    harness.worker.transfers.find_bad_blocks = lambda transfer: (
        {1} if len(transfer.token_ids) == 4 * 12 else set()
    )
    bad, good = harness.add([1] * 12, 4), harness.add([2] * 11, 4)
    harness.step()
    assert harness.received[bad].token_ids == []
    assert len(harness.received[good].token_ids) == 1
    harness.drain()
    starts = [new for step in harness.steps for new in step.new_requests]
    assert [new.num_computed_tokens for new in starts if new.request_id == bad] == [9, 4]
    assert [len(step.cleared_blocks) for step in harness.steps if step.cleared_blocks] == [4]
    assert harness.received[good].num_events(EventKind.PREEMPTED) == 0


def test_8_3_a_bad_block_that_is_shared_is_computed_once():
    harness = Harness(connector=load(8), max_in_flight=1)
    harness.add([1] * 8 + [2], 20)
    harness.step()
    harness.add([1] * 8 + [3], 20)
    harness.step()
    (blocks,) = harness.scheduler.kv_cache_manager.blocks
    assert blocks[0][:2] == blocks[1][:2]
    # The workers detect the damage late, after both requests got the block.
    harness.worker.transfers.invalid = [blocks[0][0]]
    for offset in range(4):
        harness.worker.kv_cache[blocks[0][0]][offset] = -1
    computed = harness.worker.num_prompt_tokens_computed
    harness.drain()
    # One request recomputes its 9 prompt tokens, and the other recomputes the tokens after the two blocks.
    assert harness.worker.num_prompt_tokens_computed - computed == 9 + 1


@pytest.mark.parametrize("is_async", [False, True])
def test_8_3_with_the_fail_policy_a_failed_load_ends_the_request(is_async):
    connector = load(8, is_async=is_async)
    harness = Harness(connector=connector, load_failure_policy=LoadFailurePolicy.FAIL)
    harness.worker.transfers.find_bad_blocks = lambda transfer: {1} if transfer.seed == 1 else set()
    bad, good = harness.add([1] * 9, 4, seed=1), harness.add([2] * 9, 4)
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert (
        "loading the KV cache of the request failed at block"
        in harness.received[bad].finished.message
    )
    assert harness.received[good].reason is FinishReason.LENGTH
    assert connector.ended == [(bad, FinishReason.ERROR), (good, FinishReason.LENGTH)]


def test_8_4_blocks_are_kept_until_they_are_fetched():
    connector = ModelConnector(delays_free=lambda request: True)
    harness = Harness(connector=connector, max_in_flight=1, num_blocks=8)
    harness.worker.transfers.get_delay = lambda: 3
    key = harness.add(8, 1)
    harness.step()
    received = harness.received[key]
    assert received.is_over and received.finished.kv_transfer_params == {"remote_id": 0}
    assert num_held(harness) == 2
    # Requests that arrive meanwhile must not overwrite them.
    harness.add([5] * 19, 2)
    harness.drain()
    assert connector.expired == []


def test_8_4_blocks_that_are_not_fetched_are_freed_after_the_timeout():
    connector = ModelConnector(delays_free=lambda request: True)
    harness = Harness(connector=connector, transfer_timeout_s=9.0)
    harness.worker.transfers.get_delay = lambda: 1000
    harness.add(8, 1)
    harness.drain()
    assert connector.expired == [0]
    assert sum(stats.kv_connector.num_expired_transfers for stats in harness.stats) == 1


def test_1_10_an_empty_step_polls_the_workers_only_when_nothing_is_in_flight():
    harness = Harness(connector=load(8, is_async=True), max_in_flight=4)
    harness.add(9, 2)
    assert harness.schedule() is not None
    assert harness.schedule() is None
    harness.update()
    assert harness.schedule() is not None
    harness.drain()


def test_blocks_of_an_aborted_load_are_kept_until_its_writes_have_ended():
    harness = Harness(connector=load(8, is_async=True), max_in_flight=1)
    harness.worker.transfers.get_delay = lambda: 4
    key = harness.add(9, 2)
    harness.step()
    harness.abort(key)
    assert num_held(harness) == 2
    assert harness.scheduler.get_num_unfinished_requests() == 0
    harness.drain()


@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_a_request_whose_load_hangs_is_computed_or_fails(policy):
    """The load writes to its blocks long after the request has finished, while others run."""
    connector = load(8, is_async=True)
    harness = Harness(
        connector=connector, num_blocks=12, load_timeout_s=5.0, load_failure_policy=policy
    )
    delays = iter([60])
    harness.worker.transfers.get_delay = lambda: next(delays, 1)
    hung = harness.add(9, 6)
    while not harness.received[hung].is_over:
        harness.step()
    fails = policy is LoadFailurePolicy.FAIL
    assert harness.received[hung].finished.reason is (
        FinishReason.ERROR if fails else FinishReason.LENGTH
    )
    assert num_held(harness) >= 2
    later = [harness.add(9 + number, 6) for number in range(6)]
    harness.drain()
    assert all(harness.received[key].finished.reason is FinishReason.LENGTH for key in later)
    assert num_held(harness) == 0
    assert sum(stats.kv_connector.num_failed_loads for stats in harness.stats) == 1
    # After its end, blocks are loaded again.
    last = harness.add(9, 2)
    harness.schedule()
    assert harness.request(last).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    harness.drain()


@pytest.mark.parametrize("policy", LoadFailurePolicy)
def test_requests_are_computed_while_loads_of_ended_requests_hang(policy):
    """Otherwise, clients that do not wait for the timeout would fill the cache with blocks of loads that hang."""
    harness = Harness(
        connector=load(8, is_async=True),
        num_blocks=24,
        load_timeout_s=5.0,
        load_failure_policy=policy,
    )
    harness.worker.transfers.get_delay = lambda: 60
    for _ in range(20):
        key = harness.add(9, 6)
        for _ in range(2):
            harness.step()
        if harness.received[key].token_ids:
            break
        harness.abort(key)
    assert num_held(harness) <= 12
    harness.worker.transfers.get_delay = lambda: 1
    harness.drain()
    assert harness.received[key].finished.reason is FinishReason.LENGTH
    assert num_held(harness) == 0


def test_loaded_requests_free_their_blocks_for_the_first_in_the_queue():
    """Two loaded prompts do not fit together, so the later one is freed and computed again."""
    harness = Harness(
        connector=load(8, is_async=True), num_blocks=7, max_num_batched_tokens=4, max_in_flight=1
    )
    first, second = harness.add([1] * 20, 4), harness.add([2] * 20, 4)
    harness.drain()
    assert harness.received[first].reason is harness.received[second].reason is FinishReason.LENGTH


def raising(request: Request, num_computed_tokens: int) -> ExternalMatch | None:
    raise RuntimeError("the store is gone")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising, "KV connector: the store is gone"),
        (lambda request, computed: ExternalMatch(99), "returned 99, expected 0 to 9 tokens"),
        (lambda request, computed: ExternalMatch(-1, True), "returned -1, expected 0 to 9 tokens"),
        (lambda request, computed: ExternalMatch(0.5), "returned 0.5, expected 0 to 9 tokens"),
        (lambda request, computed: 7, "KV connector: 'int' object"),
    ],
)
def test_an_invalid_answer_ends_one_request_with_a_reason(answer, message):
    harness = Harness(
        connector=ModelConnector(
            lambda request, computed: (
                answer(request, computed) if request.num_tokens == 9 else ExternalMatch(0)
            )
        )
    )
    good, bad, other = harness.add(5, 4), harness.add([9] * 9, 4), harness.add(6, 4)
    harness.drain()
    assert harness.received[bad].reason is FinishReason.ERROR
    assert message in harness.received[bad].finished.message
    assert harness.received[good].reason is harness.received[other].reason is FinishReason.LENGTH


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failing_allocation_notice_ends_one_request_and_frees_its_blocks(is_async, monkeypatch):
    connector = load(4, is_async=is_async)
    monkeypatch.setattr(connector, "update_state_after_alloc", None)
    harness = Harness(connector=connector)
    key = harness.add(9, 4)
    harness.schedule()
    assert num_held(harness) == 0
    harness.drain()
    assert "KV connector" in harness.received[key].finished.message


def test_a_failing_end_notice_ends_one_request_with_a_reason():
    def delays_free(request: Request) -> bool:
        raise RuntimeError("no such session")

    harness = Harness(connector=ModelConnector(delays_free=delays_free))
    key = harness.add(9, 4)
    harness.drain()
    assert harness.received[key].reason is FinishReason.ERROR
    assert harness.received[key].finished.message == "KV connector: no such session"


def test_reports_of_unknown_transfers_are_ignored():
    harness = Harness(connector=ModelConnector())
    key = harness.add(9, 4)
    report = harness.worker.transfers.report
    report.finished_recving += [0, 7, 7]
    report.finished_sending += [0, 7]
    harness.worker.transfers.invalid = [63, 64, 100_000]
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH
    assert int32_view(harness.steps[0].chunks).tolist() == [0, 9]


def test_a_load_waits_until_no_step_in_flight_uses_its_blocks():
    connector = ModelConnector(
        lambda request, computed: ExternalMatch(
            8 - computed if request.params.seed == 1 else 0, request.params.seed == 1
        )
    )
    harness = Harness(connector=connector, num_blocks=6, max_in_flight=2, max_num_seqs=2)
    # It ends while a step is in flight that writes to its last block.
    ending = harness.add([5] * 9, 3, eos=(), seed=0)
    harness.worker.is_late = True
    harness.schedule()
    harness.schedule()
    harness.abort(ending)
    loading = harness.add([1] * 9, 2, seed=1)
    harness.schedule()
    assert harness.request(loading).status is RequestStatus.WAITING_FOR_REMOTE_KVS
    harness.drain()
    assert harness.received[loading].reason is FinishReason.LENGTH


def test_aborting_a_request_cancels_a_load_that_waits_for_its_blocks():
    connector = load(8, is_async=True)
    harness = Harness(connector=connector, num_blocks=4, max_in_flight=2)
    connector.match = lambda request, computed: ExternalMatch(0)
    ending = harness.add([5] * 9, 3)
    harness.schedule()
    harness.abort(ending)
    connector.match = lambda request, computed: ExternalMatch(8 - computed, True)
    key = harness.add([1] * 9, 2)
    harness.schedule()
    harness.abort(key)
    assert num_held(harness) == 0
    harness.drain()
