"""The error that native arithmetic adds to the rounding of a checkpoint's weights."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
from engine.protocol.checkpoint.gguf import GGMLQuantizationType as T
from engine.workers.loaders import open_checkpoint
from engine.workers.models.families import model_spec
from support.gguf.writer import write_gguf
from support.workers.decoders import Runner
from support.workers.native_decoders import native_decoder, torch_decoder
from torch import Tensor

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

VOCABULARY, OUTLIER = 300, 7
TOKENS = torch.randint(VOCABULARY, (120,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def model() -> transformers.LlamaForCausalLM:
    """Make a model in which one channel is much larger than the others, as in trained models."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight[OUTLIER] = 60
            elif name.split(".")[-2] in (
                "q_proj",
                "k_proj",
                "v_proj",
                "gate_proj",
                "up_proj",
                "lm_head",
            ):
                weight[:, OUTLIER] /= 60
    return model


def divergence(
    path: Path, dtype: torch.dtype = torch.bfloat16, quantization: str | None = None
) -> float:
    """Return the mean KL divergence of the next token's distribution from that of the float32 model."""
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint.config, path)
    native = native_decoder(
        spec, checkpoint, dtype=dtype, cache_dtype=torch.bfloat16, quantization=quantization
    )

    def log_probabilities(decoder: object) -> Tensor:
        logits: Tensor = Runner(decoder).step({0: TOKENS})[0]
        return logits.log_softmax(-1)

    p, q = map(log_probabilities, (torch_decoder(spec, checkpoint), native))
    return float((p.exp() * (p - q)).sum(-1).mean())


QUANTIZED = [T.Q4_0, T.Q4_1, T.Q5_0, T.Q8_0, T.Q4_K, T.Q5_K, T.Q6_K]
MIXED = {
    "Q4_K_M": (T.Q4_K, {"v_proj": T.Q6_K, "down_proj": T.Q6_K, "lm_head": T.Q6_K}),
    "a float v": (T.Q4_K, {"v_proj": T.F32}),
    "a float gate": (T.Q8_0, {"gate_proj": T.BF16}),
}
STORED = {**{t.name: (t, {}) for t in QUANTIZED}, **MIXED}


@pytest.mark.parametrize("name", STORED)
def test_int8_activations_add_little_divergence_despite_outliers(
    name: str, model: transformers.LlamaForCausalLM, tmp_path: Path
) -> None:
    ggml_type: T
    ggml_types: Mapping[str, T]
    ggml_type, ggml_types = STORED[name]
    path = write_gguf(tmp_path / "m.gguf", model, ggml_type=ggml_type, ggml_types=ggml_types)
    assert divergence(path) < 0.004


@pytest.mark.parametrize(
    ("ggml_type", "dtype", "bound"),
    [
        (T.BF16, torch.bfloat16, 5e-4),
        (T.F16, torch.float16, 2e-4),
        (T.F32, torch.float32, 2e-4),
    ],
)
def test_float_weights_add_less_divergence(
    ggml_type: T,
    dtype: torch.dtype,
    bound: float,
    model: transformers.LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    path = write_gguf(tmp_path / "m.gguf", model, ggml_type=ggml_type)
    assert divergence(path, dtype) < bound


def test_quantizing_to_int8_at_load_adds_little_divergence(
    model: transformers.LlamaForCausalLM, tmp_path: Path
) -> None:
    # The weights before it are the reference: their own rounding counts as well.
    assert divergence(write_gguf(tmp_path / "m.gguf", model), quantization="int8") < 0.02
