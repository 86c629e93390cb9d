"""The effect of sampling parameters on tokens."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.protocol.arrays import float32_view, int32_view
from engine.protocol.sampling_params import SamplingParams, TranscriptRules
from engine.workers.sampling import Grammar
from engine.workers.sampling.masks import pack_bitmask
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from support.workers.sampler_rows import NewRows

pytestmark = pytest.mark.slow

V = 97
INF = float("inf")


def logits_of(*seeds: int, vocab_size: int = V, scale: float = 2.0) -> torch.Tensor:
    return torch.stack(
        [
            torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
            for seed in seeds
        ]
    )


def greedy(**kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **kwargs)


def grammar_of(slots: list[int], bitmask: np.ndarray) -> Grammar:
    return Grammar(np.array(slots, np.int32), np.arange(len(slots)), bitmask)


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied", "masked"])
def test_typical_sampling_keeps_what_transformers_keeps(new_rows: NewRows, kind: str) -> None:
    from transformers.generation.logits_process import TypicalLogitsWarper

    logits = logits_of(*range(6))
    if kind == "peaked":
        logits[:, 0] += 9
    if kind == "flat":
        logits /= 50
    if kind == "tied":
        logits = logits.round()
    if kind == "masked":
        logits[:, ::3] = -INF
    for typical_p in (0.1, 0.5, 0.9, 0.999):
        batch = new_rows(V)
        for slot in range(6):
            batch.add(slot, SamplingParams(typical_p=typical_p, top_k=1, seed=1))
        warped = TypicalLogitsWarper(typical_p)(None, logits.double())
        assert batch.tokens(logits, list(range(6))) == warped.argmax(1).tolist()
        slots = list(range(80))
        random = new_rows(V)
        for slot in slots:
            random.add(slot, SamplingParams(typical_p=typical_p, seed=slot))
        same = logits[:1].expand(80, -1)
        drawn = {token for _ in range(20) for token in random.tokens(same, slots)}
        assert drawn <= {int(token) for token in warped[0].isfinite().nonzero()}


def test_typical_sampling_can_leave_out_the_most_likely_token(new_rows: NewRows) -> None:
    p = torch.full((V,), 0.6 / (V - 1))
    p[10] = 0.4
    batch = new_rows(V)
    for slot in range(50):
        batch.add(slot, SamplingParams(typical_p=0.5, seed=slot))
    assert 10 not in batch.tokens(p.log().expand(50, -1), list(range(50)))
    batch.add(50, SamplingParams(typical_p=0.5, temperature=0))
    assert batch.tokens(p.log()[None], [50]) == [10], "greedy requests ignore typical_p"


def test_top_p_of_zero_is_greedy(new_rows: NewRows) -> None:
    logits = logits_of(*range(20))
    batch = new_rows(V)
    for slot in range(20):
        batch.add(slot, SamplingParams(top_p=0.0, seed=slot, temperature=2.0))
    assert batch.tokens(logits, list(range(20))) == logits.argmax(1).tolist()


def test_greedy_takes_the_lowest_id_among_equal_logits(new_rows: NewRows) -> None:
    logits = torch.zeros(3, 200)
    logits[0, [70, 180]] = 5
    logits[1, [33, 32]] = 5
    batch = new_rows(200)
    batch.add(0, greedy())
    batch.add(1, SamplingParams(top_k=1, seed=9))
    batch.add(2, SamplingParams(temperature=1e-6))
    assert batch.tokens(logits, [0, 1, 2]) == [70, 32, 0]


@given(
    top_k=st.sampled_from([0, 1, 2, 7, 40, 5000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.3]),
    typical_p=st.sampled_from([1.0, 0.8, 0.05]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 2**63 - 1),
    company=st.integers(0, 2**32),
    ties=st.booleans(),
    vocab_size=st.sampled_from([97, 4096, 5003]),
)
@examples(60)
def test_a_row_alone_equals_the_row_in_any_batch(
    new_rows: NewRows,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    temperature: float,
    seed: int,
    company: int,
    ties: bool,
    vocab_size: int,
) -> None:
    params = SamplingParams(
        top_k=min(top_k, vocab_size), top_p=top_p, min_p=min_p, temperature=temperature, seed=seed,
        typical_p=typical_p, logprobs=3, repetition_penalty=1.2, frequency_penalty=0.3,
    )  # fmt: skip
    rng = np.random.default_rng(company)
    others = [
        SamplingParams(
            temperature=float(rng.choice([0, 0.5, 1, 2])),
            top_k=int(rng.choice([0, 3, 90])),
            top_p=float(rng.choice([0.4, 0.99, 1])),
            min_p=float(rng.choice([0, 0.1])),
            typical_p=float(rng.choice([0.5, 1])),
            presence_penalty=float(rng.choice([0, 1])),
            logprobs=int(rng.choice([0, 20])),
            seed=int(rng.integers(2**60)),
        )
        for _ in range(int(rng.integers(1, 20)))
    ]
    logits = logits_of(*range(len(others) + 1), vocab_size=vocab_size)
    if ties:
        logits = logits.round()
    mine = int(rng.integers(len(logits)))
    slots = rng.permutation(64)[: len(logits)].tolist()
    alone, batch = new_rows(vocab_size), new_rows(vocab_size)
    alone.add(11, params)
    for slot in slots:
        batch.add(slot, params if slot == slots[mine] else others.pop())
    for _ in range(4):
        one = alone.sample(logits[mine : mine + 1], [11])
        many = batch.sample(logits, slots)
        assert one.token_ids[0] == many.token_ids[mine]
        of_many = next(row for row in many.logprobs if row.slot == slots[mine])
        assert one.logprobs[0].token_ids == of_many.token_ids
        assert one.logprobs[0].logprobs == of_many.logprobs
        assert one.logprobs[0].ranks == of_many.ranks


@pytest.mark.slow
def test_rows_of_a_large_vocabulary_do_not_depend_on_batch_or_threads(
    new_rows: NewRows,
) -> None:
    vocab_size = 49155
    logits = logits_of(*range(9), vocab_size=vocab_size, scale=3.0)
    kinds = [
        {},
        {"top_p": 0.9},
        {"top_p": 0.9, "min_p": 0.01},
        {"typical_p": 0.9},
        {"top_k": 30, "typical_p": 0.4},
    ]
    params = [
        SamplingParams(temperature=0.5 + 0.1 * slot, seed=slot, logprobs=2, **kinds[slot % 5])
        for slot in range(9)
    ]
    batch = new_rows(vocab_size)
    for slot in range(9):
        batch.add(slot, params[slot])
    together = [batch.sample(logits, list(range(9))) for _ in range(3)]
    torch.set_num_threads(2)
    for slot in range(9):
        alone = new_rows(vocab_size)
        alone.add(0, params[slot])
        for step in range(3):
            output = alone.sample(logits[slot : slot + 1], [0])
            assert output.token_ids[0] == together[step].token_ids[slot]
            assert output.logprobs[0].logprobs == together[step].logprobs[slot].logprobs


def test_a_seeded_request_continues_after_preemption_in_another_slot(new_rows: NewRows) -> None:
    params = SamplingParams(
        seed=5, temperature=1.3, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=0.7, min_tokens=6, typical_p=0.9, bad_words_token_ids=((1, 2, 3), (7,), (9, 9)),
    )  # fmt: skip
    logits = logits_of(4, scale=1.0)
    undisturbed = new_rows(V)
    undisturbed.add(0, params)
    expected = [undisturbed.tokens(logits, [0])[0] for _ in range(40)]
    tokens: list[int] = []
    for slot in (3, 60, 3):
        batch = new_rows(V)
        batch.add(slot, SamplingParams(frequency_penalty=2.0), prompt=(8, 8))
        batch.tokens(logits, [slot])
        batch.sampler.remove_request(slot)
        batch.add(slot, params, output=tuple(tokens))
        tokens += [batch.tokens(logits, [slot])[0] for _ in range(13)]
    assert tokens == expected[:39]


def test_penalties_match_their_definition(new_rows: NewRows) -> None:
    prompt, output = (5, 6, 6, 7), [9, 9, 6]
    logits = logits_of(3, 4)
    params = greedy(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=0.9)
    batch = new_rows(V)
    batch.add(0, params, prompt)
    batch.add(1, greedy())
    history = Counter[int]()
    for forced in output:
        step_logits = torch.full((2, V), -50.0)
        step_logits[:, forced] = 50
        assert batch.tokens(step_logits, [0, 1]) == [forced, forced]
        history[forced] += 1
    x = logits[0].clone()
    for token in {*prompt, *output}:
        x[token] = x[token] / 1.7 if x[token] > 0 else x[token] * 1.7
    for token, count in history.items():
        x[token] -= 0.9 * count + 0.4
    # Walk down the ranking: forbid what was chosen and look at what comes next.
    for _ in range(V):
        expected = int(x.argmax())
        bias = dict.fromkeys(np.flatnonzero(np.isneginf(x.numpy())).tolist(), -100.0)
        batch.add(2, greedy(**{**_penalties(params), "logit_bias": bias}), prompt, tuple(output))
        assert batch.tokens(logits[:1], [2]) == [expected]
        x[expected] = -INF


def _penalties(params: SamplingParams) -> dict[str, float]:
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    return {name: getattr(params, name) for name in names}


def test_penalties_of_long_rows_match_their_definition(new_rows: NewRows) -> None:
    batch = new_rows(2000)
    batch.add(0, greedy(presence_penalty=2.0), prompt=(1,))
    batch.add(1, greedy(presence_penalty=2.0), prompt=tuple(range(1500)))
    flat = torch.zeros(2, 2000)
    chosen = [batch.tokens(flat, [0, 1]) for _ in range(700)]
    # A flat row with a presence penalty visits the vocabulary in order.
    assert [tokens[0] for tokens in chosen] == list(range(700))
    assert [tokens[1] for tokens in chosen] == list(range(700))


def test_min_tokens_delays_eos_and_stop_tokens(new_rows: NewRows) -> None:
    logits = torch.zeros(1, V)
    logits[0, 2], logits[0, 8], logits[0, 4] = 9, 8, 7
    batch = new_rows(V)
    batch.add(0, greedy(min_tokens=3, stop_token_ids=(8,)))
    assert [batch.tokens(logits, [0])[0] for _ in range(5)] == [4, 4, 4, 2, 2]
    batch.add(0, greedy(min_tokens=3, stop_token_ids=(8,)), output=(1, 1))
    assert [batch.tokens(logits, [0])[0] for _ in range(2)] == [4, 2]


def test_a_finished_grammar_ends_a_request_before_its_min_tokens(new_rows: NewRows) -> None:
    logits = torch.zeros(3, V)
    logits[:, 2], logits[:, 4] = 9, 7
    batch = new_rows(V)
    for slot in range(3):
        batch.add(slot, greedy(min_tokens=3, stop_token_ids=(8,)))
    finished, optional, other = [2], [2, 4], [4, 8]
    masks = np.stack([pack_bitmask(ids, V) for ids in (finished, optional, other)])
    output = batch.sample(logits, [0, 1, 2], grammar_of([0, 1, 2], masks))
    assert output.token_ids.tolist() == [2, 4, 4]
    # Without a grammar, the end token stays forbidden.
    assert batch.tokens(logits, [0, 1, 2]) == [4, 4, 4]


def test_bias_allowed_tokens_and_bad_words_are_applied(new_rows: NewRows) -> None:
    logits = torch.zeros(4, V)
    logits[:, 10], logits[:, 20] = 5, 4
    batch = new_rows(V)
    batch.add(0, greedy(logit_bias={10: -3.0, 30: 4.5}))
    batch.add(1, greedy(allowed_token_ids=(40, 20)))
    batch.add(2, greedy(bad_words_token_ids=((10,),)))
    batch.add(3, greedy(bad_words_token_ids=((10, 10, 10), (10, 10, 20), (20, 10))))
    assert [batch.tokens(logits, [0, 1, 2, 3]) for _ in range(5)] == [
        [30, 20, 20, 10],
        [30, 20, 20, 10],
        [30, 20, 20, 0],
        [30, 20, 20, 10],
        [30, 20, 20, 10],
    ]


def test_transcripts_follow_the_rules_of_transformers(new_rows: NewRows) -> None:
    """Every row samples the token that transformers' processors leave as the most likely one, beside a free row."""
    from transformers import GenerationConfig
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    first, end, count = 60, 50, 24
    rules = TranscriptRules((7, 8, 59), (9, end), first, end, 20)
    for limit in (20, None):
        rules = msgspec.structs.replace(rules, max_initial_timestamp=-1 if limit is None else limit)
        rows = new_rows(V)
        config = GenerationConfig(
            no_timestamps_token_id=first - 1, eos_token_id=end, max_initial_timestamp_index=limit
        )
        processors = LogitsProcessorList(
            [
                SuppressTokensLogitsProcessor(rules.suppressed_token_ids),
                SuppressTokensAtBeginLogitsProcessor(rules.begin_suppressed_token_ids, 3),
                WhisperTimeStampLogitsProcessor(config, 3),
            ]
        )
        texts: dict[int, list[int]] = {slot: [3, 4, 5] for slot in range(count)}
        params = SamplingParams(temperature=0, transcript_rules=rules)
        for slot in range(count):
            rows.add(slot, params)
        rows.add(count, SamplingParams(temperature=0))
        generator = torch.Generator().manual_seed(0)
        for step in range(12):
            logits = 3 * torch.randn(count + 1, V, generator=generator)
            logits[count, 7] = 50.0
            # Half of the rows prefer timestamps.
            logits[: count // 2, first:] += 1.0
            tokens = rows.tokens(logits, [*range(count + 1)])
            for slot, text in texts.items():
                ids = torch.tensor([text])
                expected = int(processors(ids, logits[slot : slot + 1].clone()).argmax())
                assert tokens[slot] == expected, (slot, step)
                text.append(expected)
            assert tokens[count] == 7
            if step == 5:
                # Resumed requests continue alike.
                for slot in range(0, count, 3):
                    rows.add(slot, params, output=tuple(texts[slot][3:]))


def test_a_grammar_restricts_only_its_slots(new_rows: NewRows) -> None:
    logits = logits_of(0, 0, 0)
    batch = new_rows(V)
    for slot in (5, 1, 9):
        batch.add(slot, greedy(logprobs=3, logit_bias={60: -0.5}))
    free = int(logits[0].argmax())
    bitmask = np.stack([pack_bitmask([50], V), pack_bitmask([96, 60], V)])
    shares = logits[0, [96, 60]].log_softmax(0).sort(descending=True).values.tolist()
    best = 96 if logits[0, 96] > logits[0, 60] - 0.5 else 60
    output = batch.sample(logits, [5, 1, 9], grammar_of([9, 1], bitmask))
    assert output.token_ids.tolist() == [free, best, 50]
    # Log-probabilities are those of the tokens that the grammar allows.
    assert float32_view(output.logprobs[1].logprobs)[1:].tolist() == pytest.approx(
        [*shares, -np.inf], abs=1e-6
    )
    assert float32_view(output.logprobs[2].logprobs).tolist() == [0, 0, -np.inf, -np.inf]
    # The grammar of a slot that has left the batch does not constrain any row.
    output = batch.sample(logits[:1], [5], grammar_of([9, 1], bitmask))
    assert output.token_ids.tolist() == [free]


@pytest.mark.parametrize("num_words", [3, 4, 5])
def test_tokens_beyond_a_narrow_bitmask_are_not_allowed(new_rows: NewRows, num_words: int) -> None:
    logits = torch.zeros(1, V)
    logits[0, V - 1] = 1
    batch = new_rows(V)
    batch.add(0, greedy())
    bitmask = np.full((1, num_words), -1, np.int32)
    output = batch.sample(logits, [0], grammar_of([0], bitmask))
    assert output.token_ids.tolist() == [0 if num_words == 3 else V - 1]


def test_a_row_without_allowed_tokens_fails_alone(new_rows: NewRows) -> None:
    logits = logits_of(0, 1, 2)
    batch = new_rows(V)
    batch.add(0, SamplingParams(seed=1))
    batch.add(1, SamplingParams(seed=2, allowed_token_ids=(3,), bad_words_token_ids=((3,),)))
    batch.add(2, SamplingParams(seed=3, top_p=0.9))
    output = batch.sample(logits, [0, 1, 2])
    [(slot, reason)] = output.failed_slots
    assert slot == 1
    assert "allowed_token_ids" in reason
    assert int32_view(output.nan_slots).tolist() == []
    others = new_rows(V)
    others.add(0, SamplingParams(seed=1))
    others.add(2, SamplingParams(seed=3, top_p=0.9))
    assert output.token_ids[[0, 2]].tolist() == others.tokens(logits[[0, 2]], [0, 2])


@pytest.mark.parametrize(
    "kwargs", [{}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.5}, {"temperature": 0.0}], ids=str
)
def test_rows_of_nans_are_reported_and_do_not_affect_others(
    new_rows: NewRows, kwargs: dict[str, Any]
) -> None:
    logits = logits_of(0, 1, 2, 3)
    batch, clean = new_rows(V), new_rows(V)
    for slot in range(4):
        batch.add(slot, SamplingParams(seed=slot, logprobs=2, **kwargs))
        clean.add(slot, SamplingParams(seed=slot, **kwargs))
    expected = clean.tokens(logits, [0, 1, 2, 3])
    logits[1] = float("nan")
    logits[2, 50] = float("nan")
    logits[3, 7] = INF
    output = batch.sample(logits, [0, 1, 2, 3])
    assert int32_view(output.nan_slots).tolist() == [1, 2, 3]
    assert output.failed_slots == []
    assert output.token_ids.tolist() == [expected[0], 0, 0, 0]
    for row in output.logprobs:
        assert not np.isnan(np.frombuffer(row.logprobs, np.float32)).any()


