"""Read the vision towers of Ovis 2 and 2.5."""

from __future__ import annotations

from typing import Final

from ...config_fields import ConfigFields
from ..fields import Sizes, check_factor, image_and_patch_size, read_sizes
from ..grid import GridVisionSpec
from ..merged import SIGLIP_NAMES, siglip_fields
from ..spec import VisionSpec

_SIZES: Final = Sizes(224, 14, 1024, 2816, num_heads=8, num_layers=24, activation="silu")
NUM_MARKS: Final = 5
"""The number of marks in an image's text."""


def ovis2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Ovis 2, an AIMv2 (arXiv 2411.14402) whose patches become distributions over visual words."""
    sizes = read_sizes(vision, _SIZES)
    sizes["norm_eps"] = vision.positive("rms_norm_eps", 1e-5)
    factor = vision.integer("hidden_stride", 1, maximum=64)
    check_factor(vision, "hidden_stride", factor, sizes["image_size"] // sizes["patch_size"])
    has_biases = vision.boolean("qkv_bias", False)
    vision.require("mlp_bias", has_biases, ", as qkv_bias", default=False)
    function = vision.choice("tokenize_function", ("softmax", "st_argmax"), "softmax")
    vision.require("num_visual_indicator_tokens", NUM_MARKS)
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="words",
        merge_factor=factor,
        has_patch_norm=True,
        has_post_norm=True,
        post_norm_kind="rms",
        norm_kind="rms",
        has_gate=True,
        qkv_bias=has_biases,
        product_bias=has_biases,
        num_words=vision.integer("vocab_size", 16384, minimum=NUM_MARKS + 1),
        num_marks=NUM_MARKS,
        chooses_words=function == "st_argmax",
        tensor_names=_NAMES,
    )


def ovis2_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of Ovis 2.5 and 2.6, a SigLIP 2 for images of any size."""
    vision.require_all(
        model_type="siglip2_navit",
        temporal_patch_size=1,
        num_patches=-1,
        use_rope=True,
        preserve_original_pe=True,
    )
    if (layers := vision.get("fullatt_block_indexes")) is not None:
        raise vision.wrong("fullatt_block_indexes", "null, as in published models", layers)
    image_size, patch_size = image_and_patch_size(vision, 512, 16)
    return GridVisionSpec(
        **siglip_fields(vision, output_size, patch_size),
        merge_size=vision.integer("hidden_stride", 2, maximum=16),
        merger_eps=1e-5,
        has_axes=False,
        position_side=image_size // patch_size,
        interpolation="centers",
        num_words=fields.integer("visual_vocab_size", 65536, minimum=8),
        tensor_names=(
            (r"visual_tokenizer\.vit\.(vision_model\.)?", "visual."),
            *SIGLIP_NAMES,
            (r"visual_tokenizer\.head\.0\.", "visual.merger.words."),
            (r"visual_tokenizer\.head\.1\.", "visual.merger.norm."),
            (r"vte\.", "visual.merger.table."),
        ),
    )


_NAMES: Final = (
    (r"vision_tower\.transformer\.rms_norm\.", "vision_tower.transformer.post_layernorm."),
    (r"(vision_tower\..*)\.rms_norm(\d)\.", r"\1.layer_norm\2."),
    (r"(vision_tower\..*)\.attention\.", r"\1.self_attn."),
    (r"(vision_tower\..*)\.ffn\.gate_proj\.", r"\1.mlp.gate_proj."),
    (r"(vision_tower\..*)\.ffn\.up_proj\.", r"\1.mlp.fc1."),
    (r"(vision_tower\..*)\.ffn\.down_proj\.", r"\1.mlp.fc2."),
)
