"""Requests of block-diffusion models get the same blocks in any traffic, and their decisions replay."""

from __future__ import annotations

import random

import pytest
from engine.protocol.config import PreemptionMode, SchedulingPolicy
from engine.protocol.config.diffusion import BlockDiffusion, Renoising
from engine.protocol.messages import EventKind
from support.scheduler.diffusion_worker import AnswerWorker, DiffusionWorker
from support.scheduler.harness import Harness
from support.scheduler.recorded_harness import RecordedHarness, replay

UNIT = DiffusionWorker.unit
BLOCKS = BlockDiffusion(UNIT, 1)
CANVASES = BlockDiffusion(UNIT, renoising=Renoising())
ANSWERS = BlockDiffusion(UNIT, 1, answer_size=AnswerWorker.answer_size)
KINDS = pytest.mark.parametrize(
    "kind", [BLOCKS, CANVASES, ANSWERS], ids=["blocks", "canvases", "answers"]
)


def step_limits(kind: BlockDiffusion, max_model_len: int) -> dict[str, object]:
    """Return the settings of models whose passes compute whole requests."""
    if kind is not ANSWERS:
        return {}
    longest = max_model_len + kind.answer_size
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": longest}


def make_harness(kind: BlockDiffusion = BLOCKS, **settings: object) -> Harness:
    settings = step_limits(kind, 4096) | settings
    return Harness(diffusion=kind, block_size=8, async_scheduling=False, **settings)


@KINDS
@pytest.mark.parametrize("prompt", range(1, 10))
@pytest.mark.parametrize("max_tokens", [1, 3, 4, 9])
def test_a_request_gets_whole_blocks_up_to_its_limit(
    kind: BlockDiffusion, prompt: int, max_tokens: int
) -> None:
    harness = make_harness(kind)
    key = harness.add(prompt, max_tokens)
    received = harness.received[key]
    sizes = []
    while harness.has_work:
        before = len(received.token_ids)
        harness.step()
        sizes.append(len(received.token_ids) - before)
    harness.check_empty()
    sizes = [size for size in sizes if size]
    first = min(UNIT - prompt % UNIT if kind is BLOCKS else UNIT, max_tokens)
    rest = max_tokens - first
    assert sizes == [first, *[UNIT] * (rest // UNIT), *filter(None, [rest % UNIT])]
    assert received.num_events(EventKind.FIRST_TOKEN) == 1


def test_a_block_of_an_answer_is_cached_once_it_is_computed_with_the_next() -> None:
    harness = make_harness()
    key = harness.add(8, 20)
    harness.drain()
    output = harness.received[key].token_ids
    follow = harness.add([*range(1, 9), *output, 7], 4)
    harness.step()
    # The last blocks of the answer end at 28, and no pass computed those from 24 on again.
    assert harness.request(follow).num_cached_tokens == 24
    harness.drain()


@KINDS
@pytest.mark.parametrize("seed", range(30))
def test_random_traffic_gives_the_same_tokens_and_replays(kind: BlockDiffusion, seed: int) -> None:
    rng = random.Random(seed)
    max_model_len = rng.choice((24, 64, 128))
    settings = {
        "max_in_flight": rng.choice((1, 2)),
        "block_size": UNIT * rng.choice((1, 2, 4)),
        "num_blocks": rng.choice((9, 17, 60)),
        "num_host_blocks": rng.choice((0, 0, 20)),
        "preemption_mode": rng.choice(tuple(PreemptionMode)),
        "vocab_size": rng.choice((16, 512)),
        "enable_prefix_caching": rng.random() < 0.8,
        "max_num_seqs": rng.choice((1, 2, 5)),
        "max_num_batched_tokens": rng.choice((8, 12, 17, 64)),
        "long_prefill_token_threshold": rng.choice((0, 0, 9)),
        "max_num_partial_prefills": rng.choice((0, 0, 3)),
        "prefill_step_ms": rng.choice((0.0, 3_000.0)),
        "policy": rng.choice(tuple(SchedulingPolicy)),
        "priority_preemption": rng.random() < 0.5,
        "inject_preemption": rng.choice((0.0, 0.1)),
    } | step_limits(kind, max_model_len)
    harness = RecordedHarness(
        diffusion=kind, async_scheduling=False, max_model_len=max_model_len, **settings
    )
    for _ in range(rng.choice((20, 60))):
        action = rng.random()
        if action < 0.4:
            length = rng.choice((1, 2, 4, 8, 13, 31, 50))
            prompt = [position % 7 + 1 for position in range(length)]
            prompt[rng.randrange(length)] = rng.randrange(16)
            harness.add(
                prompt,
                rng.choice((1, 2, 5, 20, None)),
                client=rng.randrange(2),
                priority=rng.randrange(3),
                tenant=rng.choice("ab"),
                eos=rng.choice(((), (3,), (2, 5))),
                stop_token_ids=rng.choice(((), (7, 9))),
                min_tokens=rng.choice((0, 1)),
            )
        elif action < 0.47 and harness.received:
            harness.abort(rng.choice([*harness.received]))
        elif action < 0.5:
            harness.scheduler.reset_prefix_cache(rng.random() < 0.5, harness.now)
        else:
            harness.step()
    harness.drain()
    replay(harness.dump())


@pytest.mark.parametrize("kind", [BLOCKS, CANVASES], ids=["blocks", "canvases"])
@pytest.mark.parametrize("seed", range(15))
def test_the_next_core_continues_with_the_computed_blocks(kind: BlockDiffusion, seed: int) -> None:
    rng = random.Random(seed)
    harness = make_harness(kind, num_blocks=80)
    prompts = [[number] * length for number, length in enumerate((1, 7, 8, 23, 40))]
    for prompt in prompts:
        harness.add(prompt, 30)
    for _ in range(rng.randrange(1, 12)):
        harness.step()
    rows = harness.worker.rows.values()
    held = sum(min(row.num_computed_tokens, row.num_prompt_tokens) for row in rows)
    assert held
    harness.lose_core()
    before = harness.worker.num_prompt_tokens_computed
    harness.drain()
    recomputed = harness.worker.num_prompt_tokens_computed - before
    # The block of the last prompt token is computed again if only masks would follow it.
    assert recomputed <= sum(map(len, prompts)) - held + UNIT * len(prompts)
