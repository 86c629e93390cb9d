"""Translates the metadata of the mmproj files of Qwen-VL."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from .mmproj_fields import Mmproj, VisionFields

_IMAGE: Final = "<|image_pad|>"
_MERGE_SIZE: Final = 2
_FRAMES: Final = 2
_WINDOW_SIZE: Final = 112
_MAX_TOKENS: Final = 16384
_ARCHITECTURES: Final = {
    "qwen35": ("qwen3_5", "Qwen3_5"),
    "qwen35moe": ("qwen3_5_moe", "Qwen3_5Moe"),
    "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoe"),
}
"""The models whose tower is that of Qwen3-VL, by the architecture of their decoders."""


def qwen2_vl(vision: VisionFields) -> Mmproj:
    """Return what the mmproj file of Qwen2-VL says."""
    size = vision.integer("embedding_length")
    # The file has another number for this.
    inner = vision.rows("v.blk.0.ffn_up.weight")
    tower = {"embed_dim": size, "hidden_size": vision.decoder_size, "mlp_ratio": inner / size}
    return _mmproj(vision, "qwen2_vl", "Qwen2VL", tower, "gelu", least_tokens=4)


def qwen2_5_vl(vision: VisionFields) -> Mmproj:
    """Return what the mmproj file of Qwen2.5-VL says."""
    period, depth = vision.integer("n_wa_pattern"), vision.layer_count("block_count")
    tower = {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "out_hidden_size": vision.decoder_size,
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
        "window_size": vision.integer("window_size", _WINDOW_SIZE),
    }
    return _mmproj(vision, "qwen2_5_vl", "Qwen2_5_VL", tower, "gelu", least_tokens=4)


def qwen3_vl(vision: VisionFields) -> Mmproj:
    """Return what the mmproj file of Qwen3-VL or Qwen3.5 says."""
    added = vision.gguf.metadata.get("clip.vision.is_deepstack_layers")
    tower = {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "out_hidden_size": vision.decoder_size,
        "num_position_embeddings": vision.rows("v.position_embd.weight"),
        "deepstack_visual_indexes": [] if added is None else np.flatnonzero(added).tolist(),
    }
    model_type, name = _ARCHITECTURES.get(vision.decoder_architecture, ("qwen3_vl", "Qwen3VL"))
    return _mmproj(vision, model_type, name, tower, "gelu_pytorch_tanh", least_tokens=64)


def _mmproj(
    vision: VisionFields,
    model_type: str,
    name: str,
    tower: dict[str, Any],
    gelu: str,
    least_tokens: int,
) -> Mmproj:
    if not vision.has_tensor("v.patch_embd.weight.1"):
        raise CheckpointError(
            vision.path, "there is no tensor 'v.patch_embd.weight.1', that of a second frame"
        )
    patch_size = vision.integer("patch_size")
    merge_size = vision.integer("spatial_merge_size", _MERGE_SIZE)
    unit = (patch_size * merge_size) ** 2
    own = {
        "depth": vision.layer_count("block_count"),
        "num_heads": vision.integer("attention.head_count"),
        "patch_size": patch_size,
        "spatial_merge_size": merge_size,
        "temporal_patch_size": _FRAMES,
        "hidden_act": vision.activation(gelu),
    }
    return Mmproj(
        {
            "model_type": model_type,
            "architectures": [f"{name}ForConditionalGeneration"],
            "vision_config": own | tower,
            "image_token_id": vision.token_id(_IMAGE),
        },
        vision.pixels({"shortest_edge": least_tokens * unit, "longest_edge": _MAX_TOKENS * unit}),
    )
