"""The Triton backend, compared with plain attention in float64: on a GPU, or interpreted without one.

The interpreter multiplies no bfloat16 matrices, so these tests are in float16, which has the same tiles, and float32.
"""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine.protocol.errors import ConfigError
from engine.workers.attention import AttentionLayer, AttentionSpec, DeviceBatch, attention_backend
from engine.workers.attention.kernels.tiles import max_splits
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.layers import HeadNorm
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.layers.rope import RopeSpec, RotaryEmbedding
from engine.workers.models.decoder import Decoder
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints.random import random_checkpoint
from support.gpu import triton_launches
from support.gpu.triton_compile import compile_for_hopper
from support.gpu.triton_interpreter import interpret_without_gpu
from support.suite.examples import examples
from support.workers.batches import Scheduled, attention_batch
from support.workers.decoders import Runner
from support.workers.native_decoders import ROPE, latent_spec, small_spec
from support.workers.paged_attention import (
    SPAN_CASES,
    SPECIAL_LAYERS,
    OneSequence,
    PagedCase,
    attend_to_sources,
    run,
    special_case,
)

DEVICE = interpret_without_gpu()
# Rows of a tile without queries are 0 / 0, for which numpy warns.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

TRITON = {"backend_name": "triton_paged", "device": DEVICE}

TOLERANCE = {torch.float32: 3e-5, torch.float16: 4e-3}


def assert_agrees(requests, *, dtype=torch.float16, **case):
    out, expected = run(requests, dtype=dtype, **TRITON, **case)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=1e-5)


@examples(15, derandomize=True)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 150), st.one_of(st.just(1), st.integers(1, 40))),
        min_size=1,
        max_size=3,
    ),
    num_kv_heads=st.integers(1, 2),
    repeats=st.sampled_from([1, 3, 4, 7]),
    block_size=st.sampled_from([16, 32, 64, 128]),
    window=st.none() | st.integers(1, 120),
    softcap=st.none() | st.floats(1, 50),
    dtype=st.sampled_from([torch.float16, torch.float32]),
)
def test_paged_attention_agrees_with_plain_attention(
    requests, num_kv_heads, repeats, block_size, window, softcap, dtype
):
    assert_agrees(
        requests,
        num_kv_heads=num_kv_heads,
        repeats=repeats,
        head_dim=16,
        block_size=block_size,
        layer=AttentionLayer(scale=0.25, window=window, softcap=softcap),
        dtype=dtype,
    )


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_any_head_dim_agrees_with_plain_attention(head_dim):
    assert_agrees(
        [(70, 1), (30, 40)],
        num_kv_heads=1,
        repeats=2,
        head_dim=head_dim,
        block_size=16,
        layer=AttentionLayer(scale=head_dim**-0.5),
    )


def test_prompts_longer_than_a_tile_agree_with_plain_attention():
    assert_agrees(
        [(0, 200), (90, 150)],
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.25),
    )


@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_are_split(window):
    assert_agrees(
        [(2600, 1), (511, 1), (512, 1), (10, 1)],
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.25, window=window),
    )


@pytest.mark.parametrize("window", [None, 24])
def test_tokens_of_a_span_see_each_other(window):
    assert_agrees(
        **SPAN_CASES,
        num_kv_heads=1,
        repeats=3,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.25, window=window),
    )


@pytest.mark.parametrize("name", SPECIAL_LAYERS)
def test_layers_with_special_parameters_agree_with_plain_attention(name):
    assert_agrees(
        [(70, 1), (0, 40), (20, 1), (650, 30), (1100, 1), (599, 2), (0, 1)],
        num_kv_heads=1,
        repeats=3,
        head_dim=16,
        block_size=16,
        **special_case(name, 3, DEVICE),
    )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("torch_paged", torch.float32),
        ("torch_paged", torch.float16),
        ("triton_paged", torch.float16),
        ("triton_batch_invariant", torch.float32),
    ],
    ids=str,
)
def test_cross_attention_agrees_with_plain_attention(name, dtype):
    device = DEVICE if name != "torch_paged" else torch.device("cpu")
    out, expected = attend_to_sources(name, dtype=dtype, device=device)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=1e-5)


