"""A new core adopts the blocks that the workers hold for its requests.

The harness passes them to the next core, checks references and tables, and compares every output with that of the
request alone.
"""

from __future__ import annotations

import msgspec
import pytest
from engine.core.message_checks import is_valid_held_request
from engine.protocol.arrays import int32_bytes
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.worker_messages import HeldRequest
from support.scheduler.harness import Harness
from support.scheduler.recorded_harness import RecordedHarness, replay

WINDOWED = KVCacheGroup(AttentionKind.SLIDING_WINDOW, 9)
WINDOW = (KVCacheGroup(), WINDOWED)
STATE = (KVCacheGroup(), KVCacheGroup(AttentionKind.STATE_SPACE))


def run(harness: Harness, num_steps: int) -> None:
    for _ in range(num_steps):
        harness.step()


@pytest.mark.parametrize("caching", [True, False])
def test_each_stream_computes_one_token_and_nothing_again(caching):
    harness = Harness(enable_prefix_caching=caching)
    for length in (9, 17, 30):
        harness.add([1] * 8 + [length] * (length - 8), 20)
    run(harness, 6)
    harness.lose_core()
    computed = harness.worker.num_prompt_tokens_computed
    harness.schedule()
    assert sorted(harness.batch.values()) == [1, 1, 1]
    harness.drain()
    assert harness.worker.num_prompt_tokens_computed == computed


def test_a_prompt_continues_after_its_last_computed_chunk():
    harness = Harness(max_num_batched_tokens=10, max_in_flight=1)
    harness.add(35)
    run(harness, 2)
    harness.lose_core()
    harness.drain()
    assert harness.worker.num_prompt_tokens_computed == 35


def test_several_cores_in_a_row_may_exit():
    harness = Harness()
    for length in (5, 12):
        harness.add(length, 30)
    for _ in range(4):
        run(harness, 3)
        harness.lose_core()
    computed = harness.worker.num_prompt_tokens_computed
    harness.drain()
    assert harness.worker.num_prompt_tokens_computed == computed == 13


