"""Read the vision towers of Janus and DeepSeek-VL."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ..config_fields import ConfigFields
from .deepseek import sam_encoder
from .fields import Sizes, read_sizes
from .gemma import siglip
from .spec import VisionSpec

_SIZES: Final = Sizes(384, 16, 1024, 4096, num_heads=16, num_layers=24, activation="gelu")


def janus(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Janus (arXiv 2410.13848), which is like SigLIP."""
    vision.require_all(use_qk_norm=False, depth=2)
    reason = ", which is the decoder's hidden_size"
    vision.require("projection_dim", output_size, reason, default=2048)
    sizes = read_sizes(vision, _SIZES)
    sizes["intermediate_size"] = int(sizes["hidden_size"] * vision.positive("mlp_ratio", 4.0))
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="mlp",
        projection_activation=sizes["activation"],
        has_post_norm=True,
        qkv_bias=vision.boolean("attention_bias", True),
        tensor_names=(
            *_PUBLISHED_NAMES,
            (r"\.projection_layer\.", ".out_proj."),
            (r"^(model\.)?aligner\.fc1\.", "multi_modal_projector.linear_1."),
            (r"^(model\.)?aligner\.hidden_layers\.0\.", "multi_modal_projector.linear_2."),
        ),
    )


def deepseek_vl_hybrid(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of DeepSeek-VL 7B: a SigLIP, and SAM's encoder for a larger copy of the image."""
    sam = fields.first_section("high_res_vision_config")
    neck = sam.integer("output_channels", 256)
    fine = sam_encoder(sam, 2 * neck, 4 * neck)
    if not fine.full_layers:
        raise sam.wrong("global_attn_indexes", "at least one layer", [])
    if output_size % 2:
        raise fields.error(f"the decoder's hidden_size {output_size} must be even")
    spec = siglip(vision, output_size, projection="joined")
    return replace(
        spec,
        fine=replace(
            fine,
            early_layer=fine.full_layers[0],
            feature_side=spec.image_size // spec.patch_size,
        ),
        tensor_names=_HYBRID_NAMES,
    )


def deepseek_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of DeepSeek-VL (arXiv 2403.05525), a SigLIP."""
    return replace(
        siglip(vision, output_size, projection="mlp"),
        tensor_names=(
            *_PUBLISHED_NAMES,
            (r"^(model\.)?aligner\.linear(\d)\.", r"multi_modal_projector.linear_\2."),
        ),
    )


TIMM_NAMES: Final = (
    (r"^vision_tower\.patch_embed\.proj\.", "vision_tower.embeddings.patch_embedding."),
    (r"^vision_tower\.pos_embed$", "vision_tower.embeddings.position_embedding.weight"),
    (r"^vision_tower\.norm\.", "vision_tower.post_layernorm."),
    (r"^vision_tower\.blocks\.", "vision_tower.encoder.layers."),
    (r"^(vision_tower\..*)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"^(vision_tower\..*)\.attn\.proj\.", r"\1.self_attn.out_proj."),
    (r"^(vision_tower\..*)\.attn\.qkv\.", r"\1.self_attn.qkv."),
)
"""Translates the names of towers in timm."""

_PUBLISHED_NAMES: Final = (
    (r"^aligner\.layers\.0\.", "multi_modal_projector.linear_1."),
    (r"^aligner\.layers\.2\.", "multi_modal_projector.linear_2."),
    (r"^vision_model\.vision_tower\.", "vision_tower."),
    *TIMM_NAMES,
)
"""The names of DeepSeek's own files."""

_HYBRID_NAMES: Final = (
    (r"^(model\.)?high_res_vision_model\.vision_encoder\.", "sam."),
    (r"^(model\.)?high_res_vision_neck\.", "sam.early_neck."),
    (r"^(model\.)?high_res_vision_proj\.", "sam.proj."),
    (r"^(model\.)?high_res_vision_alpha$", "sam.early_factor"),
    (r"^(model\.)?aligner\.high_res_vision_proj\.", "multi_modal_projector.fine."),
    (r"^(model\.)?aligner\.vision_proj\.", "multi_modal_projector.linear_1."),
    (r"^(model\.)?aligner\.proj\.", "multi_modal_projector.linear_2."),
    # DeepSeek's own files.
    (r"^vision_model\.vision_tower_high\.vision_tower\.", "sam."),
    (r"^sam\.patch_embed\.proj\.", "sam.patch_embed.projection."),
    (r"^sam\.blocks\.(\d+)\.norm", r"sam.layers.\1.layer_norm"),
    (r"^sam\.blocks\.", "sam.layers."),
    (r"^sam\.neck_hd\.", "sam.early_neck."),
    (r"^(sam\.(?:early_)?neck)\.0\.", r"\1.conv1."),
    (r"^(sam\.(?:early_)?neck)\.1\.", r"\1.layer_norm1."),
    (r"^(sam\.(?:early_)?neck)\.2\.", r"\1.conv2."),
    (r"^(sam\.(?:early_)?neck)\.3\.", r"\1.layer_norm2."),
    (r"^sam\.downsamples\.0\.", "sam.proj.conv1."),
    (r"^sam\.downsamples\.1\.", "sam.proj.conv2."),
    (r"^sam\.hd_alpha_downsamples$", "sam.early_factor"),
    (r"^aligner\.high_up_proj\.", "multi_modal_projector.fine."),
    (r"^aligner\.low_up_proj\.", "multi_modal_projector.linear_1."),
    (r"^aligner\.layers\.1\.", "multi_modal_projector.linear_2."),
    (r"^vision_model\.vision_tower_low\.vision_tower\.", "vision_tower."),
    *TIMM_NAMES,
)
