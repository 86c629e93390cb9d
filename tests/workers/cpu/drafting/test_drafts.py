"""Drafts by prompt lookup change only the number of steps."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.config import SpeculativeConfig
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import DraftTokenIds, ModelRunnerOutput
from engine.workers.sampling.masks import pack_bitmask
from support.checkpoints.tiny import gemma3_gguf
from support.workers.native_decoders import BLOCK_SIZE
from support.workers.worker_steps import GREEDY, Steps

pytestmark = pytest.mark.slow

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a checkpoint with two kinds of layers, one with a window, and therefore several KV-cache groups."""
    return gemma3_gguf(tmp_path_factory.mktemp("gemma3"))


def make_steps(checkpoint) -> Steps:
    path, model = checkpoint
    speculative = SpeculativeConfig(6)
    # Room for a request that repeats itself while others generate `NUM_OUTPUT` tokens.
    return Steps(
        path, model.config.vocab_size, BLOCK_SIZE, max_model_len=320, speculative=speculative
    )


PARAMS = {
    "plain": [
        GREEDY,
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=2),
        SamplingParams(temperature=0.6, min_p=0.05, typical_p=0.8, seed=3),
    ],
    "with sampling features": [
        SamplingParams(
            temperature=0, repetition_penalty=1.3, logprobs=3, logprob_token_ids=(90, 4)
        ),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.2, seed=1),
        SamplingParams(
            temperature=0.9, seed=2, bad_words_token_ids=((5, 6), (7,)), logit_bias={9: 4.0}
        ),
        SamplingParams(
            temperature=0.6,
            seed=3,
            logprobs=0,
            min_tokens=20,
            stop_token_ids=tuple(range(60)),
            allowed_token_ids=tuple(range(80)),
        ),
    ],
}
PROMPTS = [list(range(20, 20 + length)) for length in (3, 15, 16, 29)]
NUM_OUTPUT = 40


class ClientReport(NamedTuple):
    """A token, and its log-probabilities if they were requested."""

    token: int
    logprobs: tuple[bytes, bytes, bytes] | None = None


def prefill(steps: Steps, params: list[SamplingParams]) -> list[list[ClientReport]]:
    """Compute the prompts, so that all requests have their first token."""
    new = [steps.new(slot, PROMPTS[slot], params[slot]) for slot in range(4)]
    chunks = [(slot, len(PROMPTS[slot])) for slot in range(4)]
    return rows_of(steps.run(slots=list(range(4)), new=new, chunks=chunks), list(range(4)))


def tokens_of(row: list[ClientReport]) -> list[int]:
    return [received.token for received in row]


@pytest.fixture(scope="module", params=PARAMS)
def params(request) -> list[SamplingParams]:
    return PARAMS[request.param]


def generate(checkpoint, params: list[SamplingParams]) -> list[list[ClientReport]]:
    """Return the output without drafts."""
    steps = make_steps(checkpoint)
    outputs = prefill(steps, params)
    while len(outputs[0]) < NUM_OUTPUT:
        for output, row in zip(outputs, rows_of(steps.run(), list(range(4))), strict=True):
            output += row
    return outputs


@pytest.fixture(scope="module")
def outputs(checkpoint, params) -> list[list[ClientReport]]:
    return generate(checkpoint, params)


@pytest.fixture(scope="module")
def plain(checkpoint) -> list[list[int]]:
    """Return only the tokens."""
    return [tokens_of(output) for output in generate(checkpoint, PARAMS["plain"])]


def verify(steps: Steps, slots: list[int], drafts: list[list[int]], **step) -> ModelRunnerOutput:
    """Run a step of the slots with these drafts."""
    drafted = [(row, len(tokens)) for row, tokens in enumerate(drafts) if tokens]
    return steps.run(
        slots=slots,
        chunks=[(row, count + 1) for row, count in drafted],
        drafts=int32_bytes(drafted),
        draft_token_ids=int32_bytes([*chain(*drafts)]),
        **step,
    )


def rows_of(result: ModelRunnerOutput, slots: list[int]) -> list[list[ClientReport]]:
    tokens = iter(int32_view(result.sampled_token_ids).tolist())
    counts = int32_view(result.num_sampled).tolist() or [1] * len(slots)
    logprobs = {row.slot: row for row in result.logprobs}
    rows = []
    for slot, count in zip(slots, counts, strict=True):
        each: list[Any] = [None] * count
        if (row := logprobs.get(slot)) is not None:
            assert row.num_positions == count
            each = [
                tuple(cut(part, count, k) for part in (row.token_ids, row.logprobs, row.ranks))
                for k in range(count)
            ]
        rows.append([ClientReport(next(tokens), each[k]) for k in range(count)])
    assert next(tokens, None) is None
    return rows


