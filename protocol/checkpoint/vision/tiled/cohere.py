"""Read the vision towers of Aya Vision and Command A Vision."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from ...config_fields import ConfigFields
from ..fields import check_factor
from ..gemma import siglip
from ..llava import llava
from ..spec import VisionSpec


def aya_vision(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Aya Vision (arXiv 2505.08751)."""
    fields = fields.with_defaults(vision_feature_layer=-1, vision_feature_select_strategy="full")
    defaults = vision.with_defaults(model_type="siglip_vision_model")
    spec = llava(fields, defaults, output_size)
    return replace(
        spec,
        **_gated_mlp(fields, spec, fields.integer("alignment_intermediate_size", output_size)),
        has_projection_norm=True,
        projection_eps=fields.positive("adapter_layer_norm_eps", 1e-6),
        tensor_names=(
            (r"multi_modal_projector\.layernorm\.", "multi_modal_projector.layer_norm."),
        ),
    )


def cohere2_vision(fields: ConfigFields, vision: ConfigFields, output_size: int) -> VisionSpec:
    """Return the tower of Command A Vision, which norms the output of its last layer."""
    spec = siglip(vision, output_size, projection="gated mlp")
    inner = fields.integer("alignment_intermediate_size", 36864)
    return replace(spec, **_gated_mlp(fields, spec, inner))


def _gated_mlp(fields: ConfigFields, spec: VisionSpec, inner: int) -> dict[str, Any]:
    factor = fields.integer("downsample_factor", 2)
    check_factor(fields, "downsample_factor", factor, spec.image_size // spec.patch_size)
    if inner % 2:
        raise fields.wrong("alignment_intermediate_size", "an even number", inner)
    return {"projection": "gated mlp", "merge_factor": factor, "adapter_size": inner // 2}
