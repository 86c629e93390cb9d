"""Sampling by the kernels, compared with the torch sampler."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from engine.protocol.arrays import int32_view
from engine.protocol.sampling_params import SamplingParams
from engine.workers import sampling as torch_sampling
from engine.workers.cuda import sampling
from engine.workers.cuda.sampling import append_tokens, choose_greedy, choose_tokens
from engine.workers.layers.layers import LayerKernels
from engine.workers.sampling.random import Stream, uniforms
from hypothesis import given
from hypothesis import strategies as st
from support.gpu.triton_interpreter import interpret_without_gpu
from support.suite.examples import examples
from support.workers.sampler_rows import Rows

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()
VOCAB_SIZES = (33, 1000)
NUM_ROWS = 4

PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 40, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 90, "temperature": 2.0},
    {"top_k": 700, "temperature": 2.0},
    {"top_k": 500, "top_p": 0.98, "temperature": 5.0, "min_p": 0.001},
    {"top_p": 0.7},
    {"top_p": 0.99, "temperature": 4.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02, "temperature": 1.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"typical_p": 0.7, "top_k": 40},
    {"top_p": 0.0},
]


def random_logits(vocab_size: int, seed: int = 1, num_rows: int = NUM_ROWS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def both_choose(logits: torch.Tensor, params: list[SamplingParams]) -> tuple[list[int], list[int]]:
    samplers = (
        Rows(logits.shape[1], choose=choose_tokens, device=DEVICE),
        Rows(logits.shape[1]),
    )
    slots = list(range(len(params)))
    for rows in samplers:
        for slot, each in enumerate(params):
            rows.add(slot, each)
    found, expected = (rows.tokens(logits, slots) for rows in samplers)
    return found, expected


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("kwargs", PARAMS, ids=str)
def test_tokens_equal_those_of_the_torch_sampler(kwargs: dict[str, Any], vocab_size: int) -> None:
    params = [SamplingParams(seed=seed, **kwargs) for seed in range(NUM_ROWS)]
    found, expected = both_choose(random_logits(vocab_size), params)
    assert found == expected


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"top_k": 200, "top_p": 0.9},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 8000, "top_p": 0.9, "temperature": 50.0},
    ],
    ids=str,
)
def test_a_vocabulary_of_several_tiles_gives_the_same_tokens(kwargs: dict[str, Any]) -> None:
    params = [SamplingParams(seed=seed, **kwargs) for seed in range(3)]
    logits = random_logits(9000, num_rows=3)
    logits[1] = logits[1].bfloat16().float()
    # All tokens are in one bucket, and do not fit into the list.
    logits[2] = 1.5
    found, expected = both_choose(logits, params)
    assert found == expected


@given(
    top_k=st.sampled_from([0, 1, 2, 40, 256, 257, 900]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.3, 1.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 9.0]),
    levels=st.sampled_from([1, 3, 50]),
    seed=st.integers(0, 2**62),
)
@examples(25)
def test_ties_go_to_the_lower_id(
    top_k: int, top_p: float, min_p: float, temperature: float, levels: int, seed: int
) -> None:
    params = SamplingParams(
        top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature, seed=seed
    )
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (2, 600), generator=generator).float() / levels
    found, expected = both_choose(logits, [params, params])
    assert found == expected


def test_rows_with_different_parameters_give_the_same_tokens() -> None:
    params = [SamplingParams(seed=seed, **kwargs) for seed, kwargs in enumerate(PARAMS)]
    found, expected = both_choose(random_logits(1000, num_rows=len(params)), params)
    assert found == expected


@pytest.mark.parametrize("kwargs", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.5}])
def test_rows_without_allowed_tokens_are_reported(kwargs: dict[str, Any]) -> None:
    logits = random_logits(100, num_rows=5)
    logits[0, 7] = float("nan")
    logits[1, 99] = float("inf")
    logits[2] = float("-inf")
    logits[3] = float("-inf")
    logits[3, 8] = -0.0
    rows = Rows(100, choose=choose_tokens, device=DEVICE)
    for slot in range(5):
        rows.add(slot, SamplingParams(seed=slot, **kwargs))
    output = rows.sample(logits, list(range(5)))
    tokens = int32_view(output.sampled_token_ids).tolist()
    assert tokens[:4] == [0, 0, 0, 8]
    assert int32_view(output.nan_slots).tolist() == [0, 1]
    assert [slot for slot, _ in output.failed_slots] == [2]


def test_masks_do_not_hide_nan_logits() -> None:
    logits = random_logits(100, num_rows=3)
    logits[0, 7] = float("nan")
    logits[1, 7] = float("inf")
    rows = Rows(100, choose=choose_tokens, device=DEVICE)
    for slot in range(3):
        rows.add(slot, SamplingParams(seed=slot, allowed_token_ids=(3, 4)))
    output = rows.sample(logits, [0, 1, 2])
    assert int32_view(output.nan_slots).tolist() == [0, 1]
    assert output.token_ids[2] in (3, 4)


@triton.jit
def _uniform_kernel(seeds_ptr, positions_ptr, out_ptr, uniform: tl.constexpr):
    row = tl.program_id(0)
    noise = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    tl.store(out_ptr + row, noise)


def test_the_noise_is_bit_identical_to_that_of_the_cpu() -> None:
    generator = np.random.default_rng(0)
    seeds = generator.integers(-(2**63), 2**63, 50)
    positions = generator.integers(0, 2**40, 50)
    found = torch.empty(50, dtype=torch.float64, device=DEVICE)
    _uniform_kernel[(50,)](
        torch.from_numpy(seeds).to(DEVICE),
        torch.from_numpy(positions).to(DEVICE),
        found,
        sampling.token_noise,
    )
    assert np.array_equal(found.cpu().numpy(), uniforms(seeds, positions, Stream.TOKEN))


@pytest.mark.parametrize("vocab_size", [*VOCAB_SIZES, 9000])
def test_greedy_rows_take_the_most_likely_token(vocab_size: int) -> None:
    logits = random_logits(vocab_size, num_rows=7)
    logits[1] = logits[1].round()
    logits[2, 7] = float("nan")
    logits[3, vocab_size - 1] = float("inf")
    logits[4] = float("-inf")
    logits[5, vocab_size - 1] = 1e9
    found = choose_greedy(logits.to(DEVICE)).tolist()
    assert found == torch_sampling.choose_greedy(logits).tolist()
    assert found[2:6] == [-1, -1, -2, vocab_size - 1]


@pytest.mark.parametrize("num_rows", [0, 1, 130])
def test_each_token_is_stored_after_the_last_one_of_its_request(num_rows: int) -> None:
    index = torch.randperm(400)[:num_rows].int()
    tokens = torch.randint(-2, 9, (num_rows,))
    found, expected = torch.full((2, 10, 50), 7, dtype=torch.int32)
    LayerKernels().append_tokens(expected, index, tokens)
    on_device = found.to(DEVICE)
    append_tokens(on_device, index.to(DEVICE), tokens.to(DEVICE))
    assert torch.equal(on_device.cpu(), expected)
