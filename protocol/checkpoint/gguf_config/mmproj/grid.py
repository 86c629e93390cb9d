"""Translate the metadata of towers in mmproj files that read images in about their own size."""

from __future__ import annotations

import math
from typing import Any

from .fields import Mmproj, Vision

_GLM_NAMES = {"glm4moe": ("glm4v_moe", "Glm4vMoe")}
"""The model types and the architectures of GLM's models with images, by the decoder's architecture."""


def glm4v(vision: Vision) -> Mmproj:
    """Return the fields of GLM-4.1V, GLM-4.5V, GLM-4.6V or GLM-OCR."""
    tower = {
        **vision.sizes("depth", "num_heads"),
        "patch_size": vision.patch_size,
        "spatial_merge_size": vision.merge_size,
        "temporal_patch_size": 2,
        "out_hidden_size": vision.num_rows("mm.model.fc.weight"),
        "hidden_act": "gelu" if vision.gguf.metadata.get("clip.use_gelu") else "silu",
        "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-5),
    }
    if vision.has_tensor("v.position_embd.weight"):
        side = math.isqrt(vision.num_rows("v.position_embd.weight"))
        tower |= {"image_size": side * vision.patch_size, "attention_bias": False}
        family, name = _GLM_NAMES.get(vision.decoder_architecture, ("glm4v", "Glm4v"))
    else:
        # It has no table of positions.
        tower["attention_bias"] = vision.has_tensor("v.blk.0.attn_out.bias")
        family, name = "glm_ocr", "GlmOcr"
    return Mmproj(
        {
            "model_type": family,
            "architectures": [f"{name}ForConditionalGeneration"],
            "vision_config": tower,
            "image_token_id": vision.token_id("<|image|>"),
        },
        vision.merged_pixels(temporal_patch_size=2),
    )


def glm5v(vision: Vision) -> Mmproj:
    """Return the fields of GLM-5.3-Flash, whose tower is that of GLM-OCR with limited gates."""
    found = glm4v(vision)
    unit = vision.patch_size * vision.merge_size
    limits = {
        name.replace("pixels", "image_tokens"): count // unit**2
        for name, count in vision.pixel_limits().items()
    }
    gates = {
        "projection_intermediate_size": vision.num_rows("mm.gate.weight"),
        "swiglu_limit": vision.positive("swiglu_clamp", 10.0),
    }
    return found._replace(
        config=found.config
        | {
            "model_type": "glm5_next",
            "architectures": ["Glm5NextForConditionalGeneration"],
            "vision_config": found.config["vision_config"] | gates,
        },
        processor={**found.processor, **limits},
    )


def paddleocr(vision: Vision) -> Mmproj:
    """Return the fields of PaddleOCR-VL."""
    # The file's size is that of the largest image. Positions are those of a smaller one.
    side = math.isqrt(vision.num_rows("v.position_embd.weight"))
    return Mmproj(
        {
            "model_type": "paddleocr_vl",
            "architectures": ["PaddleOCRVLForConditionalGeneration"],
            "vision_config": {
                **vision.sizes(),
                "patch_size": vision.patch_size,
                "image_size": side * vision.patch_size,
                "spatial_merge_size": vision.merge_size,
                "hidden_act": "gelu_pytorch_tanh",
                "layer_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
            },
            "image_token_id": vision.token_id("<|IMAGE_PLACEHOLDER|>"),
        },
        vision.merged_pixels(temporal_patch_size=1),
    )


def deepseek_ocr(vision: Vision) -> Mmproj:
    """Return the fields of DeepSeek-OCR, most of which the shapes of its tensors tell."""
    sam = _sam(vision)
    sam |= {
        "layers": sam["num_hidden_layers"],
        "width": sam["hidden_size"],
        "heads": sam["num_attention_heads"],
    }
    clip_patch = vision.integer("patch_size", 14)
    # The first position is that of the class token.
    clip_side = math.isqrt(vision.num_rows("v.position_embd.weight") - 1)
    clip = {
        "layers": vision.layer_count("block_count"),
        "width": vision.integer("embedding_length"),
        "heads": vision.integer("attention.head_count"),
        "image_size": clip_side * clip_patch,
        "patch_size": clip_patch,
    }
    return Mmproj(
        {
            "model_type": "deepseek_vl_v2",
            "architectures": ["DeepseekOCRForCausalLM"],
            "vision_config": {"width": {"clip-l-14-224": clip, "sam_vit_b": sam}},
            "projector_config": {"projector_type": "linear"},
            "image_token_id": vision.token_id("<image>"),
        },
        vision.statistics(),
    )


def deepseek_ocr2(vision: Vision) -> Mmproj:
    """Return the fields of DeepSeek-OCR 2, whose reader is a Qwen2."""
    reader = vision.sizes() | {
        "num_key_value_heads": vision.integer("attention.head_count_kv"),
        "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }
    return Mmproj(
        {
            "model_type": "deepseek_ocr2",
            "architectures": ["DeepseekOcr2ForConditionalGeneration"],
            "vision_config": {"sam_config": _sam(vision), "encoder_config": reader},
            "image_token_id": vision.token_id("<image>"),
        },
        vision.statistics(),
    )


def _sam(vision: Vision) -> dict[str, Any]:
    """Return the fields of SAM's encoder."""
    side = vision.num_channels("v.sam.pos_embd.weight", 1)
    tables = [
        vision.num_rows(f"v.sam.blk.{index}.attn.pos_h.weight")
        for index in range(vision.layer_count("sam.block_count"))
    ]
    all_places = 2 * side - 1
    patch_size = vision.num_channels("v.sam.patch_embd.weight", 2)
    return {
        "num_hidden_layers": len(tables),
        "hidden_size": vision.integer("sam.embedding_length"),
        "num_attention_heads": vision.integer("sam.head_count"),
        "image_size": side * patch_size,
        "patch_size": patch_size,
        "mlp_dim": vision.num_rows("v.sam.blk.0.mlp.lin1.weight"),
        "window_size": (min(tables) + 1) // 2,
        "global_attn_indexes": [i for i, rows in enumerate(tables) if rows == all_places],
        "output_channels": vision.num_channels("v.sam.neck.0.weight"),
        "downsample_channels": [vision.num_channels(f"v.sam.net_{i}.weight") for i in (2, 3)],
    }
