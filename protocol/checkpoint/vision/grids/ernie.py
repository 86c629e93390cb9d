"""Read the vision tower of ERNIE 4.5 VL."""

from __future__ import annotations

from typing import Final

from ...config_fields import ConfigFields
from ..grid import GridVisionSpec, grid_sizes


def ernie4_5_vl(fields: ConfigFields, vision: ConfigFields, output_size: int) -> GridVisionSpec:
    """Return the tower of ERNIE 4.5 VL for images. Videos are not supported."""
    sizes = grid_sizes(
        vision.with_values({"temporal_patch_size": 1}), vision.integer("hidden_size", 1280), 14
    )
    for name in ("temporal_merge_size", "temporal_conv_size"):
        if fields.integer(name, vision.integer(name, 2)) != 2:
            raise vision.wrong(name, "2", vision.get(name))
    inner = int(sizes["hidden_size"] * vision.positive("mlp_ratio", 4.0))
    text = fields.section("text_config") or fields
    fields = fields.with_defaults(image_token_id=fields.get("im_patch_id", 100_295))
    norm_eps = vision.positive("rms_norm_eps", 1e-6)
    return GridVisionSpec(
        **sizes,
        intermediate_size=vision.integer("intermediate_size", inner),
        activation=vision.text("hidden_act", "quick_gelu"),
        output_size=output_size,
        norm_eps=norm_eps,
        patch_layout="channels",
        has_final_norm=True,
        merges_frames=True,
        merger_eps=text.positive("rms_norm_eps", 1e-5),
        expert_tokens=(
            fields.integer("image_token_id", minimum=0),
            *(
                fields.integer(f"{name}_token_id", default, minimum=0)
                for name, default in _MARKS.items()
            ),
        ),
        tensor_names=_NAMES,
    )


_MARKS: Final = {
    "image_start": 101_304,
    "image_end": 101_305,
    "video": 103_367,
    "video_start": 101_306,
    "video_end": 101_307,
}
"""The tokens around images and of videos, by their fields. The config that was first published has none of them."""
_NAMES: Final = (
    (r"(model\.)?vision_(model|tower)\.ln\.", "visual.final_norm."),
    (r"(model\.)?vision_(model|tower)\.", "visual."),
    (r"(model\.)?resampler_model\.", "visual.merger."),
    (r"(visual\.merger\.\w+_linear)\.0\.", r"\1.fc1."),
    (r"(visual\.merger\.\w+_linear)\.2\.", r"\1.fc2."),
    (r"(visual\.merger\.\w+_linear)\.3\.", r"\1.norm."),
)