@pytest.mark.parametrize("value", [float("nan"), INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_do_not_hide_nan_logits(new_rows: NewRows, value: float, temperature: float) -> None:
    masks: list[dict[str, Any]] = [
        {"allowed_token_ids": (3, 4)},
        {"bad_words_token_ids": ((50,),)},
        {"min_tokens": 5, "stop_token_ids": (50,)},
        {"logit_bias": {50: -INF}},
        {"logit_bias": {4: 1.0}},
    ]
    batch = new_rows(V)
    for slot, mask in enumerate([*masks, {}]):
        batch.add(slot, SamplingParams(seed=slot, temperature=temperature, **mask))
    slots = list(range(len(masks) + 1))
    logits = logits_of(*slots)
    logits[:, 50] = value
    bitmask = np.zeros((1, 4), np.int32)
    bitmask[0, 0] = 1 << 5
    output = batch.sample(logits, slots, grammar_of([len(masks)], bitmask))
    assert int32_view(output.nan_slots).tolist() == slots


def test_top_k_of_ties_keeps_exactly_k(new_rows: NewRows) -> None:
    batch = new_rows(5000)
    batch.add(0, SamplingParams(top_k=3, seed=1))
    batch.add(1, SamplingParams(top_p=0.001, seed=1))
    chosen = [batch.tokens(torch.zeros(2, 5000), [0, 1]) for _ in range(200)]
    assert {tokens[0] for tokens in chosen} == {0, 1, 2}
    # 0.1 % of 5000 equal tokens.
    assert {tokens[1] for tokens in chosen} == {0, 1, 2, 3, 4}