def cut(part: bytes, count: int, k: int) -> bytes:
    size = len(part) // count
    return part[k * size : (k + 1) * size]


@pytest.mark.parametrize("seed", range(6))
def test_right_and_wrong_drafts_do_not_change_tokens(checkpoint, params, outputs, seed):
    rng = random.Random(seed)
    steps = make_steps(checkpoint)
    received = prefill(steps, params)
    num_steps = 0
    while min(map(len, received)) < NUM_OUTPUT - 6:
        num_steps += 1
        slots = [slot for slot in range(4) if len(received[slot]) < NUM_OUTPUT - 6]
        rng.shuffle(slots)
        drafts = []
        for slot in slots:
            count = rng.choice((0, 1, 3, 6))
            tokens = tokens_of(outputs[slot][len(received[slot]) :][:count])
            if count and rng.random() < 0.5:
                wrong = rng.randrange(count)
                tokens[wrong] = (tokens[wrong] + 1) % 90
            drafts.append(tokens)
        result = verify(steps, slots, drafts)
        for slot, tokens, row in zip(slots, drafts, rows_of(result, slots), strict=True):
            start = len(received[slot])
            right = tokens_of(outputs[slot][start : start + len(tokens)])
            num_right = next(
                (k for k, pair in enumerate(zip(tokens, right, strict=True)) if pair[0] != pair[1]),
                len(tokens),
            )
            assert row == outputs[slot][start : start + num_right + 1]
            received[slot] += row
        if any(drafts):
            assert int32_view(result.num_verified).tolist() == list(map(len, drafts))
    assert num_steps < 25


def test_drafts_found_by_the_worker_are_verified_within_limits(checkpoint, params, outputs):
    """The core requests more drafts than exist, because only the worker finds the end of a match."""
    steps = make_steps(checkpoint)
    received = prefill(steps, params)
    num_verified = num_right = 0
    while min(map(len, received)) < NUM_OUTPUT:
        counts = int32_bytes([(row, 6) for row in range(4)])
        result = steps.run(chunks=[(row, 7) for row in range(4)], drafts=counts)
        verified = int32_view(result.num_verified)
        for output, row in zip(received, rows_of(result, list(range(4))), strict=True):
            output += row
            num_right += len(row) - 1
        num_verified += int(verified.sum())
        assert (verified <= 6).all()
    for output, wanted in zip(received, outputs, strict=True):
        assert output[:NUM_OUTPUT] == wanted
    assert 0 < num_right <= num_verified


def test_drafts_are_neither_used_nor_proposed_in_a_step_with_a_prompt(checkpoint, plain):
    steps = make_steps(checkpoint)
    prefill(steps, PARAMS["plain"])
    slots = [0, 1, 2, 3]
    drafted = [(row, 3) for row in range(3)]
    result = steps.run(
        slots=slots,
        removed=[3],
        new=[steps.new(3, PROMPTS[3])],
        chunks=[*((row, 4) for row in range(3)), (3, 8)],
        drafts=int32_bytes(drafted),
        draft_token_ids=int32_bytes([*chain(*(output[1:4] for output in plain[:3]))]),
    )
    rows = [tokens_of(row) for row in rows_of(result, [0, 1, 2])]
    assert rows == [[output[1]] for output in plain[:3]]
    assert int32_view(result.num_verified).tolist() == [0] * 3
    assert result.drafts is None
    # Unused drafts are dropped, so the worker has no other drafts to verify.
    rest = [(3, len(PROMPTS[3]) - 8)]
    rows = [tokens_of(row) for row in rows_of(steps.run(chunks=rest), slots)]
    assert rows[:3] == [[output[2]] for output in plain[:3]]
    result = verify(steps, slots[:3], [output[3:6] for output in plain[:3]], removed=[3])
    rows = [tokens_of(row) for row in rows_of(result, slots[:3])]
    assert rows == [output[3:7] for output in plain[:3]]


def test_grammar_limits_tokens_after_each_draft(checkpoint, params, outputs):
    steps = make_steps(checkpoint)
    prefill(steps, params)
    slots = [0, 1, 2, 3]
    vocab_size = checkpoint[1].config.vocab_size
    steps.run(slots=slots, removed=[3], new=[steps.new(3, [7, 9] * 9)], chunks=[(3, 18)])
    said = [2] * 3
    number, num_proposed = 0, 0
    while min(said) < NUM_OUTPUT - 6:
        # The grammar requires 1, 2, 3 … in order; the last draft is wrong.
        wanted = [number % 90 + k for k in range(4)]
        drafts = [tokens_of(outputs[slot][num : num + 3]) for slot, num in enumerate(said)]
        masks = np.stack([pack_bitmask([token], vocab_size) for token in wanted])
        result = verify(steps, slots, [*drafts, [*wanted[:2], 95]], grammar=([3], masks))
        rows = rows_of(result, slots)
        assert tokens_of(rows.pop()) == wanted[:3]
        number += 3
        for slot, row in enumerate(rows):
            start = said[slot]
            said[slot] += len(row)
            assert row == outputs[slot][start : start + 4]
        num_proposed += result.drafts is not None
    assert num_proposed


