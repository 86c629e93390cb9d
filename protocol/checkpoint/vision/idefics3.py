"""Read the vision towers of Idefics3 and SmolVLM."""

from __future__ import annotations

from ..config_fields import ConfigFields
from .fields import check_factor, head_count, image_and_patch_size
from .spec import VisionSpec


def idefics3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Idefics3 or SmolVLM."""
    image_size, patch_size = image_and_patch_size(vision, 224, 32)
    factor = fields.integer("scale_factor", 2, maximum=64)
    check_factor(fields, "scale_factor", factor, image_size // patch_size)
    return VisionSpec(
        image_size=image_size,
        patch_size=patch_size,
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_heads=head_count(vision, 1152, 16),
        feature_layers=(
            vision.with_defaults(num_hidden_layers=12).layer_count("num_hidden_layers"),
        ),
        activation=vision.text("hidden_act", "gelu_pytorch_tanh"),
        norm_eps=vision.positive("layer_norm_eps", 1e-6),
        output_size=output_size,
        projection="matrix",
        merge_factor=factor,
        projection_bias=False,
        has_post_norm=True,
    )
