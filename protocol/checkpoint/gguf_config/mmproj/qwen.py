"""Translate the metadata of the towers of Qwen-VL, EXAONE 4.5, Ling 3 and MiMo-V2.5 in mmproj files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from .fields import Mmproj, Vision


def _qwen(
    vision: Vision, family: str, name: str, tower: Mapping[str, Any], pixels: tuple[int, int]
) -> Mmproj:
    """Return the fields of a Qwen-VL. `pixels` are the limits of an image that its author published."""
    least, most = (
        vision.integer(f"image_{limit}_pixels", default)
        for limit, default in zip(("min", "max"), pixels, strict=True)
    )
    output_size = vision.num_rows("mm.2.weight")
    return Mmproj(
        {
            "model_type": family,
            "architectures": [f"{name}ForConditionalGeneration"],
            "vision_config": {
                "depth": vision.layer_count("block_count"),
                "num_heads": vision.integer("attention.head_count"),
                "patch_size": vision.patch_size,
                "spatial_merge_size": vision.merge_size,
                "temporal_patch_size": 2,
                "out_hidden_size": output_size,
                **tower,
            },
            "image_token_id": vision.token_id("<|image_pad|>"),
        },
        vision.pixels({"shortest_edge": least, "longest_edge": most}),
    )


def qwen2_vl(vision: Vision) -> Mmproj:
    """Return the fields of Qwen2-VL."""
    size = vision.integer("embedding_length")
    tower = {
        "embed_dim": size,
        "hidden_size": vision.num_rows("mm.2.weight"),
        # The file's feed_forward_length is the size of the outputs.
        "mlp_ratio": vision.num_rows("v.blk.0.ffn_up.weight") / size,
        "hidden_act": vision.activation("gelu"),
    }
    return _qwen(vision, "qwen2_vl", "Qwen2VL", tower, _QWEN2_PIXELS)


def qwen2_5_vl(vision: Vision) -> Mmproj:
    """Return the fields of Qwen2.5-VL."""
    return _qwen(vision, "qwen2_5_vl", "Qwen2_5_VL", _windows(vision), _QWEN2_PIXELS)


def exaone4_5(vision: Vision) -> Mmproj:
    """Return the fields of EXAONE 4.5."""
    heads = {"num_key_value_heads": vision.integer("attention.head_count_kv")}
    return _qwen(vision, "exaone4_5", "Exaone4_5_", _windows(vision) | heads, _QWEN2_PIXELS)


def _windows(vision: Vision) -> dict[str, Any]:
    """Return the fields of Qwen2.5-VL's tower, most of whose layers attend within windows."""
    period = vision.integer("n_wa_pattern")
    return {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "hidden_act": vision.activation("gelu"),
        "window_size": vision.integer("window_size", 112),
        "fullatt_block_indexes": [*range(period - 1, vision.layer_count("block_count"), period)],
    }


def qwen3_vl(vision: Vision) -> Mmproj:
    """Return the fields of Qwen3-VL or Qwen3.5."""
    is_kept = vision.config.get("clip.vision.is_deepstack_layers")
    layers = [index for index, kept in enumerate([] if is_kept is None else is_kept) if kept]
    tower = {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "hidden_act": vision.activation("gelu_pytorch_tanh"),
        "num_position_embeddings": vision.num_rows("v.position_embd.weight"),
        "deepstack_visual_indexes": layers,
    }
    names = _QWEN3_NAMES.get(vision.decoder_architecture, ("qwen3_vl", "Qwen3VL"))
    return _qwen(vision, *names, tower, _QWEN3_PIXELS)


def ling3_vl(vision: Vision) -> Mmproj:
    """Return the fields of Ling 3, whose tower is that of Qwen3-VL."""
    tower = {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "hidden_act": vision.activation("gelu_pytorch_tanh"),
        "num_position_embeddings": vision.num_rows("v.position_embd.weight"),
    }
    return _qwen(vision, "bailing_moe_v3_vl", "BailingMoeV3VL", tower, _QWEN3_PIXELS)


def mimo_vl(vision: Vision) -> Mmproj:
    """Return the fields of MiMo-V2.5. Files do not have the number of elements of a head."""
    num_heads = vision.integer("attention.head_count")
    num_kv_heads = vision.integer("attention.head_count_kv")
    head_dim = vision.num_rows("v.blk.0.attn_qkv.weight") // (num_heads + 2 * num_kv_heads)
    types = vision.integers("wa_pattern_mode")
    tower = {
        "hidden_size": vision.integer("embedding_length"),
        "intermediate_size": vision.integer("feed_forward_length"),
        "hidden_act": vision.activation("gelu"),
        "num_key_value_heads": num_kv_heads,
        "qk_channels": head_dim,
        "kv_channels": head_dim,
        "vit_window_attn_types": types,
        "visual_token_window_size": vision.integer("window_size"),
        "use_sink": vision.has_tensor(f"v.blk.{_first_window(types)}.attn_sinks"),
        "rms_norm_eps": vision.positive("attention.layer_norm_epsilon", 1e-6),
    }
    found = _qwen(vision, "mimo_v2", "MiMoV2", tower, _QWEN2_PIXELS)
    return found._replace(config=found.config | {"architectures": ["MiMoV2FlashForCausalLM"]})


def _first_window(types: list[int]) -> int:
    """Return the first layer whose patches do not attend to all others."""
    return next((index for index, kind in enumerate(types) if kind >= 0), 0)


_QWEN2_PIXELS: Final = (56 * 56, 28 * 28 * 16384)
_QWEN3_PIXELS: Final = (1 << 16, 1 << 24)
"""The limits of an image's pixels in the authors' processors."""

_QWEN3_NAMES: Final = {
    "qwen35": ("qwen3_5", "Qwen3_5"),
    "qwen35moe": ("qwen3_5_moe", "Qwen3_5Moe"),
    "qwen3vlmoe": ("qwen3_vl_moe", "Qwen3VLMoe"),
}
"""The model types and the architectures of models whose tower is like that of Qwen3-VL, by the decoder's."""
