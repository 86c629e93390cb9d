"""Errors for checkpoints with fields of wrong types or absurd values name the field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from engine.frontend.chat import ModelTemplates
from engine.frontend.model_source.config import resolve_model
from engine.frontend.model_source.options import ModelOptions, ResolvedModel
from engine.frontend.supervisor.console import Console
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from engine.workers.models.families import model_spec
from gguf import GGUFValueType, GGUFWriter
from safetensors.numpy import save_file
from support.checkpoints.tiny import sentencepiece_tokenizer
from support.gguf.finish import finish

WRONG = ("12", "", -3, 0, 1.5, 10**30, 1e300, True, [], [1], [None], [[1]], ["x"], {}, {"a": 1})

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": 1,
}
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: list[dict[str, Any]] = [
    {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "max_window_layers": 1}
    | SLIDING,
    {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 30.0,
        "rope_local_base_freq": 1e4,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    }
    | SLIDING,
    {
        "architectures": ["Phi3ForCausalLM"],
        "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 128,
    },
    {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0],
        "no_rope_layer_interval": 2,
    },
    {
        "architectures": ["GraniteForCausalLM"],
        "attention_multiplier": 0.1,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 128},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
    | {"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128},
    {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": 128}
    | {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
]
INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 16}
QUANTIZATIONS: list[dict[str, Any]] = [
    {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"},
    {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"},
    {"quant_method": "gptq", "bits": 4, "group_size": 16, "checkpoint_format": "gptq"},
    {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    | {"config_groups": {"group_0": {"weights": INT4, "input_activations": {"dynamic": True}}}},
]
CONFIGS = [LLAMA, *FAMILIES]
CONFIGS += [{"rope_scaling": rope} for rope in ROPES]
CONFIGS += [{"quantization_config": quantization} for quantization in QUANTIZATIONS]
CONFIGS += [{"text_config": LLAMA}]

OTHERS: dict[str, dict[str, Any]] = {
    "generation_config.json": {
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "eos_token_id": 1,
    },
    "tokenizer_config.json": {
        "bos_token": "<bos>",
        "eos_token": {"content": "<eos>"},
        "add_bos_token": True,
        "add_eos_token": False,
        "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
        "added_tokens_decoder": {
            "1": {"content": "<eos>"},
            "700": {"content": "x", "lstrip": True},
        },
    },
    "special_tokens_map.json": {"pad_token": "<pad>", "unk_token": {"content": "<unk>"}},
    "chat_template.json": {"chat_template": "{{ messages[0].content }}"},
    "model.safetensors.index.json": {"weight_map": {"x": "model.safetensors"}},
}


def mutations(content: Any) -> Iterator[tuple[str, Any]]:
    """Return copies of the content in each of which one value, at any depth, is replaced by a wrong one."""
    if not isinstance(content, dict | list):
        return
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        for wrong in WRONG:
            yield f"{key}: {wrong!r}", _replaced(content, key, wrong)
        for name, nested in mutations(value):
            yield f"{key}.{name}", _replaced(content, key, nested)


def _replaced(content: Any, key: Any, value: Any) -> Any:
    copy = content.copy()
    copy[key] = value
    return copy


def read_config(path: Path) -> None:
    """Read everything that the supervisor and a worker read before they load tensors."""
    resolved = resolve_model(ModelOptions(model=str(path)), Console())
    model = msgspec.msgpack.decode(msgspec.msgpack.encode(resolved), type=ResolvedModel).config
    assert all(0 <= id_ < model.vocab_size for id_ in model.eos_token_ids)
    checkpoint = open_checkpoint(path)
    spec = model_spec(checkpoint.config, checkpoint.config_path)
    for rope in {layer.rope for layer in spec.layers} - {None}:
        frequencies, factor = rope.inverse_frequencies(model.max_model_len)
        assert np.isfinite(frequencies).all() and (frequencies > 0).all() and factor > 0


def read_others(path: Path) -> None:
    resolve_model(ModelOptions(model=str(path)), Console())
    ModelTemplates(load_tokenizer(path))
    open_checkpoint(path)


def refusal(read: Callable[[Path], None], path: Path) -> str | None:
    """Return the error for the checkpoint `path` if it is rejected. Any other exception fails the test."""
    try:
        read(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}")
        return str(error)
    return None


def refusals(
    read: Callable[[Path], None], path: Path, file: Path, base: Any, changed: Any
) -> list[str]:
    """Return the errors for all mutations of `changed` in `file`; each is rejected or valid."""
    found = []
    for name, content in mutations(changed):
        file.write_text(json.dumps(base | content))
        try:
            if message := refusal(read, path):
                found.append(message)
        except Exception as error:
            raise AssertionError(f"{file.name} with {name}") from error
    return found


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    sentencepiece_tokenizer().save_pretrained(tmp_path)
    save_file({"x": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: "-".join(map(str, config))[:40])
def test_mutations_of_config_json_are_rejected_or_valid(
    directory: Path, config: dict[str, Any]
) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(LLAMA | config))
    message = refusal(read_config, directory)
    assert message is None or "but no module has a tensor" in message, "what is not mutated"
    assert refusals(read_config, directory, file, LLAMA, config)


@pytest.mark.parametrize("name", OTHERS)
def test_mutations_of_other_json_files_are_rejected_or_valid(directory: Path, name: str) -> None:
    (directory / "tokenizer_config.json").write_text("{}")
    file, content = directory / name, OTHERS[name]
    assert refusals(read_others, directory, file, {}, content)
    for wrong in (w for w in WRONG if not isinstance(w, dict)):
        file.write_text(json.dumps(wrong))
        message = refusal(read_others, directory)
        assert message is not None and message.startswith(f"{file}: must contain a JSON object")


KINDS = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.INT64,
    float: GGUFValueType.FLOAT64,
    str: GGUFValueType.STRING,
    list: GGUFValueType.ARRAY,
}
GGUF: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": [2, 2],
    "llama.attention.key_length": 16,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.attention.sliding_window": 32,
    "llama.expert_count": 0,
    "llama.rope.freq_base": 1e4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 4.0,
    "llama.rope.scaling.original_context_length": 128,
    "llama.rope.scaling.yarn_beta_fast": 32.0,
    "general.sampling.temp": 0.5,
    "general.sampling.top_k": 5,
    "tokenizer.chat_template": "{{ messages[0].content }}",
    "tokenizer.chat_templates": ["rag"],
    "tokenizer.chat_template.rag": "{{ documents }}",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "c", "d"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.add_space_prefix": True,
}
BYTE_LEVEL = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.merges": ["a b"],
}
UNIGRAM = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.remove_extra_whitespaces": False}
GEMMA = {
    key.replace("llama.", "gemma3."): value for key, value in GGUF.items() if key[:5] == "llama"
} | {"gemma3.attention.sliding_window_pattern": [True, False]}
GGUF_WRONG = ("12", "", -3, 0, 1.5, 1e300, True, ["x"], [1, 2], [1.5, 2.5], [True])


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    writer = GGUFWriter(path, next(iter(metadata)).partition(".")[0])
    for key, value in metadata.items():
        writer.add_key_value(key, value, KINDS[type(value)])
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), np.float32))
    finish(writer)


@pytest.mark.parametrize(
    ("base", "changed"),
    [(GGUF, GGUF), (GGUF, BYTE_LEVEL), (GGUF, UNIGRAM), (GEMMA | GGUF, GEMMA)],
    ids=["llama", "gpt2", "t5", "gemma3"],
)
def test_mutations_of_gguf_metadata_are_rejected_or_valid(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    base: dict[str, Any],
    changed: dict[str, Any],
) -> None:
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"

    def read(path: Path) -> None:
        read_config(path)
        read_others(path)

    write_gguf(path, base | changed)
    assert refusal(read, path) is None, "what is not mutated"
    found = 0
    for key in changed:
        for wrong in GGUF_WRONG:
            write_gguf(path, base | changed | {key: wrong})
            try:
                found += refusal(read, path) is not None
            except Exception as error:
                raise AssertionError(f"{key}: {wrong!r}") from error
    assert found


def test_an_error_names_file_field_value_and_expectation(directory: Path) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 0}}))
    with pytest.raises(CheckpointError) as caught:
        read_config(directory)
    assert str(caught.value) == f"{file}: rope_scaling.factor must be a positive number, got 0"
