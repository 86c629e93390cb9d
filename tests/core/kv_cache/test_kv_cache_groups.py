"""Groups of layers that see different parts of a sequence, line 3.7 of the scheduler's specification."""

from __future__ import annotations

import pytest
from engine.core.kv_cache.cached_prefix import group_key
from engine.protocol.arrays import int32_view
from engine.protocol.config import SpeculativeConfig
from engine.protocol.encoder_inputs.inputs import EncoderInput
from engine.protocol.errors import ConfigError
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.protocol.messages import EventKind, FinishReason
from support.scheduler.harness import Harness
from support.scheduler.model_connector import ModelConnector

FULL = KVCacheGroup()
SLIDING = KVCacheGroup(AttentionKind.SLIDING_WINDOW, 8)
CHUNKED = KVCacheGroup(AttentionKind.CHUNKED_LOCAL, 8)
STATE = KVCacheGroup(AttentionKind.STATE_SPACE)
CROSS = KVCacheGroup(AttentionKind.CROSS, 10)
SOURCE = EncoderInput(0, 0, bytes(32), 10)


def num_held(harness: Harness, group: int, slot: int = 0) -> int:
    return sum(block != 0 for block in harness.scheduler.kv_cache_manager.blocks[group][slot])


def num_cached(harness: Harness, key: tuple[int, int]) -> int:
    events = harness.received[key].events
    return next(e.num_cached_tokens for e in events if e.kind == EventKind.SCHEDULED)


def forget(harness: Harness, key: tuple[int, int], group: int, *indices: int) -> None:
    """Evict some of a prompt's blocks."""
    digests = harness.received[key].message.block_hashes
    names = [group_key(digests[i * 32 : i * 32 + 32], group) for i in indices]
    pool = harness.scheduler.kv_cache_manager.pool
    assert all(pool.is_cached(name) for name in names)
    pool.uncache_blocks(names)


@pytest.mark.parametrize(
    ("group", "most"), [(SLIDING, 3), (CHUNKED, 2), (STATE, 2), (CROSS, 3), (FULL, 26)]
)
def test_3_7_a_long_decode_holds_only_the_blocks_its_window_needs(group, most):
    harness = Harness(block_size=4, num_blocks=80, groups=(FULL, group), max_in_flight=1)
    harness.add(4, 100, inputs=[SOURCE] if group is CROSS else [])
    held = [0]
    while harness.step() and harness.scheduler.requests:
        held.append(num_held(harness, 1))
    assert max(held) == most
    harness.drain()


def test_3_7_freed_blocks_are_sent_to_the_worker_as_null_blocks():
    harness = Harness(block_size=4, groups=(SLIDING,), max_in_flight=1)
    harness.add(4, 100)
    for _ in range(10):
        harness.step()
    # The token at position 12 sees 5 … 12: the first block is outside.
    updates = [step.block_updates for step in harness.steps if step.block_updates]
    assert [0, 0, 0, 0] in int32_view(updates[-1]).reshape(-1, 4).tolist()
    harness.drain()


def test_3_7_a_prompt_frees_blocks_chunk_by_chunk():
    harness = Harness(
        block_size=4, num_blocks=8, groups=(SLIDING,), max_num_batched_tokens=16, max_model_len=128
    )
    key = harness.add(100, 20)
    harness.drain()
    assert harness.received[key].reason is FinishReason.LENGTH
    assert len(harness.received[key].token_ids) == 20


def test_2_6_a_window_admits_prompts_that_full_attention_rejects():
    for groups, reason in (((FULL,), FinishReason.IGNORED), ((SLIDING,), FinishReason.LENGTH)):
        harness = Harness(block_size=4, num_blocks=12, groups=groups, max_num_batched_tokens=16)
        key = harness.add(100, 5)
        harness.drain()
        assert harness.received[key].reason is reason


def test_3_7_a_sliding_window_hit_needs_only_the_last_blocks():
    for group, expected in ((SLIDING, 36), (FULL, 0)):
        harness = Harness(block_size=4, groups=(group,))
        first = harness.add(40, 1)
        harness.drain()
        forget(harness, first, 0, 0, 1, 2, 3, 4, 5, 6)
        again = harness.add(40, 1)
        harness.drain()
        assert num_cached(harness, again) == expected


def test_3_7_a_missing_block_in_the_window_shortens_the_hit():
    harness = Harness(block_size=4, groups=(SLIDING,))
    first = harness.add(40, 1)
    harness.drain()
    forget(harness, first, 0, 7)
    again = harness.add(40, 1)
    harness.drain()
    # Token 28 sees 21 … 28, which are in blocks 5 and 6.
    assert num_cached(harness, again) == 28


def test_3_7_a_chunked_attention_hit_needs_nothing_at_a_chunk_boundary():
    harness = Harness(block_size=4, groups=(FULL, CHUNKED))
    first = harness.add(38, 1)
    harness.drain()
    forget(harness, first, 1, *range(9))
    again = harness.add(38, 1)
    harness.drain()
    assert num_cached(harness, again) == 32


