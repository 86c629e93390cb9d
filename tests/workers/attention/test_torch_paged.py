"""The paged backend, compared with plain attention in float64 over random batches."""

import math

import pytest
import torch
from engine.workers.attention import AttentionLayer, AttentionSpec, attention_backend
from engine.workers.attention.torch_paged import TorchPagedAttention
from hypothesis import given
from hypothesis import strategies as st
from support.suite.examples import examples
from support.workers.batches import Scheduled, attention_batch
from support.workers.paged_attention import SPAN_CASES, SPECIAL_LAYERS, run, special_case

torch.set_num_threads(1)


request_lists = st.lists(
    st.tuples(st.integers(0, 70), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=9
)


@examples(60)
@given(
    requests=request_lists,
    num_kv_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    head_dim=st.sampled_from([8, 16, 20]),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 80),
    softcap=st.none() | st.floats(1, 50),
    seed=st.integers(0, 2**16),
)
def test_paged_attention_agrees_with_plain_attention(
    requests, num_kv_heads, repeats, head_dim, block_size, window, softcap, seed
):
    out, expected = run(
        requests,
        num_kv_heads=num_kv_heads,
        repeats=repeats,
        head_dim=head_dim,
        block_size=block_size,
        layer=AttentionLayer(scale=head_dim**-0.5, window=window, softcap=softcap),
        dtype=torch.float32,
        seed=seed,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 24])
def test_tokens_of_a_span_see_each_other(window):
    out, expected = run(
        **SPAN_CASES,
        num_kv_heads=2,
        repeats=3,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.25, window=window),
        dtype=torch.float32,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SPECIAL_LAYERS)
def test_layers_with_special_parameters_agree_with_plain_attention(name):
    out, expected = run(
        [(70, 1), (0, 40), (20, 1), (650, 30), (600, 1), (599, 2), (0, 1)],
        num_kv_heads=2,
        repeats=3,
        head_dim=16,
        block_size=16,
        **special_case(name, 6),
        dtype=torch.float32,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "tolerance"),
    [
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.float16, torch.float16, 4e-3),
        (torch.float32, torch.bfloat16, 3e-2),
        (torch.bfloat16, torch.float32, 1e-2),
    ],
    ids=str,
)
def test_half_precision_agrees_with_plain_attention(dtype, cache_dtype, tolerance):
    out, expected = run(
        [(30, 1), (0, 50), (200, 1), (64, 20)],
        num_kv_heads=2,
        repeats=4,
        head_dim=64,
        block_size=16,
        layer=AttentionLayer(scale=0.125, window=40),
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 300])
def test_prompts_longer_than_a_tile_agree_with_plain_attention(window):
    out, expected = run(
        [(0, 700), (777, 333), (1000, 1)],
        num_kv_heads=1,
        repeats=2,
        head_dim=8,
        block_size=16,
        layer=AttentionLayer(scale=0.3, window=window),
        dtype=torch.float32,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


def test_one_long_context_among_short_ones_agrees_with_plain_attention():
    out, expected = run(
        [(5000, 1), *((20 + i, 1) for i in range(40))],
        num_kv_heads=1,
        repeats=2,
        head_dim=8,
        block_size=16,
        layer=AttentionLayer(scale=0.3),
        dtype=torch.float32,
    )
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=1e-5)


def attend_new(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output for the first tokens of a request, and the cache afterwards."""
    backend = attention_backend(
        AttentionSpec(
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            block_size=4,
            dtype=dtype,
            device=torch.device("cpu"),
        )
    )
    kv_cache = torch.zeros(backend.kv_cache_shape(2), dtype=dtype)
    batch = attention_batch([Scheduled(0, len(q), [1])], 4)
    out = backend.forward(
        q, k, v, kv_cache, backend.build(batch, {None}), AttentionLayer(scale=1.0)
    )
    return out, kv_cache


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", range(3))
def test_nonfinite_query_gives_nonfinite_output(poison, part):
    qkv = [torch.ones(4, heads, 8) for heads in (2, 1, 1)]
    qkv[part][2, 0, 3] = poison
    out, kv_cache = attend_new(*qkv, torch.float32)
    assert kv_cache.isfinite().all()
    assert out[:2].isfinite().all()
    # A non-finite query affects only its own head.
    assert out[2, : 1 if part == 0 else 2].isnan().all()


def test_keys_and_values_out_of_range_are_clamped():
    k = torch.full((4, 1, 8), 1e5)
    k[:, :, 4:] *= -1
    _, kv_cache = attend_new(torch.zeros(4, 2, 8), k, 2 * k, torch.float16)
    assert kv_cache[kv_cache != 0].abs().eq(65504).all()
    assert kv_cache.max() == 65504 and kv_cache.min() == -65504


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_nans_of_a_request_do_not_affect_the_next_owner_of_its_block(poison):
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=4,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    backend = attention_backend(spec)
    layer = AttentionLayer(scale=1.0)
    kv_cache = torch.zeros(backend.kv_cache_shape(2))
    for computed, scheduled, value in ((0, 4, poison), (0, 2, 1.0), (2, 1, 1.0)):
        q = torch.ones(scheduled, 2, 8)
        kv = torch.full((scheduled, 1, 8), value)
        batch = attention_batch([Scheduled(computed, scheduled, [1])], 4)
        metadata = backend.build(batch, {None})
        out = backend.forward(q, kv, kv, kv_cache, metadata, layer)
    torch.testing.assert_close(out, torch.ones(1, 2, 8))


def test_torch_computes_biases_by_distance_on_a_gpu_too() -> None:
    """The Triton kernels ignore them."""
    spec = AttentionSpec(
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        block_size=16,
        dtype=torch.float32,
        device=torch.device("cuda"),
        reads_distances=True,
        has_distance_biases=True,
    )
    assert isinstance(attention_backend(spec), TorchPagedAttention)
