"""Tiny random models that read audio clips, as files on disk, with a real tokenizer and transformers' features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support.tiny_checkpoints import sentencepiece_tokenizer

TEXT_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
NUM_MEL_BINS = 16
WINDOW_S = 2
"""A tower's window in seconds, where those of real models have 30."""

MODELS = ("qwen2_audio", "voxtral")
MARKS = {"qwen2_audio": "<|AUDIO|>", "voxtral": "[AUDIO]"}
_BEFORE = {"qwen2_audio": "<|audio_bos|>", "voxtral": "[BEGIN_AUDIO]"}
_AFTER = {"qwen2_audio": "<|audio_eos|>", "voxtral": ""}


def audio_directory(directory: Path, kind: str) -> tuple[Path, Any]:
    """Write a model of one of `MODELS`. Return its directory and transformers' model."""
    tokenizer = sentencepiece_tokenizer()
    marks = [mark for mark in (_BEFORE[kind], MARKS[kind], _AFTER[kind]) if mark]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    part = "".join(marks)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'audio' %}"
        + part
        + "{% else %}{{ p.text }}{% endif %}"
        "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ids = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")
    }
    text = {"vocab_size": len(tokenizer), "rope_theta": 10_000.0} | TEXT_SIZES | ids
    tower = {"num_mel_bins": NUM_MEL_BINS, "max_source_positions": 50 * WINDOW_S}
    mark = tokenizer.convert_tokens_to_ids(MARKS[kind])
    if kind == "qwen2_audio":
        config = transformers.Qwen2AudioConfig(
            audio_config=tower
            | {
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 4,
                "encoder_ffn_dim": 48,
            },
            text_config=text | {"model_type": "qwen2"},
            audio_token_index=mark,
        )
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    else:
        config = transformers.VoxtralConfig(
            audio_config=tower
            | {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
            },
            text_config=text | {"model_type": "llama", "head_dim": 16},
            audio_token_id=mark,
        )
        model = transformers.VoxtralForConditionalGeneration(config)
    model = model.float().eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    extractor(kind).save_pretrained(directory)
    return directory, model


def extractor(kind: str) -> Any:
    """Return transformers' feature extractor for the models of this module."""
    return transformers.WhisperFeatureExtractor(
        feature_size=NUM_MEL_BINS,
        chunk_length=WINDOW_S,
        return_attention_mask=kind == "qwen2_audio",
    )


def reference_inputs(kind: str, clips: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the inputs of transformers' model for audio clips of 16 kHz, as its processor makes them."""
    if kind == "qwen2_audio":
        found = extractor(kind)(
            clips,
            sampling_rate=16_000,
            return_attention_mask=True,
            padding="max_length",
            return_tensors="pt",
        )
        return {
            "input_features": found["input_features"],
            "feature_attention_mask": found["attention_mask"],
        }
    window = 100 * WINDOW_S
    parts = []
    for clip in clips:
        found = extractor(kind)(
            clip,
            sampling_rate=16_000,
            padding=True,
            truncation=False,
            pad_to_multiple_of=16_000 * WINDOW_S,
            return_tensors="pt",
        )["input_features"]
        parts.append(found.reshape(NUM_MEL_BINS, -1, window).transpose(0, 1))
    return {"input_features": torch.cat(parts)}