def test_3_7_a_hybrid_hit_is_the_longest_that_every_group_supports():
    harness = Harness(block_size=4, groups=(FULL, SLIDING, SLIDING))
    first = harness.add(40, 1)
    harness.drain()
    forget(harness, first, 0, 8)
    forget(harness, first, 2, 7)
    forget(harness, first, 1, 6)
    again = harness.add(40, 1)
    harness.drain()
    assert num_cached(harness, again) == 24


def test_3_7_a_state_is_cached_only_where_a_step_ended():
    harness = Harness(block_size=4, groups=(FULL, STATE), max_num_batched_tokens=8)
    harness.add(22, 1)
    harness.drain()
    longer = harness.add(30, 1)
    harness.drain()
    # Steps ended after 8, 16, 20 and 22 tokens: the prompt's last full block gets a step that ends with it.
    assert num_cached(harness, longer) == 20


@pytest.mark.parametrize("groups", [(FULL, STATE), (STATE, SLIDING, FULL), (SLIDING, STATE)])
@pytest.mark.parametrize("num_chunk_tokens", [8, 64])
def test_prompts_after_the_second_continue_after_a_common_system_prompt(groups, num_chunk_tokens):
    harness = Harness(block_size=4, groups=groups, max_num_batched_tokens=num_chunk_tokens)
    system = [9] * 26
    keys = []
    for number in range(4):
        keys.append(harness.add([*system, *[number] * 11], 2))
        harness.drain()
    # The first prompt has no state there, and the second one stores it.
    found = [num_cached(harness, key) for key in keys]
    assert found == [0, 24 if num_chunk_tokens == 8 else 0, 24, 24]


def test_3_7_a_state_is_not_shared_within_the_step_that_computes_it():
    harness = Harness(block_size=4, groups=(STATE,))
    harness.add(8, 1)
    harness.add(9, 1)
    step = harness.schedule()
    assert [data.num_computed_tokens for data in step.new_requests] == [0, 0]
    harness.drain()
    third = harness.add(9, 1)
    harness.drain()
    assert num_cached(harness, third) == 8


@pytest.mark.parametrize("groups", [(FULL, SLIDING), (SLIDING,), (FULL, CHUNKED), (FULL, STATE)])
@pytest.mark.parametrize("num_tokens", [31, 33, 34])
def test_3_7_the_next_turn_of_a_conversation_finds_its_window(groups, num_tokens):
    harness = Harness(block_size=4, groups=groups, max_in_flight=1)
    first = harness.add(10, num_tokens)
    harness.drain()
    history = list(range(1, 11)) + harness.received[first].token_ids
    second = harness.add([*history, 7, 7, 7], 3)
    harness.drain()
    assert num_cached(harness, second) == 40


@pytest.mark.parametrize("drafts", [None, SpeculativeConfig(3)])
def test_the_next_turn_continues_from_the_last_state_in_the_answer(drafts):
    """A request keeps one state of its answer in addition to the states of its prompt."""
    harness = Harness(
        block_size=4,
        groups=(FULL, KVCacheGroup(AttentionKind.STATE_SPACE, 4)),
        speculative=drafts,
        propose=lambda row: [(row.fingerprints[-1] >> 20) % 64, 0, 0],
    )
    first = harness.add(10, 33)
    harness.drain()
    # The answer has 8 full blocks of keys and values after the prompt's 2, which have a state in the second.
    assert harness.scheduler.kv_cache_manager.pool.num_cached == 10 + 2
    history = list(range(1, 11)) + harness.received[first].token_ids
    second = harness.add([*history, 7, 7, 7], 3)
    harness.drain()
    assert num_cached(harness, second) == 40


def test_7_3_cross_attention_blocks_are_allocated_once():
    harness = Harness(block_size=4, groups=(FULL, CROSS))
    harness.add(5, 30, inputs=[SOURCE])
    tables = set()
    while harness.step():
        tables.add(tuple(harness.scheduler.kv_cache_manager.blocks[1][0]))
    assert {len(table) for table in tables} == {0, 3}
    assert len(tables) == 2


@pytest.mark.parametrize(
    "settings",
    [{"groups": (FULL, SLIDING)}, {"groups": (SLIDING,)}, {"num_host_blocks": 4}],
)
def test_a_connector_requires_full_attention(settings):
    with pytest.raises(ConfigError, match="kv_connector='model' supports only full"):
        Harness(connector=ModelConnector(), **settings)


def test_states_before_rejected_drafts_have_blocks():
    """A slot may need several more blocks than its accepted tokens."""
    harness = Harness(
        block_size=1,
        groups=(FULL, KVCacheGroup(AttentionKind.STATE_SPACE, 4)),
        speculative=SpeculativeConfig(4),
        propose=lambda row: [(row.token_ids[-1] + 1) % 64] * 4,
        async_scheduling=True,
    )
    key = harness.add(5, 30)
    harness.drain()
    assert len(harness.received[key].token_ids) == 30


def test_a_window_keeps_the_blocks_needed_after_rejected_drafts():
    harness = Harness(
        block_size=1,
        groups=(FULL, KVCacheGroup(AttentionKind.SLIDING_WINDOW, 3)),
        speculative=SpeculativeConfig(4),
        propose=lambda row: [0] * 4,
        async_scheduling=True,
    )
    harness.add(5, 30)
    harness.drain()
