"""Models in Mistral's own format give the logits of the same models in that of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.checkpoint.files import read_model_config
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from support.checkpoints.mistral_files import write_mistral_files
from support.families import expected_logits, make_reference, prompt
from support.workers.decoders import Runner, load_decoder, load_native_decoder

torch.set_num_threads(1)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}
LATENT: dict[str, Any] = {"n_group": 1, "topk_group": 1}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "tied": ("mistral", {"tie_word_embeddings": True, "num_key_value_heads": 6}, 1),
    "windows": (
        "ministral",
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        1,
    ),
    "query scaling": ("mistral3", {}, 2),
    "experts": ("mixtral", {}, 3),
    "latent": (
        "mistral4",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        2,
    ),
    "latent, dense, unscaled": (
        "mistral4",
        LATENT
        | {"first_k_dense_replace": 3, "q_lora_rank": None}
        | {"rope_parameters": YARN | {"attention_factor": 1.0}},
        1,
    ),
}
"""The family in transformers, its differences, and the number of files."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    family, differences, num_files = MODELS[name]
    reference = make_reference(family, **differences)
    write_mistral_files(reference, tmp_path, num_files=num_files)
    tokens = prompt(40, 1)
    expected = expected_logits(reference, tokens)
    for load in (load_decoder, load_native_decoder):
        runner = Runner(load(tmp_path))
        logits = torch.cat([runner.step({0: tokens[:23]})[0], runner.step({0: tokens[23:]})[0]])
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("scheme", "activations"), [("TENSOR", "static"), ("NO_SCALES", "dynamic")]
)
def test_float8_weights_are_those_that_were_quantized(
    scheme: str, activations: str, tmp_path: Path
) -> None:
    reference = make_reference("mistral")
    write_mistral_files(reference, tmp_path, fp8=scheme)
    checkpoint = open_checkpoint(tmp_path)
    quantization = {"quant_method": "fp8", "activation_scheme": activations}
    assert checkpoint.config["quantization_config"] == quantization
    assert set(checkpoint.names()) == set(reference.state_dict())
    for name, tensor in reference.state_dict().items():
        found = checkpoint.tensor(name, torch.float32)
        torch.testing.assert_close(found, tensor, atol=0.0625 * tensor.abs().max().item(), rtol=0)
        # Ranks read heads, and parts of heads.
        part = checkpoint.tensor(name, torch.float32, part=range(5, 13))
        assert torch.equal(part, found[5:13])


def test_files_of_transformers_come_before_those_of_mistral(tmp_path: Path) -> None:
    reference = make_reference("mistral")
    write_mistral_files(reference, tmp_path)
    reference.save_pretrained(tmp_path)
    assert "transformers_version" in open_checkpoint(tmp_path).config
    (tmp_path / "model.safetensors").unlink()
    assert "transformers_version" not in open_checkpoint(tmp_path).config


@pytest.mark.parametrize(
    ("changes", "mentioned"),
    [
        ({"model_type": "mamba"}, "model_type must be 'transformer', got 'mamba'"),
        (
            {"multimodal": {"whisper_model_args": {}}},
            "multimodal.whisper_model_args.encoder_args is missing",
        ),
        ({"lora": {"rank": 64}}, "lora is not supported"),
        ({"n_heads": None}, "n_heads is missing"),
        ({"quantization": {"qformat_weight": "int3"}}, "quantization.qformat_weight must be"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "ROW"}},
            "quantization.qscheme_act must be one of TENSOR, NO_SCALES, got 'ROW'",
        ),
        ({"sliding_window": [8, 4, None]}, "sliding_window must be a list of one size"),
        ({"moe": {"num_experts": 4, "num_shared_experts": 1}}, "moe.num_shared_experts must be 0"),
        ({"yarn": {"factor": 0}}, "yarn.factor must be a positive number"),
        (
            {"vision_encoder": {"mm_projector_id": "pooled"}},
            "vision_encoder.mm_projector_id must be 'patch_merge'",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    changes: dict[str, Any], mentioned: str, tmp_path: Path
) -> None:
    params = {
        "dim": 48, "n_layers": 3, "hidden_dim": 80, "n_heads": 6, "n_kv_heads": 2, "vocab_size": 97
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    assert read_model_config(tmp_path).get("model_type") == "mistral"
    (tmp_path / "params.json").write_text(json.dumps(params | changes))
    with pytest.raises(CheckpointError, match=r"params\.json") as error:
        read_model_config(tmp_path)
    assert mentioned in str(error.value)
