"""A tiny random Qwen3-Omni in the layout of Qwen's own checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file

PATCH, MERGE = 4, 2


def omni_config(
    text: dict[str, Any], num_mel_bins: int, window_s: int, **token_ids: int
) -> transformers.Qwen3OmniMoeThinkerConfig:
    """Return the config of the part that reads. `text` has the sizes of its decoder."""
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    rope["rope_theta"] = text["rope_theta"]
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    return transformers.Qwen3OmniMoeThinkerConfig(
        text_config=text | experts | {"head_dim": 16, "rope_parameters": rope},
        audio_config={
            "num_mel_bins": num_mel_bins,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "n_window_infer": 100 * window_s,
            "downsample_hidden_size": 6,
            "output_dim": text["hidden_size"],
        },
        vision_config={
            "depth": 3,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        **token_ids,
    )


def write_omni(directory: Path) -> None:
    """Put the saved part into a whole model, and add the image processor to the file of the features' one."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({f"thinker.{name}": tensor for name, tensor in tensors.items()}, path)
    path = directory / "config.json"
    thinker = json.loads(path.read_text())
    whole = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    whole |= {"model_type": "qwen3_omni_moe", "thinker_config": thinker}
    path.write_text(json.dumps(whole))
    path = directory / "preprocessor_config.json"
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | images))
