"""Sampling by the native program, compared with the torch sampler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.protocol.arrays import int32_view
from engine.protocol.sampling_params import SAMPLERS, DryParams, SamplingParams
from engine.workers.cpu.decoder import NativeDecoder
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from support.workers.isas import ISAS, select_isa
from support.workers.native_decoders import forward_and_sample, native_decoder, small_spec
from support.workers.sampler_rows import Rows, tokens_of

VOCAB_SIZES = (97, 4096, 5003)
NUM_ROWS = 40

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 90, "temperature": 2.0},
    {"top_p": 0.7},
    {"top_p": 0.99, "temperature": 4.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"typical_p": 0.9},
    {"typical_p": 0.3, "temperature": 2.0, "top_p": 0.8},
    {"top_n_sigma": 1.5, "temperature": 1.4},
    {"xtc_probability": 0.6, "xtc_threshold": 0.05, "top_k": 40},
    {"xtc_probability": 1.0, "xtc_threshold": 0.01, "samplers": ("temperature", "xtc")},
    {"dynatemp_range": 0.7, "dynatemp_exponent": 1.3, "top_p": 0.9},
    {"top_k": 30, "top_p": 0.9, "temperature": 2.0, "samplers": ("top_p", "temperature", "top_k")},
    {"dry": DryParams(2.0, 1.5, 0), "temperature": 0.7},
]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, NativeDecoder]:
    """Load decoders by vocabulary size, on two threads."""
    return {
        size: native_decoder(
            small_spec(vocab_size=size), tmp_path_factory.mktemp(f"model{size}"), num_threads=2
        )
        for size in VOCAB_SIZES
    }


def random_logits(vocab_size: int, seed: int, num_rows: int = NUM_ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def both_choose(
    decoder: NativeDecoder, logits: torch.Tensor, params: list[SamplingParams]
) -> tuple[list[int], list[int]]:
    vocab_size = logits.shape[1]
    samplers = Rows(vocab_size), Rows(vocab_size, decoder=decoder)
    slots = list(range(len(params)))
    for rows in samplers:
        for slot, each in enumerate(params):
            rows.add(slot, each)
    torch_tokens, native_tokens = (rows.tokens(logits, slots) for rows in samplers)
    return native_tokens, torch_tokens


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("kwargs", PARAMS, ids=str)
def test_tokens_equal_those_of_the_torch_sampler(
    kwargs: dict[str, Any], vocab_size: int, decoders: dict[int, NativeDecoder]
) -> None:
    params = [SamplingParams(seed=seed, **kwargs) for seed in range(NUM_ROWS)]
    native, expected = both_choose(decoders[vocab_size], random_logits(vocab_size, 1), params)
    assert native == expected


@given(
    top_k=st.sampled_from([0, 1, 2, 7, 40, 1000, 4000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    typical_p=st.sampled_from([1.0, 0.7]),
    top_n_sigma=st.sampled_from([0.0, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.5]),
    dynatemp_range=st.sampled_from([0.0, 0.5]),
    samplers=st.lists(st.sampled_from(SAMPLERS), unique=True).map(tuple),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 2**63 - 1),
    levels=st.sampled_from([1, 3, 50]),
    masked=st.booleans(),
)
@examples(80)
def test_tokens_equal_those_of_the_torch_sampler_with_ties_and_masks(
    decoders: dict[int, NativeDecoder],
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    top_n_sigma: float,
    xtc_probability: float,
    dynatemp_range: float,
    samplers: tuple[str, ...],
    temperature: float,
    seed: int,
    levels: int,
    masked: bool,
) -> None:
    params = SamplingParams(
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        top_n_sigma=top_n_sigma,
        xtc_probability=xtc_probability,
        dynatemp_range=dynatemp_range,
        samplers=samplers,
        temperature=temperature,
        seed=seed,
    )
    logits = torch.round(random_logits(4096, seed % 2**32, 4) * levels / 3) / levels
    if masked:
        logits[:, torch.randperm(4096)[:4090]] = -torch.inf
        logits[0, :] = -torch.inf
        logits[0, 4095] = -1000.0
    native, expected = both_choose(decoders[4096], logits, [params] * 4)
    assert native == expected


def test_unsampled_rows_report_distinct_reasons(decoders: dict[int, NativeDecoder]) -> None:
    logits = random_logits(97, 2, 5)
    logits[0, 50] = torch.nan
    logits[1, 96] = torch.inf
    logits[2] = -torch.inf
    for kwargs in PARAMS:
        rows = Rows(97, decoder=decoders[97])
        for slot in range(5):
            rows.add(slot, SamplingParams(seed=slot, **kwargs))
        output = rows.sample(logits, [0, 1, 2, 3, 4])
        assert int32_view(output.nan_slots).tolist() == [0, 1]
        assert [slot for slot, _ in output.failed_slots] == [2]
        assert int32_view(output.sampled_token_ids)[:3].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "kwargs", [{"temperature": 0.0}, {"top_k": 8}, {"top_p": 0.9}, {"min_p": 0.2}], ids=str
)
def test_a_step_in_one_call_samples_the_same_tokens(
    kwargs: dict[str, Any], decoders: dict[int, NativeDecoder]
) -> None:
    decoder = decoders[5003]
    prompt = torch.randint(5003, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    params = [SamplingParams(seed=seed, **kwargs) for seed in range(70)]
    logits, output = forward_and_sample(decoder, prompt, range(70), params)
    chosen = tokens_of(output)
    samplers = Rows(5003), Rows(5003, decoder=decoder)
    for sampler in samplers:
        for row in range(70):
            sampler.add(row, params[row], prompt=tuple(prompt[:row]))
        assert sampler.tokens(logits, list(range(70))) == chosen
    # A batch with a row that is not greedy uses another code path than greedy batches.
    others = [*params[5:8], SamplingParams(seed=8)]
    _, output = forward_and_sample(decoder, prompt, range(5, 9), others)
    assert tokens_of(output)[:3] == chosen[5:8]


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_samples_the_same_tokens(
    isa: int, decoders: dict[int, NativeDecoder]
) -> None:
    select_isa(isa)
    for kwargs in PARAMS:
        params = [SamplingParams(seed=seed, **kwargs) for seed in range(9)]
        native, expected = both_choose(decoders[5003], random_logits(5003, 5, 9), params)
        assert native == expected
