"""Families that only transformers has run with Engine's attention, and others are refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine.protocol.errors import CheckpointError
from engine.workers.attention import AttentionSpec, attention_backend
from engine.workers.layers.parallel.shard import ModelShard
from engine.workers.models.foreign.decoder import TransformersDecoder, TransformersModel
from engine.workers.models.kv_cache_groups import group_layers
from support.workers.decoders import CPU, Runner

pytestmark = pytest.mark.slow

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "llama": ("Llama", {}),
    "soft caps and windows": ("Gemma2", {"head_dim": 8, "sliding_window": 10}),
    "experts": ("Qwen3Moe", {"head_dim": 8, "num_experts": 9, "moe_intermediate_size": 16}),
    "multiplied logits": ("Granite", {"logits_scaling": 4.0}),
    "layer norms": ("StableLm", {}),
    "norms without weights": ("Olmo", {}),
    "the layers of an encoder": ("Bert", {"is_decoder": True}),
    "positions from 2 on": ("Roberta", {"is_decoder": True, "pad_token_id": 1}),
    "tokens that the decoder numbers itself": (
        "Bart",
        {"d_model": 48, "pad_token_id": 1, "decoder_ffn_dim": 80}
        # The config's number of layers is that of the encoder.
        | {"encoder_layers": 4, "decoder_layers": 3, "num_hidden_layers": 4}
        | {f"{part}_attention_heads": 6 for part in ("encoder", "decoder")},
    ),
}
REFUSED = {
    "convolutions": (
        "Lfm2",
        {"layer_types": ["conv", "full_attention", "conv"]},
        "layers call transformers' attention interface",
    ),
    "a mask that depends on values": ("Doge", {}, "a custom mask"),
    "own attention": ("Bloom", {"n_layer": 2, "n_head": 4}, "attention"),
    "attention by its own names": ("Git", {}, "attention functions of their own"),
}


def write(path: Path, family: str, differences: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL | differences)
    suffix = "LMHeadModel" if family == "Bert" else "ForCausalLM"
    model = getattr(transformers, f"{family}{suffix}")(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.15)
    model.save_pretrained(path)
    return model


def load(path: Path) -> TransformersDecoder:
    model = TransformersModel(path, {})
    spec = group_layers(model.spec, 256)
    attention = attention_backend(
        AttentionSpec.from_model(
            spec, ModelShard.whole(spec), block_size=4, dtype=torch.float32, device=CPU
        )
    )
    decoder = TransformersDecoder(model, spec, attention, dtype=torch.float32)
    decoder.check()
    return decoder


@pytest.mark.parametrize("name", MODELS)
def test_chunks_beside_others_give_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, *MODELS[name])
    rng = random.Random(0)
    # Without padding tokens, to which transformers gives no positions of their own.
    tokens = rng.choices(range(2, 97), k=60)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].float()
    runner, parts = Runner(load(tmp_path), 2), []
    while (start := sum(map(len, parts))) < len(tokens):
        chunks = {0: tokens[start : start + rng.choice([1, 7, 20])], 1: rng.choices(range(97), k=3)}
        parts.append(runner.step(chunks)[0])
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_transformers_models_with_state_besides_kv_cache_are_rejected(
    name: str, tmp_path: Path
) -> None:
    family, differences, reason = REFUSED[name]
    write(tmp_path, family, differences)
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path)
