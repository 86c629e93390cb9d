"""ERNIE 4.5 VL, whose text and images have different experts."""

from __future__ import annotations

from dataclasses import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ..common import Family
from ..experts import ernie4_5_moe

_OF_EACH_MIXTURE = (
    "moe_num_experts",
    "moe_intermediate_size",
    "moe_layer_start_index",
    "moe_layer_end_index",
)


def _ernie4_5_vl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text of ERNIE 4.5 VL, whose images have experts of their own.

    All axes of a text token's rotary position are equal. Fields may be lists with one value for each mixture.
    """
    values = {name: fields.get(name) for name in _OF_EACH_MIXTURE}
    firsts = {name: x[0] for name, x in values.items() if isinstance(x, list) and x}
    for name in ("rope_parameters", "rope_scaling"):
        if (section := fields.section(name)) is not None:
            firsts[name] = {key: x for key, x in section.config.items() if key != "mrope_section"}
    spec = ernie4_5_moe(fields.with_values(firsts), has_second_mixture=True)
    tower = (r".*\b(vision|resampler)_model\..*", "")
    return replace(spec, head_bias=False, tensor_names=(tower, *spec.tensor_names))


FAMILIES = (
    Family("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", _ernie4_5_vl),
    Family("Ernie4_5_VL_MoeForConditionalGeneration", "ernie4_5_moe_vl", _ernie4_5_vl),
)
