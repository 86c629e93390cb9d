"""Read the vision towers of Pixtral, Mistral 3 and 4 and LightOnOCR, which process images of any size."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from ..config_fields import ConfigFields
from .fields import Sizes, feature_layers, read_sizes, require_rotated_pairs
from .spec import VisionSpec


def pixtral(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Pixtral, or of Mistral 3 or LightOnOCR, which differ in the projection."""
    merges = fields.text("model_type") in ("mistral3", "mistral_large4", "lighton_ocr")
    sizes = read_sizes(vision, _SIZES)
    sizes |= {"feature_layers": feature_layers(fields, sizes, -1), "norm_eps": 1e-5}
    require_rotated_pairs(vision, sizes["hidden_size"], sizes["num_heads"])
    rope = vision.first_section("rope_parameters")
    factor = fields.integer("spatial_merge_size", 2, maximum=64) if merges else 1
    text = fields.first_section("text_config")
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="merged mlp" if merges else "mlp",
        max_outputs=(-(-sizes["image_size"] // (sizes["patch_size"] * factor))) ** 2,
        merge_factor=factor,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        projection_bias=fields.boolean("multimodal_projector_bias", not merges),
        projection_eps=text.positive("rms_norm_eps", 1e-5 if merges else 1e-6),
        has_patch_bias=False,
        positions=None,
        rope_theta=rope.positive("rope_theta", vision.positive("rope_theta", 10_000.0)),
        has_pre_norm=True,
        norm_kind="rms",
        has_gate=True,
        qkv_bias=False,
        product_bias=False,
        tensor_names=_NAMES,
    )


def mistral_large4(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Mistral Large 4, whose tensors may have the names and the order of Mistral's own files."""
    spec = pixtral(fields, vision.with_defaults(**_LARGE4_SIZES), output_size)
    return replace(spec, tensor_names=(_INTERLEAVED, *OWN_NAMES, *_NAMES))


_LARGE4_SIZES: Final = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 30,
    "patch_size": 14,
    "image_size": 1540,
    "hidden_act": "silu",
}
_SIZES: Final = Sizes(1024, 16, 1024, 4096, num_heads=16, num_layers=24, activation="gelu")
_NAMES: Final = (
    (r"vision_projection\.", "multi_modal_projector."),
    (r"(vision_\w+)\.patch_conv\.", r"\1.embeddings.patch_embedding."),
    (r"(vision_\w+)\.ln_pre\.", r"\1.pre_layrnorm."),
    (r"(vision_\w+)\.transformer\.layers\.", r"\1.encoder.layers."),
    (r"(vision_\w+\..*)\.attention\.o_proj\.", r"\1.self_attn.out_proj."),
    (r"(vision_\w+\..*)\.attention\.", r"\1.self_attn."),
    (r"(vision_\w+\..*)\.attention_norm\.", r"\1.layer_norm1."),
    (r"(vision_\w+\..*)\.ffn_norm\.", r"\1.layer_norm2."),
    (r"(vision_\w+\..*)\.feed_forward\.up_proj\.", r"\1.mlp.fc1."),
    (r"(vision_\w+\..*)\.feed_forward\.down_proj\.", r"\1.mlp.fc2."),
    (r"(vision_\w+\..*)\.feed_forward\.", r"\1.mlp."),
)

_INTERLEAVED: Final = (
    r"^vision_encoder\.(.*)\.attention\.w([qk])\.",
    r"vision_tower.\1.self_attn.\2_interleaved.",
)
"""The names of matrices that have the elements of a rotated pair side by side, unlike those of transformers."""

OWN_NAMES: Final = (
    (r"^vision_encoder\.(.*\.attention)\.w([qkvo])\.", r"vision_tower.\1.\2_proj."),
    (r"^vision_encoder\.(.*\.feed_forward)\.w1\.", r"vision_tower.\1.gate_proj."),
    (r"^vision_encoder\.(.*\.feed_forward)\.w2\.", r"vision_tower.\1.down_proj."),
    (r"^vision_encoder\.(.*\.feed_forward)\.w3\.", r"vision_tower.\1.up_proj."),
    (r"^vision_encoder\.", "vision_tower."),
    (r"^vision_language_adapter\.w_in\.", "multi_modal_projector.linear_1."),
    (r"^vision_language_adapter\.w_out\.", "multi_modal_projector.linear_2."),
    (r"^patch_merger\.", "multi_modal_projector.patch_merger."),
    (r"^pre_mm_projector_norm\.", "multi_modal_projector.norm."),
)
"""The names of a tower in Mistral's own files, and those of transformers."""
