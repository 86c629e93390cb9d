"""Read the vision tower of Llama 4."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import check_factor, head_count, image_and_patch_size
from .spec import VisionSpec


def llama4(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Llama 4, which reads each tile of a grid as an image."""
    image_size, patch_size = image_and_patch_size(vision, 448, 14)
    ratio = vision.positive("pixel_shuffle_ratio", 0.5)
    factor = round(1 / ratio)
    if factor * ratio != 1:
        raise vision.wrong("pixel_shuffle_ratio", "one divided by a whole number", ratio)
    check_factor(vision, "pixel_shuffle_ratio", factor, image_size // patch_size)
    size = vision.integer("hidden_size", 768)
    merged = vision.integer("intermediate_size", 5632)
    if merged != size * factor**2:
        # Llama 4's config uses this name for the size of merged patches, which the projection reads.
        raise vision.wrong("intermediate_size", f"{size * factor**2}", merged)
    adapter = vision.integer("projector_output_dim", 4096)
    for name in ("projector_input_dim", "vision_output_dim"):
        if vision.integer(name, adapter) != adapter:
            raise vision.wrong(name, f"{adapter}, which is projector_output_dim", vision.get(name))
    rope = vision.first_section("rope_parameters")
    num_layers = vision.with_defaults(num_hidden_layers=34).layer_count("num_hidden_layers")
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=size,
        intermediate_size=merged,
        num_heads=head_count(vision, 768, 16),
        feature_layers=(num_layers,),
        activation="gelu",
        norm_eps=1e-5,
        output_size=output_size,
        projection="adapter",
        merge_factor=factor,
        adapter_size=adapter,
        has_class_token=True,
        has_class_last=True,
        has_patch_bias=False,
        has_flat_patches=True,
        rope_theta=rope.positive("rope_theta", vision.positive("rope_theta", 10_000.0)),
        rotary="pairs",
        has_pre_norm=True,
        has_post_norm=True,
        normalizes_in_bfloat16=True,
        tensor_names=_NAMES,
    )


_NAMES: Final = (
    (r"vision_model\.patch_embedding\.linear\.", "vision_model.embeddings.patch_embedding."),
    (r"vision_model\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (
        r"vision_model\.positional_embedding_vlm$",
        "vision_model.embeddings.position_embedding.weight",
    ),
    (r"vision_model\.layernorm_pre\.", "vision_model.pre_layrnorm."),
    (r"vision_model\.layernorm_post\.", "vision_model.post_layernorm."),
    (r"vision_model\.model\.layers\.", "vision_model.encoder.layers."),
    (r"(vision_model\..*)\.self_attn\.o_proj\.", r"\1.self_attn.out_proj."),
    (r"(vision_model\..*)\.input_layernorm\.", r"\1.layer_norm1."),
    (r"(vision_model\..*)\.post_attention_layernorm\.", r"\1.layer_norm2."),
    (r"vision_model\.vision_adapter\.mlp\.", "multi_modal_projector."),
)
