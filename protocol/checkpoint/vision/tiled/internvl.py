"""Read the vision towers of InternVL and Qianfan-OCR."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ...config_fields import ConfigFields
from ..fields import check_factor, feature_layers, head_count, image_and_patch_size
from ..spec import VisionSpec


def internvl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of InternVL."""
    image_size, patch_size = image_and_patch_size(vision, 448, 14)
    factor = round(1 / fields.positive("downsample_ratio", 0.5))
    check_factor(fields, "downsample_ratio 1 /", factor, image_size // patch_size)
    num_layers = vision.with_defaults(num_hidden_layers=24).layer_count("num_hidden_layers")
    layers = feature_layers(fields, num_layers, -1)
    is_last = layers == (num_layers,)
    norm_kind = vision.text("norm_type", "layer_norm")
    if norm_kind not in ("layer_norm", "rms_norm"):
        raise vision.wrong("norm_type", "'layer_norm' or 'rms_norm'", norm_kind)
    strategy = fields.text("vision_feature_select_strategy", "default")
    if strategy != "default":
        raise fields.wrong("vision_feature_select_strategy", "'default'", strategy)
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1024),
        intermediate_size=vision.integer("intermediate_size", 4096),
        num_heads=head_count(vision, 1024, 16),
        feature_layers=layers,
        activation=vision.text("hidden_act", "gelu"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=output_size,
        projection="mlp",
        merge_factor=factor,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_projection_norm=True,
        has_class_token=True,
        has_post_norm=is_last and not vision.boolean("use_mean_pooling", True),
        norm_kind="rms" if norm_kind == "rms_norm" else "layer",
        has_layer_scales=True,
        qk_norm="full" if vision.boolean("use_qk_norm", False) else None,
        qkv_bias=vision.boolean("attention_bias", False),
        tensor_names=_INTERNVL_NAMES,
    )


def qianfan_ocr(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Qianfan-OCR, which is InternVL's. Its published files have other names."""
    spec = internvl(fields, vision.with_defaults(attention_bias=True), output_size)
    return replace(spec, tensor_names=(*_QIANFAN_NAMES, *_INTERNVL_NAMES))


_QIANFAN_NAMES: Final = (
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
