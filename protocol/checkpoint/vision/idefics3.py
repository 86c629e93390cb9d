"""Read the vision towers of Idefics3, SmolVLM and ModernVBERT."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import Sizes, check_factor, read_sizes
from .gemma import SIGLIP_SIZES
from .spec import VisionSpec

SIZES: Final = Sizes(224, 32, 1152, 3072, num_heads=16, num_layers=12)
_MODERNVBERT_NAMES: Final = (
    (r"\.modality_projection\.weight$", ".modality_projection.proj.weight"),
)


def idefics3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Idefics3 or SmolVLM."""
    factor = fields.integer("scale_factor", 2, maximum=64)
    return _read(fields.with_values({"scale_factor": factor}), vision, output_size, SIZES)


def modernvbert(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of ModernVBERT (arXiv 2510.01149), which is SigLIP's."""
    factor = fields.integer("pixel_shuffle_factor", 4, maximum=64)
    fields = fields.with_values({"scale_factor": factor})
    return _read(fields, vision, output_size, SIGLIP_SIZES, _MODERNVBERT_NAMES)


def _read(
    fields: ConfigFields,
    vision: ConfigFields,
    output_size: int,
    default: Sizes,
    tensor_names: tuple[tuple[str, str], ...] = (),
) -> VisionSpec:
    sizes = read_sizes(vision, default)
    factor = fields.integer("scale_factor")
    check_factor(fields, "scale_factor", factor, sizes["image_size"] // sizes["patch_size"])
    return VisionSpec(
        **sizes,
        output_size=output_size,
        projection="matrix",
        merge_factor=factor,
        projection_bias=False,
        has_post_norm=True,
        tensor_names=tensor_names,
    )
