"""The distributions that the samplers of a request leave, and the penalty for repetitions, by their definitions."""

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_bytes, int32_view
from engine.protocol.sampling_params import DryParams, SamplingParams
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from support.workers.sampler_rows import NewRows

pytestmark = pytest.mark.slow

V = 97


def typical_set(p: torch.Tensor, typical_p: float) -> torch.Tensor:
    """Return the tokens that locally typical sampling keeps by its definition: bool [V]."""
    surprise = -p.log()
    entropy = (p * surprise).nansum()
    distance = (surprise - entropy).abs()
    order = distance.argsort(stable=True)
    last = int((p[order].cumsum(0) < typical_p).sum())
    return distance <= distance[order[min(last, len(p) - 1)]] + 1e-6


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the filtered distribution in float64, by sorting and summing, as llama.cpp defines the samplers."""
    p = logits.double().softmax(0)
    for name in params.sampler_order:
        p = sampled(p, name, params)
    return p


def sampled(p: torch.Tensor, name: str, params: SamplingParams) -> torch.Tensor:
    """Return a distribution after one sampler."""
    p = p.clone()
    order = p.argsort(descending=True, stable=True)
    if name == "temperature":
        temperature = params.temperature
        if params.dynatemp_range:
            entropy = -(p * p.log()).nansum() / math.log(int((p > 0).sum()))
            low = max(0, temperature - params.dynatemp_range)
            high = temperature + params.dynatemp_range
            temperature = low + (high - low) * entropy**params.dynatemp_exponent
        p = (p.log() / temperature).softmax(0)
    if name == "typ_p" and params.typical_p < 1:
        p[~typical_set(p, params.typical_p)] = 0
    if name == "top_k" and params.top_k > 0:
        p[order[params.top_k :]] = 0
    if name == "min_p":
        p[p < params.min_p * p.max()] = 0
    if name == "top_p":
        p[order[p[order].cumsum(0) - p[order] >= params.top_p]] = 0
    if name == "top_n_sigma" and params.top_n_sigma:
        logits = p.log()
        sigma = logits[p > 0].std(unbiased=False)
        p[logits < logits.max() - params.top_n_sigma * sigma] = 0
    if name == "xtc" and params.xtc_probability:
        without = p.clone()
        without[order[: max(0, int((p >= params.xtc_threshold).sum()) - 1)]] = 0
        share = params.xtc_probability
        return (1 - share) * p / p.sum() + share * without / without.sum()
    return p / p.sum()


RANDOM_PARAMS = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 5},
    {"top_k": 60, "temperature": 2.0},
    {"top_p": 0.7},
    {"top_p": 0.98, "temperature": 4.0},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-9},
    {"typical_p": 0.2},
    {"typical_p": 0.7, "temperature": 2.0},
    {"typical_p": 0.95, "temperature": 0.5},
    {"typical_p": 1e-9, "temperature": 3.0},
    {"typical_p": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    {"top_n_sigma": 1.2, "temperature": 3.0},
    {"xtc_probability": 0.5, "xtc_threshold": 0.06, "min_p": 0.02},
    {"dynatemp_range": 0.8, "dynatemp_exponent": 0.7, "temperature": 1.2, "top_k": 12},
    {"temperature": 3.0, "top_p": 0.6, "samplers": ("top_p", "temperature")},
    {"temperature": 3.0, "top_p": 0.6, "min_p": 0.2, "samplers": ("temperature", "top_p")},
]


@pytest.mark.parametrize("kwargs", RANDOM_PARAMS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, V])
def test_tokens_follow_the_filtered_distribution(
    new_rows: NewRows, kwargs: dict[str, Any], vocab_size: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(1, vocab_size, generator=generator)
    expected = reference(logits[0], SamplingParams(**kwargs)).numpy()
    batch = new_rows(vocab_size)
    slots = list(range(80))
    for slot in slots:
        batch.add(slot, SamplingParams(seed=slot, **kwargs))
    counts = Counter[int]()
    for _ in range(100):
        counts.update(batch.tokens(logits.expand(80, -1), slots))
    n = 8000
    observed = np.array([counts[token] for token in range(vocab_size)])
    assert not observed[expected == 0].any()
    common = expected * n >= 5
    rest = n - observed[common].sum(), n * (1 - expected[common].sum())
    chi_square = ((observed[common] - expected[common] * n) ** 2 / (expected[common] * n)).sum()
    chi_square += (rest[0] - rest[1]) ** 2 / rest[1] if rest[1] > 1 else 0
    freedom = max(1, int(common.sum()))
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom) + 8


def dry_penalties(tokens: list[int], params: DryParams, breakers: list[list[int]]) -> list[float]:
    """Return the penalty of each token by its definition: the longest repetition that it would continue."""
    if params.last_n >= 0:
        tokens = tokens[len(tokens) - min(len(tokens), params.last_n) :]
    most = next(
        n
        for n in range(min(64, len(tokens)) + 1)
        if n == min(64, len(tokens))
        or any(tokens[: len(tokens) - n][-len(b) :] == b for b in breakers)
    )
    penalties = [0.0] * V
    for end in range(1, len(tokens)):
        length = 0
        while length < min(most, end) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= params.allowed_length:
            penalty = params.multiplier * params.base ** (length - params.allowed_length)
            penalties[tokens[end]] = max(penalties[tokens[end]], penalty)
    return penalties


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=90),
    params=st.builds(
        DryParams,
        multiplier=st.sampled_from([0.5, 3.0]),
        base=st.sampled_from([1.0, 1.2]),
        allowed_length=st.integers(0, 4),
        last_n=st.sampled_from([-1, 1, 7, 80]),
    ),
    breakers=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2),
    num_prompt=st.integers(1, 90),
)
@examples(60)
def test_repetitions_are_penalized_by_their_length(
    new_rows: NewRows,
    tokens: list[int],
    params: DryParams,
    breakers: list[list[int]],
    num_prompt: int,
) -> None:
    flat = [x for breaker in breakers for x in (len(breaker), *breaker)]
    params = msgspec.structs.replace(
        params, breaker_token_ids=int32_bytes(np.array(flat, np.int32))
    )
    batch = new_rows(V)
    batch.add(
        0,
        SamplingParams(dry=params, seed=1, logprobs=-1, processed_logprobs=True),
        tuple(tokens[:num_prompt]),
        tuple(tokens[num_prompt:]),
    )
    logits = torch.full((1, V), -20.0)
    logits[0, :4] = 0
    for _ in range(3):
        output = batch.sample(logits, [0])
        (row,) = output.logprobs
        ids = int32_view(row.token_ids)
        found = np.empty(V)
        found[ids] = np.frombuffer(row.logprobs, np.float32)
        penalties = torch.tensor(dry_penalties(tokens, params, breakers))
        expected = (logits[0].double() - penalties).log_softmax(0).numpy()
        assert np.exp(found) == pytest.approx(np.exp(expected), abs=1e-6)
        tokens = [*tokens, int(ids[0])]
