"""Tiny random encoder-decoder models as files on disk, and the sources that they read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import transformers
from engine.protocol.arrays import int32_bytes
from engine.protocol.messages import AudioPayload, EncoderInput, TextPayload

VOCAB_SIZE = 97
_BART_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "decoder_start_token_id": 3,
}
_T5_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 80,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": (
        "Whisper",
        _BART_SIZES | {"num_mel_bins": 8, "max_source_positions": 40, "max_target_positions": 128},
    ),
    "moonshine": (
        "Moonshine",
        {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 48,
            "intermediate_size": 80,
            "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 3,
            "encoder_num_attention_heads": 4,
            "decoder_num_attention_heads": 4,
            "max_position_embeddings": 128,
        },
    ),
    "bart": ("Bart", _BART_SIZES | {"max_position_embeddings": 128}),
    "mbart": ("MBart", _BART_SIZES | {"max_position_embeddings": 128, "scale_embedding": True}),
    "t5": ("T5", _T5_SIZES),
    "flan-t5": (
        "T5",
        _T5_SIZES | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}
SPEECH = ("whisper", "moonshine")


def source_directory(
    directory: Path, kind: str, changes: Mapping[str, Any] | None = None
) -> tuple[Path, Any]:
    """Write one of `MODELS`, with `changes` of its config. Return its directory and transformers' model."""
    name, sizes = MODELS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**sizes, **(changes or {})})
    model_class = getattr(transformers, f"{name}ForConditionalGeneration")
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter_name, parameter in model.named_parameters():
        if re.search(r"norm\.|bias$", parameter_name):
            torch.nn.init.normal_(parameter, 0.7, 0.2)
        else:
            torch.nn.init.normal_(parameter, 0, 0.15)
    if hasattr(model, "final_logits_bias"):
        torch.nn.init.normal_(model.final_logits_bias, 0, 1)
    model.save_pretrained(directory)
    return directory, model


def write_generation(directory: Path, **fields: Any) -> None:
    """Replace fields of the generation config."""
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def source(model: Any, seed: int, length: int = 0) -> tuple[torch.Tensor, EncoderInput]:
    """Return a random source as transformers takes it and as Engine does. A sound of Whisper has one length."""
    rng = np.random.default_rng(seed)
    config = model.config
    if config.model_type == "whisper":
        frames = 2 * config.max_source_positions
        features = rng.standard_normal((config.num_mel_bins, frames)).astype(np.float32)
        payload: Any = AudioPayload(config.num_mel_bins, frames, features.tobytes())
        size = config.max_source_positions
    elif config.model_type == "moonshine":
        features = rng.standard_normal(length or 3000).astype(np.float32)
        payload = AudioPayload(0, len(features), features.tobytes())
        size = (((len(features) - 127) // 64 + 1 - 7) // 3 + 1 - 3) // 2 + 1
    else:
        features = rng.integers(4, VOCAB_SIZE, length or 13)
        payload = TextPayload(int32_bytes(features.tolist()))
        size = len(features)
    data = msgspec.msgpack.encode(payload)
    return torch.from_numpy(features)[None], EncoderInput(0, 0, sha256(data).digest(), size, data)


@torch.inference_mode()
def logits(model: Any, inputs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Return transformers' logits [T, V] of the decoder's tokens."""
    return model(inputs, decoder_input_ids=torch.tensor([tokens])).logits[0]


def greedy(model: Any, inputs: torch.Tensor, prompt: list[int], count: int) -> list[int]:
    """Return the most likely tokens after a prompt of the decoder."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(model, inputs, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