@pytest.mark.parametrize(
    ("heads", "rank", "rotated", "dtype"),
    [(16, 64, 16, torch.float32), (5, 24, 8, torch.float16), (80, 32, 16, torch.float16)],
    ids=str,
)
def test_latent_attention_agrees_with_plain_attention(heads, rank, rotated, dtype):
    """Values are the first elements of keys. The heads are computed by one program or by several."""
    assert_agrees(
        [(70, 1), (30, 9), (600 if heads < 80 else 100, 1), (0, 1)],
        num_kv_heads=1,
        repeats=heads,
        head_dim=rank + rotated,
        latent_rank=rank,
        block_size=16,
        layer=AttentionLayer(scale=0.15),
        dtype=dtype,
    )


def test_a_token_with_latent_attention_has_the_same_bits_alone_and_in_any_batch():
    case = PagedCase(
        [(400, 1), (50, 10), (20, 1), (0, 20)],
        num_kv_heads=1,
        repeats=16,
        head_dim=80,
        latent_rank=64,
        block_size=16,
        layer=AttentionLayer(scale=0.15),
        dtype=torch.float16,
        **TRITON,
    )
    together = case.forward()
    for rows in ([0], [1], [2, 3], [3, 1]):
        assert torch.equal(case.forward(rows), together[case.tokens(rows)])


def test_few_heads_split_a_long_sequence_into_more_parts():
    for num_kv_heads in (1, 2, 3, 4, 5, 8, 16, 32):
        most = max_splits(num_kv_heads)
        assert most.bit_count() == 1
        assert num_kv_heads * most in range(64, 133) or most == 16
    case = PagedCase(
        [(5000, 1), (300, 1)],
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.25),
        dtype=torch.float16,
        **TRITON,
    )
    # With this length, 64 of the shortest splits do not hold all keys, like splits of 256 keys in a sequence of 17,000.
    case.backend.split_keys = 64
    torch.testing.assert_close(case.forward().double(), case.expected(), atol=4e-3, rtol=1e-5)


@pytest.mark.parametrize("scales", [None, [[0.5, 2.0], [0.25, 4.0]]])
@pytest.mark.parametrize("softcap", [None, 8.0])
def test_fp8_cache_agrees_with_plain_attention(scales, softcap):
    """Keys and values are exact in FP8, because the interpreter does not round to it as a GPU does."""
    scales_2G = None if scales is None else torch.tensor(scales, device=DEVICE)
    assert_agrees(
        [(40, 1), (20, 9)],
        num_kv_heads=2,
        repeats=2,
        head_dim=32,
        block_size=16,
        layer=AttentionLayer(scale=0.2, softcap=softcap, kv_scales_2G=scales_2G),
        cache_dtype=torch.float8_e4m3fn,
    )


@pytest.mark.parametrize("window", [None, 40])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(window):
    case = PagedCase(
        [(700, 1), (100, 30), (20, 1), (0, 70)],
        num_kv_heads=1,
        repeats=3,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.3, window=window),
        dtype=torch.float16,
        **TRITON,
    )
    together = case.forward()
    for rows in ([0], [1], [2, 3], [3, 1]):
        assert torch.equal(case.forward(rows), together[case.tokens(rows)])


def test_a_prompt_has_the_same_bits_in_any_chunks():
    def outputs(*bounds):
        sequence = OneSequence("triton_paged", num_heads=2, num_kv_heads=1, device=DEVICE)
        return torch.cat([sequence.attend(first, last) for first, last in pairwise(bounds)])

    # The interpreter's matrix products are numpy's, whose sums depend on a row's place among the others: there the
    # chunks begin with a tile.
    bounds = (0, 64, 150) if DEVICE.type == "cpu" else (0, 2, 79, 150)
    assert torch.equal(outputs(*bounds), outputs(0, 150))


CAPTURED = {
    "decodes": ([(300, 1), (20, 1)], 1),
    "decodes of unlike lengths": ([(1500, 1), (20, 1), (300, 1)], 1),
    "a prompt and decodes": ([(300, 1), (40, 33), (0, 1), (100, 2)], 64),
    "prompts": ([(0, 40), (90, 70)], 128),
    "one token": ([(0, 1)], 4),
}
"""The requests of a step, and the maximum number of tokens of a request in its graph."""


