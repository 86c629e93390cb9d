"""Models with Triton's kernels give the same logits as with torch's."""

import random
from pathlib import Path

import pytest
import torch
from engine.protocol.checkpoint.gguf import GGMLQuantizationType
from engine.workers.cuda.experts.grouped_linear import GroupedLinear
from engine.workers.cuda.layers import TritonKernels
from engine.workers.cuda.quantized.linear import QuantizedLinear
from support.checkpoints.quantized import quantize_directory
from support.checkpoints.tiny import (
    gemma3_gguf,
    qwen3_directory,
    random_model,
    sentencepiece_tokenizer,
)
from support.gguf.writer import write_gguf
from support.gpu.triton_interpreter import interpret_without_gpu
from support.suite.reachable import reachable
from support.workers.decoders import CPU, Runner, load_decoder

pytestmark = pytest.mark.slow

DEVICE = interpret_without_gpu()

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}


def logits(path: Path, kernels: TritonKernels | None) -> torch.Tensor:
    """Return the logits of a prompt in two chunks and of a token after it."""
    prompt = random.Random(4).choices(range(4, 300), k=21)
    device = CPU if kernels is None else DEVICE
    runner = Runner(load_decoder(path, kernels=kernels, device=device))
    chunks = [prompt[:12], prompt[12:20], prompt[20:]]
    return torch.cat([runner.step({0: chunk})[0] for chunk in chunks]).cpu()


def kernels(**options: bool) -> TritonKernels:
    return TritonKernels(torch.float32, **{"has_float8": True, **options})


def check(path: Path, tolerance: float = 2e-5, **options: bool) -> None:
    expected = logits(path, None)
    found = logits(path, kernels(**options))
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_gemma_gives_the_logits_of_torch(tmp_path: Path, is_batch_invariant: bool) -> None:
    check(gemma3_gguf(tmp_path)[0], is_batch_invariant=is_batch_invariant)


def test_multiplied_residuals_and_an_untied_head_give_the_logits_of_torch(tmp_path: Path) -> None:
    sizes = SIZES | {"residual_multiplier": 0.22, "tie_word_embeddings": False}
    del sizes["head_dim"]
    model = random_model("GraniteConfig", "GraniteForCausalLM", sizes, sentencepiece_tokenizer())
    model.save_pretrained(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("name", ["awq", "gptq-act-order"])
def test_integer_weights_give_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    path, _ = qwen3_directory(tmp_path)
    quantize_directory(path, name)
    decoder = load_decoder(path, kernels=kernels(), device=DEVICE)
    assert any(isinstance(held, QuantizedLinear) for held in reachable(decoder))
    check(path)


@pytest.mark.parametrize("name", ["fp8-static", "fp8-blocks"])
def test_float8_weights_give_the_logits_of_torch(tmp_path: Path, name: str) -> None:
    """The activations are rounded to three mantissa bits, too."""
    path, _ = qwen3_directory(tmp_path)
    quantize_directory(path, name)
    check(path, 0.2)
    expected = logits(path, None)
    assert torch.allclose(logits(path, kernels(has_float8=False)), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("ggml_type", ["Q4_K", "Q6_K"])
def test_gguf_weights_give_the_logits_of_torch(tmp_path: Path, ggml_type: str) -> None:
    tokenizer = sentencepiece_tokenizer()
    sizes = SIZES | {"tie_word_embeddings": False}
    model = random_model("LlamaConfig", "LlamaForCausalLM", sizes, tokenizer)
    path = write_gguf(
        tmp_path / "model.gguf", model, tokenizer, ggml_type=GGMLQuantizationType[ggml_type]
    )
    # Scales of scales are rounded to float16.
    check(path, 3e-3)


EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


@pytest.mark.parametrize(("ggml_type", "is_batch_invariant"), [("F32", True), ("Q8_0", False)])
def test_experts_give_the_logits_of_torch(
    tmp_path: Path, ggml_type: str, is_batch_invariant: bool
) -> None:
    tokenizer = sentencepiece_tokenizer()
    model = random_model("Qwen2MoeConfig", "Qwen2MoeForCausalLM", SIZES | EXPERTS, tokenizer)
    path = write_gguf(
        tmp_path / "model.gguf", model, tokenizer, ggml_type=GGMLQuantizationType[ggml_type]
    )
    check(path, 3e-3, is_batch_invariant=is_batch_invariant)
    decoder = load_decoder(path, kernels=kernels(), device=DEVICE)
    assert any(isinstance(held, GroupedLinear) for held in reachable(decoder))
