"""GGUF files of architectures that the package gguf does not know give the logits of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine.protocol.errors import CheckpointError
from engine.workers.loaders import open_checkpoint
from support.families import expected_logits, make_multimodal, make_reference, prompt
from support.gguf.tensors import write_tensors
from support.workers.decoders import Runner, load_decoder, load_native_decoder

torch.set_num_threads(1)

LLAMA = {
    "attention.head_count_kv": 2,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "feed_forward_length": 80,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e4,
}
COHERE: dict[str, Any] = {
    "attention.head_count_kv": 2,
    "attention.key_length": 8,
    "attention.value_length": 8,
    "rope.dimension_count": 8,
    "rope.freq_base": 1e4,
    "attention.sliding_window": 9,
    "attention.sliding_window_pattern": [True, False, True],
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 80,
    "logit_scale": 0.0625,
    "expert_gating_func": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "dbrx": (
        "dbrx",
        "dbrx",
        {},
        {
            "attention.head_count_kv": 2,
            "attention.clamp_kqv": 0.5,
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": 24,
            "expert_count": 5,
            "expert_used_count": 3,
            "rope.freq_base": 5e5,
        },
    ),
    "cohere2moe": (
        "cohere2moe",
        "cohere2-moe",
        {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
        COHERE
        | {
            "attention.layer_norm_epsilon": 1e-5,
            "feed_forward_length": 80,
            "expert_shared_count": 1,
            "expert_shared_feed_forward_length": 80,
        },
    ),
    "cohere2moe, dense": (
        "cohere2moe",
        "cohere2-moe-dense",
        {"num_shared_experts": 0, "layer_types": ["full_attention"] * 3},
        COHERE
        | {
            "attention.layer_norm_rms_epsilon": 1e-5,
            "feed_forward_length": 40,
            "leading_dense_block_count": 1,
            "expert_weights_norm": True,
            "attention.sliding_window_pattern": [False] * 3,
        },
    ),
    "hunyuan_vl": (
        "hunyuan_vl",
        "hunyuan",
        {"rope_parameters": ROPE, "rms_norm_eps": 1e-6},
        LLAMA,
    ),
    "muse-glimmer": (
        "muse-glimmer",
        "MuseGlimmer",
        {"post_norm_eps": 1e-8, "rms_norm_eps": 1e-6, "output_multiplier": 0.25},
        LLAMA
        | {
            "attention.sliding_window": 9,
            "attention.sliding_window_pattern": [True, True, True, False],
            "final_logit_softcapping": 20.0,
            "logit_scale": 0.25,
        },
    ),
    "paddleocr": ("paddleocr", "mistral", {"rope_parameters": ROPE}, LLAMA),
}
"""The architecture, the family in transformers, its differences, and the metadata of the file."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    architecture, family, differences, metadata = MODELS[name]
    make = make_multimodal if family[0].isupper() else make_reference
    reference = make(family, **differences)
    path = write_tensors(tmp_path / "m.gguf", reference, architecture, metadata)
    tokens = prompt(40, 1)
    expected = expected_logits(reference, tokens)
    for load in (load_decoder, load_native_decoder):
        logits = Runner(load(path)).step({0: tokens})[0]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["eurobert", "llama-embed"])
def test_decoders_that_attend_to_all_tokens_become_encoders(
    architecture: str, tmp_path: Path
) -> None:
    reference = make_reference("mistral")
    path = write_tensors(tmp_path / "m.gguf", reference, architecture, LLAMA)
    decoder = load_decoder(path)
    assert not decoder.spec.is_causal
    assert open_checkpoint(path).config["classifier_pooling"] == "mean"


@pytest.mark.parametrize(
    ("architecture", "metadata", "problem"),
    [
        ("deepseek2-ocr", {"attention.sliding_window": 128}, "sliding_window must be 0, got 128"),
        ("smallthinker", {}, "expert_count is missing"),
    ],
)
def test_files_of_models_that_differ_are_refused(
    architecture: str, metadata: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    experts = {"expert_count": 4, "expert_used_count": 2} if metadata else {}
    reference = make_reference("mistral")
    path = write_tensors(tmp_path / "m.gguf", reference, architecture, LLAMA | metadata | experts)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(path)
