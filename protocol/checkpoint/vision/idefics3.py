"""Read the vision towers of Idefics 2 and 3, SmolVLM and ModernVBERT."""

from __future__ import annotations

from typing import Final

from ..config_fields import ConfigFields
from .fields import Sizes, check_factor, read_sizes
from .gemma import SIGLIP_SIZES, siglip
from .spec import PerceiverSpec, VisionSpec

SIZES: Final = Sizes(224, 32, 1152, 3072, num_heads=16, num_layers=12)
_MODERNVBERT_NAMES: Final = (
    (r"\.modality_projection\.weight$", ".modality_projection.proj.weight"),
)


def idefics3(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Idefics3 or SmolVLM."""
    factor = fields.integer("scale_factor", 2, maximum=64)
    return _read(fields.with_values({"scale_factor": factor}), vision, output_size, SIZES)


def idefics2(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Idefics2, whose patches are read by learned queries."""
    text, perceiver = fields.first_section("text_config"), fields.first_section("perceiver_config")
    num_heads = perceiver.integer("resampler_n_heads", 16)
    # A perceiver of another size has the epsilon of the decoder, as in transformers.
    eps = perceiver.positive("rms_norm_eps", 1e-6)
    if perceiver.integer("hidden_size", 4096) != output_size:
        eps = text.positive("rms_norm_eps", 1e-5)
    return siglip(
        vision.with_defaults(patch_size=SIZES.patch_size),
        output_size,
        projection="perceiver",
        max_outputs=perceiver.integer("resampler_n_latents", 64, maximum=4096),
        positions="inverse",
        projection_eps=eps,
        perceiver=PerceiverSpec(
            inner_size=text.integer("intermediate_size", 14336),
            inner_activation=text.text("hidden_act", "silu"),
            num_layers=perceiver.with_defaults(resampler_depth=3).layer_count("resampler_depth"),
            num_heads=num_heads,
            num_kv_heads=perceiver.divisor("num_key_value_heads", num_heads, 4),
            head_dim=perceiver.integer("resampler_head_dim", 96),
            activation=perceiver.text("hidden_act", "silu"),
        ),
    )


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
