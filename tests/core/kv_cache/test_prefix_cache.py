"""Shared prefixes. Tests are named for the lines of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.manager import KVCacheManager
from engine.core.state.request import Request
from engine.core.state.slots import Slots
from engine.protocol.block_hash import block_hasher
from engine.protocol.config import PrefixHash
from engine.protocol.messages import EngineCoreRequest, EventKind
from engine.protocol.pooling_params import PoolingKind, PoolingParams
from engine.protocol.sampling_params import ReturnedStates, SamplingParams, StatesOf
from support.scheduler.harness import Harness
from support.scheduler.recorded_harness import RecordedHarness, replay


def num_cached(harness: Harness, key: tuple[int, int]) -> int:
    events = harness.received[key].events
    return next(e.num_cached_tokens for e in events if e.kind == EventKind.SCHEDULED)


def test_3_2_a_salt_keeps_prefixes_apart():
    harness = Harness(block_size=4)
    harness.add(20, 1, salt="red", seed=1)
    harness.drain()
    same = harness.add(20, 1, salt="red", seed=1)
    other = harness.add(20, 1, salt="blue", seed=2)
    none = harness.add(20, 1)
    harness.drain()
    assert [num_cached(harness, key) for key in (same, other, none)] == [16, 0, 0]


def test_3_2_the_next_turn_of_a_conversation_finds_the_generated_tokens():
    harness = Harness(block_size=4)
    first = harness.add(10, 15)
    harness.drain()
    # The last generated token is never computed, so 24 of 25 tokens are cached.
    history = list(range(1, 11)) + harness.received[first].token_ids
    second = harness.add([*history, 7, 7, 7], 3)
    harness.drain()
    assert num_cached(harness, second) == 24


def test_3_2_every_hash_finds_the_same_prefixes_and_replays():
    def found(prefix_hash: PrefixHash) -> list[int]:
        harness = RecordedHarness(block_size=4, prefix_hash=prefix_hash)
        first = harness.add(10, 15, salt="red", seed=1)
        harness.drain()
        history = list(range(1, 11)) + harness.received[first].token_ids
        keys = [harness.add(history, 3, salt=salt, seed=1) for salt in ("red", None)]
        harness.drain()
        assert sum(replay(harness.dump())) > 0
        return [num_cached(harness, key) for key in keys]

    assert found(PrefixHash.XXH3) == found(PrefixHash.SHA256) == [24, 0]


def test_3_3_blocks_after_a_duplicated_block_are_found_when_the_first_copy_is_evicted():
    harness = Harness(block_size=4, num_blocks=12, max_model_len=44)
    prompt = list(range(1, 9))
    harness.add(prompt, 1)
    harness.drain()
    # If all of a prompt is cached, its last block is computed again.
    second = harness.add(prompt, 13)
    while len(harness.received[second].token_ids) < 9:
        harness.step()
    history = prompt + harness.received[second].token_ids
    # This uses every block that is not held, so that the first copy of that block is evicted.
    harness.add([9] * 24, 2)
    harness.drain()
    third = harness.add(history, 1)
    harness.drain()
    assert (len(history), num_cached(harness, third)) == (17, 16)


def test_3_3_requests_of_one_step_share_the_blocks_it_computes():
    harness = Harness(block_size=4, max_num_batched_tokens=100)
    keys = [harness.add(40, 5) for _ in range(4)]
    step = harness.schedule()
    assert [data.num_computed_tokens for data in step.new_requests] == [0, 36, 36, 36]
    harness.drain()
    assert harness.worker.num_prompt_tokens_computed == 40 + 3 * 4
    assert len({tuple(harness.received[key].token_ids) for key in keys}) == 1


def test_3_3_a_running_request_shares_the_blocks_of_its_prompt():
    harness = Harness(block_size=4)
    harness.add(20, 40)
    harness.step()
    key = harness.add([*range(1, 21), 99], 3)
    harness.schedule()
    assert harness.scheduler.kv_cache_manager.pool.ref_counts.count(2) == 5
    harness.drain()
    assert num_cached(harness, key) == 20


def test_3_4_a_failed_admission_changes_nothing():
    harness = Harness(num_blocks=8, block_size=4)
    harness.add([1] * 16, 2)
    harness.drain()
    harness.add([2] * 11, 1)
    harness.schedule()
    pool = harness.scheduler.kv_cache_manager.pool
    before = (pool.num_free, pool.num_cached, list(pool.ref_counts))
    # Four of its seven blocks are cached but free. It needs three more, and only one remains.
    key = harness.add([1] * 27, 1)
    assert harness.schedule() is None
    assert (pool.num_free, pool.num_cached, list(pool.ref_counts)) == before
    harness.drain()
    assert num_cached(harness, key) == 16


def test_3_4_growth_is_all_or_nothing():
    manager = KVCacheManager(
        num_blocks=4,
        block_size=4,
        slots=Slots(2, 10),
        enable_prefix_caching=True,
        hash_blocks=block_hasher(PrefixHash.SHA256),
    )
    message = EngineCoreRequest(0, bytes(4 * 13), SamplingParams(), 0.0)
    request = Request(0, message, 0, 0.0)
    prefix = manager.find_prefix(request)
    assert manager.claim_blocks(request, prefix, 13) is None
    assert manager.pool.num_free == 3
    first, second = (manager.claim_blocks(request, prefix, count) for count in (8, 4))
    assert first is not None and second is not None
    assert manager.claim_blocks(request, prefix, 1) is None
    manager.allocate_claimed([first, second])
    assert (first.tables, second.tables) == (([1, 2],), ([3],))
    assert manager.pool.num_free == 0


def test_3_2_prompts_admitted_in_one_step_share_their_common_prefix():
    harness = Harness(block_size=4)
    harness.add([1] * 4, 1)
    harness.drain()
    keys = [harness.add([1] * 8 + [number] * 6, 4) for number in range(2, 5)]
    keys.append(harness.add([1] * 8 + [4] * 8, 4))
    harness.schedule()
    assert harness.scheduler.get_request_counts() == (4, 0)
    harness.drain()
    assert [num_cached(harness, key) for key in keys] == [4, 8, 8, 12]


def test_3_4_a_block_evicted_in_a_step_is_not_a_hit_in_that_step():
    harness = Harness(num_blocks=8, block_size=4)
    for prompt in ([1] * 12, [2] * 8):
        harness.add(prompt, 1)
        harness.drain()
    # The first request uses the two blank blocks, and the three cached blocks that the second one would hit.
    harness.add([3] * 20, 1)
    key = harness.add([1] * 13, 2)
    harness.schedule()
    assert harness.scheduler.get_request_counts() == (1, 1)
    harness.drain()
    assert num_cached(harness, key) == 0


def test_3_5_placeholders_are_not_cached():
    harness = Harness(block_size=2, max_in_flight=4)
    key = harness.add(3, 30)
    for _ in range(4):
        harness.schedule()
    cached = harness.scheduler.kv_cache_manager.pool.num_cached
    harness.abort(key)
    # Four steps have computed six tokens, but the core has received only the prompt's three.
    assert cached == harness.scheduler.kv_cache_manager.pool.num_cached == 1
    harness.drain()


def test_3_6_reset_fails_while_blocks_are_in_use():
    harness = Harness(block_size=4)
    key = harness.add(20, 10)
    harness.schedule()
    assert not harness.scheduler.reset_prefix_cache()
    harness.drain()
    assert harness.scheduler.reset_prefix_cache()
    again = harness.add(20, 1)
    harness.drain()
    assert num_cached(harness, again) == 0
    assert harness.received[key].num_events(EventKind.PREEMPTED) == 0


def test_3_6_a_reset_can_preempt_running_requests_and_drop_their_tokens_in_flight():
    harness = Harness(block_size=4, max_in_flight=3)
    keys = [harness.add([n + 1] * 9, 10) for n in range(3)]
    harness.schedule()
    harness.schedule()
    assert harness.scheduler.reset_prefix_cache(True, 5.0)
    assert harness.scheduler.get_request_counts() == (0, 3)
    harness.drain()
    assert all(harness.received[key].num_events(EventKind.PREEMPTED) == 1 for key in keys)


def test_3_9_queries_hits_and_usage_are_counted_in_tokens():
    harness = Harness(block_size=4, num_blocks=33)
    harness.add(20, 1)
    harness.drain()
    harness.add(20, 1)
    harness.drain()
    assert sum(stats.prefix_cache_queries for stats in harness.stats) == 40
    assert sum(stats.prefix_cache_hits for stats in harness.stats) == 16
    assert max(stats.kv_cache_usage for stats in harness.stats) <= 5 / 32
    assert harness.stats[-1].kv_cache_usage == 0.0


def test_a_preempted_request_finds_its_own_blocks_again():
    harness = Harness(block_size=4, max_in_flight=1)
    key = harness.add(21, 20)
    for _ in range(8):
        harness.step()
    harness.preempt(key)
    step = harness.schedule()
    # 21 prompt and 8 output tokens, the last of which was not computed yet.
    assert step.new_requests[0].num_computed_tokens == 28
    harness.drain()


def test_prompt_logprobs_do_not_read_the_prefix_cache():
    harness = Harness(block_size=4)
    harness.add(20, 1)
    harness.drain()
    key = harness.add(20, 1, prompt_logprobs=2)
    harness.drain()
    assert num_cached(harness, key) == 0
    assert sum(stats.prefix_cache_queries for stats in harness.stats) == 20


@pytest.mark.parametrize("computes_whole_prompt", [True, False])
def test_a_pooled_prompt_reads_cached_prefixes_unless_it_needs_every_token(
    computes_whole_prompt,
):
    harness = Harness(block_size=4)
    harness.add(20, 1)
    harness.drain()
    pooling = PoolingParams(PoolingKind.LAST, computes_whole_prompt)
    key = harness.add(20, 1, pooling_params=pooling)
    harness.drain()
    assert num_cached(harness, key) == (0 if computes_whole_prompt else 16)


@pytest.mark.parametrize("tokens", StatesOf)
def test_a_request_reads_no_cached_prefix_whose_hidden_states_it_returns(tokens):
    harness = Harness(block_size=4)
    harness.add(20, 1)
    harness.drain()
    key = harness.add(20, 9, returned_states=ReturnedStates(tokens))
    harness.drain()
    assert num_cached(harness, key) == (16 if tokens is StatesOf.LAST else 0)


def test_without_prefix_caching_nothing_is_found():
    harness = Harness(block_size=4, enable_prefix_caching=False)
    for _ in range(2):
        key = harness.add(20, 1)
        harness.drain()
    assert num_cached(harness, key) == 0
    assert harness.scheduler.kv_cache_manager.pool.num_cached == 0