def test_grammar_limits_drafts_found_by_the_worker(checkpoint):
    steps = make_steps(checkpoint)
    vocab_size = checkpoint[1].config.vocab_size
    start, wanted = [7, 9, 11] * 4, iter([7, 9, 11] * 8)
    allowed = [pack_bitmask([token], vocab_size) for token in wanted]
    grammar = ([0], allowed[:1])
    new = [steps.new(0, start)]
    result = steps.run(slots=[0], chunks=[(0, len(start))], new=new, grammar=grammar)
    tokens = int32_view(result.sampled_token_ids).tolist()
    assert result.drafts is not None
    num_steps = 0
    while len(tokens) < 12:
        num_steps += 1
        here = allowed[len(tokens) : len(tokens) + 7]
        result = steps.run(chunks=[(0, 7)], drafts=int32_bytes([(0, 6)]), grammar=([0], here))
        tokens += tokens_of(rows_of(result, [0])[0])
    assert tokens == ([7, 9, 11] * 8)[: len(tokens)]
    assert num_steps < 4


def test_tokens_forced_by_a_grammar_are_drafted(checkpoint):
    vocab_size = checkpoint[1].config.vocab_size
    steps = make_steps(checkpoint)
    steps.run(slots=[0], chunks=[(0, 3)], new=[steps.new(0, [20, 21, 22])])

    def run(allowed: list[int], forced: list[int], num_drafts: int = 0) -> ModelRunnerOutput:
        masks = np.stack([pack_bitmask([token], vocab_size) for token in allowed])
        tokens = None
        if forced:
            tokens = DraftTokenIds(0, *map(int32_bytes, ([0], [len(forced)], forced)))
        chunks = {"chunks": [(0, num_drafts + 1)]} if num_drafts else {}
        drafts = int32_bytes([(0, num_drafts)] if num_drafts else [])
        return steps.run(grammar=([0], masks, tokens), drafts=drafts, **chunks)

    def drafted(result: ModelRunnerOutput) -> list[int]:
        return [] if result.drafts is None else int32_view(result.drafts.token_ids).tolist()

    # Nine are forced; a step has six drafts at most.
    assert drafted(run([31], list(range(31, 40)))) == [32, 33, 34, 35, 36, 37]
    result = run([32, 33, 34, 35, 36, 37, 38], [], 6)
    assert tokens_of(rows_of(result, [0])[0]) == list(range(32, 39))
    assert drafted(result) == [39]
    # The sampled token differs from the expected one, which ends the forced tokens.
    assert drafted(run([50, 51], [], 1)) == []
    assert drafted(run([60], [60, 61])) == [61]
    # The next request in the slot does not use them.
    steps.run(slots=[0], removed=[0], chunks=[(0, 2)], new=[steps.new(0, [70, 71])])
    assert drafted(run([61], [])) == []


def test_nan_is_reported_for_its_own_request(checkpoint, plain):
    steps = make_steps(checkpoint)
    prefill(steps, PARAMS["plain"])
    blocks_per_slot = steps.blocks_per_row * steps.num_groups
    for layer in steps.runner.kv_cache.layers:
        layer[1 + blocks_per_slot : 1 + 2 * blocks_per_slot] = torch.nan
    # Token 0 replaces a token that could not be sampled, so right drafts are 0.
    drafts = [plain[0][1:3], [0, 0], plain[2][1:2], []]
    result = verify(steps, [0, 1, 2, 3], drafts)
    rows = [tokens_of(row) for row in rows_of(result, list(range(4)))]
    assert rows == [plain[0][1:4], [0, 0, 0], plain[2][1:3], plain[3][1:2]]
    assert set(int32_view(result.nan_slots).tolist()) == {1}


def test_new_request_in_a_slot_has_no_drafts_of_the_previous_one(checkpoint, plain):
    steps = make_steps(checkpoint)
    steps.run(slots=[0], chunks=[(0, 12)], new=[steps.new(0, [5, 6, 7, 8] * 3)])
    first = steps.new(0, PROMPTS[0])
    steps.run(slots=[0], removed=[0], chunks=[(0, 3)], new=[first])
    result = steps.run(chunks=[(0, 7)], drafts=int32_bytes([(0, 6)]))
    assert int32_view(result.num_verified).tolist() == [0]
    assert [tokens_of(row) for row in rows_of(result, [0])] == [[plain[0][1]]]


