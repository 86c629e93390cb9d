"""Read the vision towers of Idefics3 and SmolVLM."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import Sizes, check_factor, read_sizes
from .spec import VisionSpec

SIZES: Final = Sizes(224, 32, 1152, 3072, num_heads=16, num_layers=12)


def idefics3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Idefics3 or SmolVLM."""
    sizes = read_sizes(vision, SIZES)
    factor = fields.integer("scale_factor", 2, maximum=64)
    check_factor(fields, "scale_factor", factor, sizes["image_size"] // sizes["patch_size"])
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="matrix",
        merge_factor=factor,
        projection_bias=False,
        has_post_norm=True,
    )