def test_blocks_of_requests_that_do_not_continue_are_free():
    harness = Harness()
    kept, left = harness.add(9, 20), harness.add(13, 20, client=1)
    run(harness, 3)
    harness.received[left].was_aborted = True
    harness.lose_core()
    pool = harness.scheduler.kv_cache_manager.pool
    request = next(iter(harness.scheduler.requests.values()))
    assert request.client_index == kept[0]
    assert pool.num_blocks - 1 - pool.num_free == -(-request.num_reserved_tokens // 4)
    harness.drain()


def test_an_index_from_a_restarted_frontend_is_another_request():
    harness = Harness()
    key = harness.add(9, 20)
    run(harness, 3)
    received = harness.received[key]
    received.message = msgspec.structs.replace(received.message, arrival_time=5.5)
    harness.lose_core()
    (request,) = harness.scheduler.requests.values()
    assert request.num_reserved_tokens == 0
    harness.drain()


def test_a_block_that_other_requests_read_is_not_overwritten():
    """The last block of a prompt is full and shared with another request before a token has been sampled."""
    harness = Harness(max_in_flight=2)
    prompt = list(range(1, 9))
    harness.add(prompt, 5)
    harness.schedule()
    harness.add([*prompt, 9, 10], 5)
    harness.schedule()
    harness.lose_core()
    first, second = harness.scheduler.requests.values()
    assert (first.num_reserved_tokens, second.num_reserved_tokens) == (4, 9)
    harness.drain()


@pytest.mark.parametrize("groups", [WINDOW, (WINDOWED,)])
def test_sliding_window_layers_keep_the_blocks_that_the_next_token_needs(groups):
    harness = Harness(groups=groups, num_blocks=128)
    for length in (7, 20, 40):
        harness.add([length] * length, 30)
    run(harness, 5)
    harness.lose_core()
    harness.schedule()
    assert sorted(harness.batch.values()) == [1, 1, 1]
    harness.drain()


@pytest.mark.parametrize("length", [8, 9, 20])
def test_a_state_continues_if_the_client_has_all_tokens_that_it_covers(length):
    harness = Harness(groups=STATE, num_blocks=128, max_in_flight=1)
    harness.add(length, 30)
    run(harness, 6)
    harness.lose_core()
    harness.schedule()
    assert list(harness.batch.values()) == [1]
    harness.drain()


def test_state_ahead_of_the_delivered_tokens_is_computed_again():
    harness = Harness(groups=STATE, num_blocks=128, max_in_flight=1)
    harness.add(20, 30)
    run(harness, 5)
    harness.schedule()
    harness.lose_core()
    assert not harness.scheduler.kv_cache_manager.reserved
    harness.drain()


@pytest.mark.parametrize("place", [0, 1])
def test_adopted_request_stores_its_encoder_output_again_but_recomputes_no_token(place):
    groups = [KVCacheGroup()]
    groups.insert(place, KVCacheGroup(AttentionKind.CROSS, 7))
    harness = Harness(groups=tuple(groups), num_blocks=128)
    for length in (9, 20):
        harness.add(length, 30, inputs=[EncoderInput(0, 0, bytes(32), 7)])
    run(harness, 5)
    harness.lose_core()
    assert len(harness.scheduler.kv_cache_manager.reserved) == 2
    harness.schedule()
    assert list(harness.batch.values()) == [1, 1]
    harness.drain()


def test_prompt_logprobs_that_were_not_delivered_are_computed_again():
    harness = Harness(max_num_batched_tokens=10, max_in_flight=1)
    harness.add(25, prompt_logprobs=1)
    run(harness, 2)
    harness.lose_core()
    harness.drain()
    assert harness.worker.num_prompt_tokens_computed == 20 + 25


def test_waiting_request_frees_its_blocks_for_earlier_requests():
    harness = Harness(num_blocks=17, max_num_seqs=3, max_in_flight=1)
    keys = [harness.add([index] * 17, 12) for index in range(3)]
    run(harness, 2)
    harness.received = {key: harness.received[key] for key in (*keys[1:], keys[0])}
    first = harness.received[keys[1]]
    # The first resubmitted request needs almost every block.
    first.message = msgspec.structs.replace(first.message, arrival_time=0.5)
    harness.lose_core()
    harness.drain()


def test_a_handoff_can_be_replayed():
    harness = RecordedHarness(groups=WINDOW, num_blocks=60)
    for length in (9, 17, 30):
        harness.add([length] * length, 20)
    run(harness, 6)
    harness.lose_core()
    harness.drain()
    assert replay(harness.dump())[0] > 10


def test_the_state_of_a_request_that_is_aborted_before_it_continues_is_not_found_elsewhere():
    harness = Harness(groups=STATE, block_size=2, max_num_batched_tokens=10, max_in_flight=1)
    harness.add([7] * 12, 20)
    harness.schedule()
    harness.lose_core()
    [key] = harness.scheduler.requests
    harness.abort(key)
    # Its blocks are allocated next, including the one that held the state.
    harness.add([8] * 12, 20)
    harness.step()
    harness.add([7] * 12, 20)
    harness.drain()


def test_impossible_blocks_are_rejected():
    held = HeldRequest((0, 1), 2.0, 5, (int32_bytes([3, 63]),))
    limits = {"num_blocks": 64, "num_groups": 1, "block_size": 4}
    assert is_valid_held_request(held, **limits)
    for wrong in (
        {"num_computed_tokens": 9},
        {"num_computed_tokens": -1},
        {"block_ids": (int32_bytes([3, 64]),)},
        {"block_ids": (int32_bytes([3, -1]),)},
        {"block_ids": (b"123",)},
        {"block_ids": (int32_bytes([3, 4]),) * 2},
    ):
        assert not is_valid_held_request(msgspec.structs.replace(held, **wrong), **limits)