def test_drafts_end_before_max_model_len(checkpoint):
    """The last token that fits is sampled after the last draft."""
    path, model = checkpoint
    steps = Steps(
        path,
        model.config.vocab_size,
        BLOCK_SIZE,
        max_model_len=32,
        speculative=SpeculativeConfig(6),
    )
    prompt = ([5, 6, 7, 8, 9] * 7)[:29]
    result = steps.run(slots=[0], chunks=[(0, 29)], new=[steps.new(0, prompt)])
    # The first token may or may not continue like the prompt. 30 of 32 tokens exist now.
    if result.drafts is not None:
        assert int32_view(result.drafts.num_tokens).tolist() == [1]
    result = steps.run(chunks=[(0, 7)], drafts=int32_bytes([(0, 6)]))
    assert len(int32_view(result.sampled_token_ids)) in (1, 2)


def predict(steps: Steps, prediction: list[int], num_rows: int = 1) -> list[ModelRunnerOutput]:
    """Run the first request with a prediction, together with others, and return the output of each step."""
    slots = list(range(num_rows))
    new = [steps.new(slot, PROMPTS[slot], PARAMS["plain"][slot]) for slot in slots]
    new[0].predicted_token_ids = int32_bytes(prediction)
    chunks = [(slot, len(PROMPTS[slot])) for slot in slots]
    results = [steps.run(slots=slots, new=new, chunks=chunks)]
    num_tokens = 1
    while num_tokens < NUM_OUTPUT:
        counts = int32_bytes([(row, 6) for row in slots])
        results.append(steps.run(chunks=[(row, 7) for row in slots], drafts=counts))
        num_tokens += int32_view(results[-1].num_sampled).tolist()[0]
    return results


def first_tokens(results: list[ModelRunnerOutput]) -> list[int]:
    """Return the tokens of the first row."""
    tokens: list[int] = []
    for result in results:
        counts = int32_view(result.num_sampled).tolist() or [1]
        tokens += int32_view(result.sampled_token_ids).tolist()[: counts[0]]
    return tokens[:NUM_OUTPUT]


def counts_of(results: list[ModelRunnerOutput]) -> tuple[int, int]:
    """Return how many tokens of predictions were accepted and rejected."""
    rows = [int32_view(result.prediction_counts).reshape(-1, 3) for result in results]
    whole = np.concatenate(rows)
    assert (whole[:, 0] == 0).all()
    return int(whole[:, 1].sum()), int(whole[:, 2].sum())


def test_predicted_output_takes_fewer_steps(checkpoint, plain):
    results = predict(make_steps(checkpoint), plain[0])
    assert first_tokens(results) == plain[0][:NUM_OUTPUT]
    # A step has six drafts at most, and samples one more token.
    assert len(results) <= 2 + NUM_OUTPUT // 7
    num_accepted, num_rejected = counts_of(results)
    assert num_accepted >= NUM_OUTPUT - len(results)
    assert num_rejected == 0


def test_wrong_predictions_do_not_change_tokens(checkpoint, plain):
    wrong = [(token + 1) % 90 for token in plain[0]]
    half = plain[0][:12] + wrong[12:15] + plain[0][15:]
    for prediction in (wrong, plain[1], plain[0][5:], half, [plain[0][0]]):
        assert first_tokens(predict(make_steps(checkpoint), prediction)) == plain[0][:NUM_OUTPUT]
    results = predict(make_steps(checkpoint), half)
    num_accepted, num_rejected = counts_of(results)
    assert num_accepted > 12
    assert 0 < num_rejected <= 12


def test_prediction_is_used_only_for_its_own_request(checkpoint, plain):
    steps = make_steps(checkpoint)
    assert first_tokens(predict(steps, plain[0], num_rows=3)) == plain[0][:NUM_OUTPUT]
    steps.run(
        slots=[0], removed=[0, 1, 2], new=[steps.new(0, PROMPTS[0])], chunks=[(0, len(PROMPTS[0]))]
    )
    for _ in range(4):
        result = steps.run(chunks=[(0, 7)], drafts=int32_bytes([(0, 6)]))
        assert not result.prediction_counts


def test_resubmitted_request_continues_with_its_prediction(checkpoint, plain):
    """Its output so far is part of the prompt, because another core received it."""
    steps = make_steps(checkpoint)
    prompt, done = PROMPTS[0], plain[0][:9]
    new = steps.new(0, prompt + done, PARAMS["plain"][0], prompt=len(prompt))
    new.predicted_token_ids = int32_bytes(plain[0])
    result = steps.run(slots=[0], new=[new], chunks=[(0, len(prompt) + len(done))])
    assert int32_view(result.sampled_token_ids).tolist() == [plain[0][9]]
    result = steps.run(chunks=[(0, 7)], drafts=int32_bytes([(0, 6)]))
    assert tokens_of(rows_of(result, [0])[0]) == plain[0][10:17]