@pytest.mark.parametrize("backend_name", ["triton_paged", "triton_batch_invariant"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_step_equals_any_other(name, window, backend_name):
    """It has more rows and tokens than requests, and space for longer sequences."""
    requests, max_queries = CAPTURED[name]
    case = PagedCase(
        requests,
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.3, window=window),
        dtype=torch.float32,
        backend_name=backend_name,
        device=DEVICE,
    )
    expected = case.forward()
    torch.testing.assert_close(expected.double(), case.expected(), atol=3e-5, rtol=1e-5)
    written = case.kv_cache.clone()

    def padded(array, shape, value):
        tensor = torch.full(shape, value, dtype=array.dtype, device=DEVICE)
        tensor[tuple(slice(size) for size in array.shape)] = array
        return tensor

    batch, num_tokens = case.batch(), len(expected)
    rows, tokens = len(requests) + 3, num_tokens + 3
    device_batch = DeviceBatch(
        query_start_loc=padded(torch.from_numpy(batch.query_start_loc), (rows + 1,), num_tokens),
        seq_lens=padded(torch.from_numpy(batch.seq_lens), (rows,), 0),
        block_table=padded(torch.from_numpy(batch.block_table), (rows, 400), 0),
        slot_mapping=padded(torch.from_numpy(batch.slot_mapping), (tokens,), -1),
    )
    metadata = case.backend.build_captured(device_batch, {window}, max_queries)
    qkv = (
        padded(x, (tokens, *x.shape[1:]), math.nan) for x in (case.q_THK, case.k_TGK, case.v_TGK)
    )
    out = case.backend.forward(*qkv, case.kv_cache, metadata, case.layer)
    assert torch.equal(out[:num_tokens], expected)
    assert torch.equal(case.kv_cache, written)


def test_splits_of_a_step_hold_all_its_keys_once():
    """The splits have about equal sizes, and are at most as many as the programs."""
    backend = attention_backend(
        AttentionSpec(
            num_heads=64,
            num_kv_heads=32,
            head_dim=16,
            block_size=16,
            dtype=torch.float16,
            device=DEVICE,
        ),
        "triton_paged",
    )
    seq_lens = np.array([9000, 0, 300, 17, 40000, 1, 2500], np.int32)
    counts = np.array([1, 0, 1, 5, 1, 1, 1], np.int32)
    batch = DeviceBatch(
        torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32)).to(DEVICE),
        torch.from_numpy(seq_lens).to(DEVICE),
        torch.zeros((7, 4000), dtype=torch.int32, device=DEVICE),
        torch.zeros(10, dtype=torch.int32, device=DEVICE),
    )
    for window in (None, 1000):
        splits = backend.build_captured(batch, {window}, 1).splits[window]
        entries = splits.entries.tolist()
        num_entries, split_keys = entries[:2]
        assert num_entries <= splits.capacity
        parts = {}
        for request, part in zip(entries[2::2][:num_entries], entries[3::2], strict=False):
            parts.setdefault(request, []).append(part)
        assert list(parts) == [0, 2, 4, 5, 6]
        for request, numbers in parts.items():
            assert numbers == list(range(len(numbers)))
            seen = min(seq_lens[request], window + 127 if window else 1 << 30)
            assert len(numbers) in (
                (-(-seen // split_keys),) if seen < 16 * split_keys else (15, 16)
            ) or (window and abs(len(numbers) - seen / split_keys) <= 1)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("scheduled", [1, 2])
@pytest.mark.parametrize("latent_rank", [0, 16])
def test_nans_of_a_request_do_not_affect_the_next_owner_of_its_block(
    poison, scheduled, latent_rank
):
    case = PagedCase(
        [(4, scheduled)],
        num_kv_heads=1,
        repeats=2,
        head_dim=32,
        latent_rank=latent_rank,
        block_size=16,
        layer=AttentionLayer(scale=0.3),
        dtype=torch.float32,
        **TRITON,
    )
    (block,) = case.steps[0].blocks
    case.kv_cache[block, :, :, 4:] = poison
    case.kv_cache[0] = poison
    torch.testing.assert_close(case.forward().double(), case.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scheduled", [1, 9])
def test_blocks_before_a_window_have_no_effect(scheduled):
    """Freed blocks may hold the content of another request."""
    window = 200
    case = PagedCase(
        [(700, scheduled)],
        num_kv_heads=1,
        repeats=2,
        head_dim=16,
        block_size=16,
        layer=AttentionLayer(scale=0.3, window=window),
        dtype=torch.float32,
        **TRITON,
    )
    blocks = case.steps[0].blocks
    for block in (0, *blocks[: (701 - window) // 16]):
        case.kv_cache[block] = math.nan
    torch.testing.assert_close(case.forward().double(), case.expected(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rotary_dim", [None, 8, 40])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fused_norm_and_rotation_equal_the_plain_operations(rotary_dim, has_norm, dtype):
    """Both the attention output and the cache content are equal."""
    spec = AttentionSpec(
        num_heads=6, num_kv_heads=2, head_dim=40, block_size=16, dtype=dtype, device=DEVICE
    )
    torch.manual_seed(0)
    steps = [Scheduled(0, 9, [2]), Scheduled(0, 1, [3])]
    qkv_THK = torch.randn(10, 10, 40).to(dtype).to(DEVICE)
    qk_THK, v_TGK = qkv_THK.split((8, 2), 1)
    norm = HeadNorm(torch.rand(8, 40, device=DEVICE) + 0.5, 1e-6) if has_norm else None
    tables = None
    if rotary_dim is not None:
        rope = RopeSpec(10_000.0, rotary_dim)
        rotary = RotaryEmbedding(rope, max_model_len=64, dtype=dtype, device=DEVICE)
        tables = rotary.tables(torch.tensor([*range(9), 0], device=DEVICE))
    results = []
    for name in ("torch_paged", "triton_paged"):
        backend = attention_backend(spec, name)
        kv_cache = torch.zeros(backend.kv_cache_shape(4), dtype=dtype, device=DEVICE)
        metadata = backend.build(attention_batch(steps, 16), {None})
        layer = AttentionLayer(scale=0.2)
        out = backend.forward_projected(qk_THK, v_TGK, norm, tables, kv_cache, metadata, layer)
        results.append((out, kv_cache))
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 512, "head_dim 512 exceeds the 256"),
        ("latent_rank", 1024, "kv_lora_rank 1024 exceeds the 512"),
        ("block_size", 24, "--block-size 24: .* only powers of two, such as 32"),
    ],
)
def test_unsupported_shapes_are_rejected(field, value, message):
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 16, field: value}
    spec = AttentionSpec(**shape, dtype=torch.float32, device=DEVICE)
    with pytest.raises(ConfigError, match=message):
        attention_backend(spec, "triton_paged")


MODEL_ROPE = RopeSpec(10_000.0, 8)
MODELS = {
    "windows, a soft cap, head norms and partial rotation": small_spec(
        head_dim=16,
        layers=(LayerSpec(MODEL_ROPE), LayerSpec(None, window=20)),
        attention_scale=0.25,
        qk_norm="head",
        attention_softcap=20.0,
    ),
    "latent attention": latent_spec(64, layers=(LayerSpec(ROPE), LayerSpec(None))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_logits_of_plain_torch(name, tmp_path):
    """The prompt is computed in chunks."""
    spec = MODELS[name]
    checkpoint = random_checkpoint(tmp_path, spec)
    attention = AttentionSpec.from_model(
        spec, ModelShard.whole(spec), block_size=16, dtype=torch.float32, device=DEVICE
    )
    logits = []
    for name in ("torch_paged", "triton_paged"):
        decoder = Decoder(
            spec,
            checkpoint,
            attention_backend(attention, name),
            dtype=torch.float32,
            device=DEVICE,
            max_model_len=256,
        )
        runner = Runner(decoder, num_requests=2, max_tokens=64)
        tokens = [(7 * i) % 96 for i in range(50)]
        chunks = [
            {0: tokens[:30]},
            {0: tokens[30:37], 1: tokens[:9]},
            {0: tokens[37:38], 1: tokens[9:12]},
            {0: tokens[38:39], 1: tokens[12:13]},
        ]
        logits.append(torch.cat([x for step in chunks for x in runner.step(step).values()]))
    torch.testing.assert_close(logits[1], logits[0], atol=1e-3, rtol=1e-3)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shape", triton_launches.SHAPES)
def test_every_kernel_fits_a_hopper_gpu(shape: str):
    """The machine code for the shapes of well-known models spills almost no registers."""
    kernels = compile_for_hopper(triton_launches.__file__, "launch_shape", shape)
    names = {"prefill_kernel", "decode_kernel", "rotary_store_kernel"}
    names |= {"list_splits_kernel", "list_tiles_kernel"}
    # A short window has only one part, and nothing to combine.
    assert {kernel.name for kernel in kernels} - {"combine_kernel"} == names
    for kernel in kernels:
        assert kernel.fits, kernel
        assert kernel.stack_bytes <= 64, kernel
        assert not kernel.overwritten, kernel
