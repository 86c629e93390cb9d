"""Prompts that are computed in parts at the same time. Tests are named for the lines of docs/scheduler.md."""

from __future__ import annotations

import pytest
from engine.protocol.errors import ConfigError
from support.scheduler.harness import Harness, admissions


def batches(harness: Harness, num_steps: int) -> list[list[int]]:
    sizes = []
    for _ in range(num_steps):
        assert harness.schedule() is not None
        sizes.append(list(harness.batch.values()))
    return sizes


def test_2_4_partial_prefills_share_the_token_budget_equally():
    harness = Harness(
        max_num_partial_prefills=2, max_num_batched_tokens=32, max_in_flight=4, block_size=4
    )
    for n in (1, 2, 3):
        harness.add([n] * 40, 2)
    # Each computes 16 tokens. Then 8 remain for each, and the third prompt fits.
    assert batches(harness, 3) == [[16, 16], [16, 16], [8, 8, 16]]
    harness.drain()


def test_2_4_a_share_is_whole_blocks_unless_it_finishes_the_prompt():
    harness = Harness(
        max_num_partial_prefills=3, max_num_batched_tokens=32, max_in_flight=4, block_size=4
    )
    for n, length in ((1, 40), (2, 9), (3, 30)):
        harness.add([n] * length, 2)
    assert batches(harness, 1) == [[8, 9, 8]]
    harness.drain()


def test_2_4_without_prefix_caching_a_share_is_not_rounded():
    harness = Harness(
        max_num_partial_prefills=3,
        max_num_batched_tokens=32,
        block_size=4,
        enable_prefix_caching=False,
    )
    for n in (1, 2, 3):
        harness.add([n] * 40, 2)
    assert batches(harness, 1) == [[10, 10, 10]]
    harness.drain()


def test_2_4_short_prompts_pass_long_ones_over_max_long_partial_prefills():
    harness = Harness(
        max_num_partial_prefills=2,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=16,
        max_num_batched_tokens=32,
        max_num_seqs=4,
    )
    long = [harness.add([n] * 60, 2) for n in (1, 2, 3)]
    short = harness.add([4] * 10, 2)
    harness.schedule()
    assert admissions(harness) == [long[0], short]
    harness.drain()
    assert [key for key in admissions(harness) if key in long] == long


def test_2_4_no_budget_is_reserved_for_long_prompts_over_their_limit():
    harness = Harness(
        max_num_partial_prefills=4,
        max_long_partial_prefills=1,
        long_prefill_token_threshold=32,
        max_num_batched_tokens=32,
        max_in_flight=4,
        enable_prefix_caching=False,
    )
    long = [harness.add([n] * 64, 1) for n in (1, 2, 3, 4)]
    assert batches(harness, 2) == [[32], [32]]
    short = harness.add([5] * 6, 1)
    # A share for the long prompt that may join, and one for the short one.
    assert batches(harness, 1) == [[16, 6]]
    assert admissions(harness) == [*long[:2], short]
    harness.abort(long[2])
    harness.drain()
    # Nothing is reserved for the prompt that has left the queue.
    harness.add([6] * 64, 1)
    assert batches(harness, 2) == [[32], [32]]
    harness.drain()


@pytest.mark.parametrize("lacking", ["slots", "tenant", "lora"])
def test_2_4_no_budget_is_reserved_for_prompts_that_cannot_be_admitted(lacking):
    harness = Harness(
        max_num_partial_prefills=2,
        max_num_batched_tokens=32,
        max_in_flight=1,
        max_num_seqs=1 if lacking == "slots" else 4,
        max_num_seqs_per_tenant=1 if lacking == "tenant" else 0,
        max_loras=1,
    )
    first = harness.add([1] * 100, 1, lora_name="x" if lacking == "lora" else "")
    harness.step()
    harness.add([2] * 100, 1, lora_name="y" if lacking == "lora" else "")
    sizes = []
    while not harness.received[first].is_over:
        harness.step()
        sizes.append(harness.batch.get(0, 0))
    # The request may count until the scheduler has tried to admit it once.
    assert sizes[1] == 32
    harness.drain()


def test_2_4_no_budget_is_reserved_for_a_prompt_without_blocks():
    harness = Harness(
        max_num_partial_prefills=2, max_num_batched_tokens=16, max_in_flight=1, num_blocks=28
    )
    harness.add([1] * 60, 1)
    harness.drain()
    growing = harness.add([2] * 96, 1)
    for _ in range(3):
        harness.step()
    # Its cached blocks take all free blocks.
    harness.add([1] * 80, 1)
    sizes = []
    while not harness.received[growing].is_over:
        harness.step()
        sizes.append(harness.batch.get(0, 0))
    # The request counts until the scheduler has tried to admit it once.
    assert sizes == [8, 16, 16, 8]
    harness.drain()


def test_2_4_a_deferred_long_prompt_can_be_aborted():
    harness = Harness(
        max_long_partial_prefills=1, long_prefill_token_threshold=8, max_num_batched_tokens=32
    )
    keys = [harness.add([n] * 60, 2) for n in (1, 2, 3)]
    harness.schedule()
    harness.abort(keys[1])
    harness.drain()
    assert admissions(harness) == [keys[0], keys[2]]


def test_2_4_max_long_partial_prefills_must_not_exceed_max_num_partial_prefills():
    with pytest.raises(ConfigError, match="max_long_partial_prefills=3 exceeds"):
        Harness(max_num_partial_prefills=2, max_long_partial_prefills=3)


@pytest.mark.parametrize("has_stream", [False, True])
def test_prompts_take_at_most_the_configured_time_while_a_stream_decodes(has_stream):
    harness = Harness(
        max_num_batched_tokens=512,
        max_model_len=2048,
        num_blocks=2048,
        max_in_flight=1,
        prefill_step_ms=60_000,
    )
    sizes = []

    def step() -> None:
        assert harness.schedule() is not None
        sizes.append(sum(count for count in harness.batch.values() if count > 1))
        # A step takes 2 s, and each token of a prompt another 1.5 s.
        harness.now += 1.0 + 1.5 * sizes[-1]
        harness.update()

    harness.add([1] * 40, 100 if has_stream else 1)
    step()
    long, late = harness.add([2] * 1000, 2), harness.add([3] * 100, 2)
    while not (harness.received[long].is_over and harness.received[late].is_over):
        step()
    assert max(sizes[1:]) == (38 if has_stream else 512)
    assert sum(sizes) == 1140
    harness.drain()


def test_prompts_get_some_tokens_beside_streams_however_slow_the_machine_is():
    harness = Harness(
        max_num_batched_tokens=256, max_in_flight=1, prefill_step_ms=1, max_model_len=512
    )
    harness.add([1] * 40, 100)
    harness.step()
    long = harness.add([2] * 200, 1)
    num_steps = 0
    while not harness.received[long].is_over:
        harness.schedule()
        harness.now += 1000.0
        harness.update()
        num_steps += 1
    assert num_steps <= 2 + 200 // 32
    harness.drain()
