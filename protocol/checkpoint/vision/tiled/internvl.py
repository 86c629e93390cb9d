"""Read the vision towers of InternVL and Qianfan-OCR."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ...config_fields import ConfigFields
from ..fields import Sizes, check_factor, feature_layers, read_sizes
from ..gemma import siglip
from ..spec import VisionSpec

_SIZES: Final = Sizes(448, 14, 1024, 4096, num_heads=16, num_layers=24, activation="gelu")


def internvl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of InternVL."""
    sizes = read_sizes(vision, _SIZES)
    factor = round(1 / fields.positive("downsample_ratio", 0.5))
    check_factor(fields, "downsample_ratio 1 /", factor, sizes["image_size"] // sizes["patch_size"])
    last_layer = sizes["feature_layers"]
    sizes["feature_layers"] = layers = feature_layers(fields, sizes, -1)
    norm_kind = vision.choice("norm_type", ("layer_norm", "rms_norm"), "layer_norm")
    fields.require("vision_feature_select_strategy", "default")
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="mlp",
        merge_factor=factor,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_projection_norm=True,
        has_class_token=True,
        has_post_norm=layers == last_layer and not vision.boolean("use_mean_pooling", True),
        norm_kind="rms" if norm_kind == "rms_norm" else "layer",
        has_layer_scales=True,
        qk_norm="full" if vision.boolean("use_qk_norm", False) else None,
        qkv_bias=vision.boolean("attention_bias", False),
        tensor_names=_INTERNVL_NAMES,
    )


def qianfan_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Qianfan-OCR, which is InternVL's. Its published files have other names."""
    spec = internvl(fields, vision.with_defaults(attention_bias=True), output_size)
    return replace(spec, tensor_names=(*_PUBLISHED_NAMES, *_INTERNVL_NAMES))


def internvl_chat(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of InternVL 2 to 3.5 in the format of their authors.

    Raises:
        CheckpointError: A field is missing or invalid, or the model reads images in another way.
    """
    side = vision.integer("image_size", _SIZES.image_size)
    fields.require("force_image_size", side, ", as in vision_config.image_size")
    # Version 1 transposes the embeddings of a tile.
    version = fields.choice("ps_version", ("v1", "v2"), "v1")
    # Flash models choose between two projections for each tile.
    if fields.get("flash_relative_threshold") is not None:
        raise fields.error(
            "flash_relative_threshold is not supported; use the InternVL model without Flash in its name"
        )
    text = fields.required_section("llm_config")
    if "InternLM2VEForCausalLM" in text.texts("architectures"):
        raise text.error(
            f"{text.prefix}architectures must not be InternLM2VEForCausalLM (Mono-InternVL), whose images have MLPs "
            "of their own; use another model"
        )
    values = {
        "use_qk_norm": vision.boolean("qk_normalization", True),
        "attention_bias": vision.boolean("qkv_bias", False),
        "norm_type": vision.text("norm_type", "rms_norm"),
        "use_mean_pooling": True,
    }
    fields = fields.with_values({"vision_feature_layer": fields.get("select_layer", -1)})
    return replace(
        internvl(fields, vision.with_values(values), output_size),
        has_columns_first=version == "v1",
        tensor_names=(*_PUBLISHED_NAMES, *_INTERNVL_NAMES),
    )


def nvlm_d(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of NVLM-D (arXiv 2409.11402), which is InternVL's with a wide projection without biases."""
    inner = fields.required_section("llm_config").integer("intermediate_size", 29_568)
    spec = internvl_chat(fields, vision, output_size)
    return replace(spec, projection_bias=False, adapter_size=inner)


def eagle2_5(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Eagle 2.5 (arXiv 2504.15271), a SigLIP with InternVL's projection."""
    side = vision.integer("image_size", 448)
    fields.require("force_image_size", side, ", as in vision_config.image_size")
    fields.require("select_layer", -1)
    factor = round(1 / fields.positive("downsample_ratio", 0.5))
    spec = siglip(
        vision.with_defaults(image_size=side, patch_size=14),
        output_size,
        projection="mlp",
        merge_factor=factor,
        has_projection_norm=True,
        tensor_names=_PUBLISHED_NAMES,
    )
    check_factor(fields, "downsample_ratio 1 /", factor, spec.image_size // spec.patch_size)
    return spec


_PUBLISHED_NAMES: Final = (
    (r"vision_model\.", "vision_tower."),
    (r"(vision_tower\.(encoder\.)?)layers\.", "vision_tower.encoder.layers."),
    (r"\.ls([12])$", r".lambda_\1"),
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"(vision_tower\..*)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"embeddings\.position_embedding$", "embeddings.position_embedding.weight"),
    (r"mlp1\.0\.", "model.multi_modal_projector.layer_norm."),
    (r"mlp1\.1\.", "model.multi_modal_projector.linear_1."),
    (r"mlp1\.3\.", "model.multi_modal_projector.linear_2."),
)
_INTERNVL_NAMES: Final = (
    (r"embeddings\.cls_token$", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection\.", "embeddings.patch_embedding."),
    (r"embeddings\.position_embeddings$", "embeddings.position_embedding.weight"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"\.attention\.projection_layer\.", ".self_attn.out_proj."),
    (r"\.attention\.", ".self_attn."),
    (r"\.layernorm_before\.", ".layer_norm1."),
    (r"\.layernorm_after\.", ".layer_norm2."),
    (r"vision_tower\.layernorm\.", "vision_tower.post_layernorm."),
)
