"""Read the vision tower of Perception LM, a Perception Encoder in the format of timm."""

from __future__ import annotations

from typing import Final, NamedTuple

from ...config_fields import MAX_LAYERS, ConfigFields
from ..spec import MAX_SIDE, VisionSpec


class _Encoder(NamedTuple):
    """The arguments of a model of timm that the config may replace."""

    image_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float = 4.0
    has_class_token: bool = True
    is_core: bool = False


_ENCODERS: Final = {
    "vit_pe_core_large_patch14_336": _Encoder(336, 1024, 24, 16, is_core=True),
    "vit_pe_core_gigantic_patch14_448": _Encoder(448, 1536, 50, 16, 8960 / 1536, False, True),
    "vit_pe_lang_large_patch14_448": _Encoder(448, 1024, 23, 16),
    "vit_pe_lang_gigantic_patch14_448": _Encoder(448, 1536, 47, 16, 8960 / 1536, False),
}


def perception_lm(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Perception LM (arXiv 2504.13180), a Perception Encoder (arXiv 2504.13181).

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    name = vision.choice("architecture", tuple(_ENCODERS), "vit_pe_core_large_patch14_336")
    encoder, own = _ENCODERS[name], vision.first_section("model_args")
    image_size = _side(own, "img_size", encoder.image_size, MAX_SIDE)
    patch_size = _side(own, "patch_size", 14, image_size)
    size = own.integer("embed_dim", encoder.hidden_size)
    num_heads = own.divisor("num_heads", size, encoder.num_heads)
    has_class_token = own.boolean("class_token", encoder.has_class_token)
    fields.require("vision_use_cls_token", has_class_token, default=True)
    side = image_size // patch_size
    # Places are counted as in an image with this many patches.
    trained_side = _side(own, "ref_feat_shape", encoder.image_size // 14, MAX_SIDE)
    scales = "init_values", None if encoder.is_core else 0.1
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=int(size * own.positive("mlp_ratio", encoder.mlp_ratio)),
        num_heads=num_heads,
        feature_layers=(own.integer("depth", encoder.num_layers, maximum=MAX_LAYERS),),
        activation="gelu",
        norm_eps=1e-5,
        output_size=output_size,
        projection="mlp mean",
        merge_factor=fields.integer("projector_pooling_ratio", 1, maximum=side),
        has_class_token=has_class_token,
        has_patch_bias=False,
        rope_theta=own.positive("rope_temperature", 10_000.0),
        rotary="pairs",
        place_scale=trained_side / side,
        has_pre_norm=True,
        has_post_norm=own.boolean("use_post_transformer_norm", encoder.is_core),
        has_layer_scales=own.get(*scales) is not None,
        tensor_names=_NAMES,
    )


def _side(own: ConfigFields, name: str, default: int, maximum: int) -> int:
    """Return the side of a square, which the config gives once or for both directions."""
    value = own.get(name)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        own = own.with_values({name: value[0]})
    return own.integer(name, default, maximum=maximum)


_NAMES: Final = (
    (r"\.timm_model\.patch_embed\.proj\.", ".timm_model.embeddings.patch_embedding."),
    (r"\.timm_model\.cls_token$", ".timm_model.embeddings.class_embedding"),
    (r"\.timm_model\.pos_embed$", ".timm_model.embeddings.position_embedding.weight"),
    (r"\.timm_model\.norm_pre\.", ".timm_model.pre_layrnorm."),
    (r"\.timm_model\.norm\.", ".timm_model.post_layernorm."),
    (r"\.timm_model\.blocks\.(\d+)\.", r".timm_model.encoder.layers.\1."),
    (r"(\.encoder\.layers\.\d+)\.norm([12])\.", r"\1.layer_norm\2."),
    (r"(\.encoder\.layers\.\d+)\.gamma_([12])$", r"\1.lambda_\2"),
    (r"(\.encoder\.layers\.\d+)\.attn\.qkv\.", r"\1.self_attn.qkv."),
    (r"(\.encoder\.layers\.\d+)\.attn\.proj\.", r"\1.self_attn.out_proj."),
)
