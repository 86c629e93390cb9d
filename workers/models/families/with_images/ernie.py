"""ERNIE 4.5 VL, whose tokens of text and of images have different experts."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.rope import COLUMN_AXIS, ROW_AXIS, TIME_AXIS
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
    """Return the spec of ERNIE 4.5 VL, with a second mixture for the tokens of images.

    Fields may be lists with one value for each mixture.
    """
    values = {name: fields.get(name) for name in _OF_EACH_MIXTURE}
    firsts = {name: x[0] for name, x in values.items() if isinstance(x, list) and x}
    sizes = fields.get("moe_intermediate_size", [1536, 512])
    if not isinstance(sizes, list) or len(sizes) != 2 or type(sizes[1]) is not int or sizes[1] < 1:
        raise fields.wrong("moe_intermediate_size", "the sizes of two mixtures", sizes)
    counts = fields.get("moe_num_experts")
    if isinstance(counts, list) and len(set(counts)) != 1:
        raise fields.wrong("moe_num_experts", "equal numbers", counts)
    counts = [22, 22, 20]
    for name in ("rope_parameters", "rope_scaling"):
        if (section := fields.section(name)) is not None:
            counts = section.get("mrope_section", counts)
            firsts[name] = {key: x for key, x in section.config.items() if key != "mrope_section"}
    firsts["moe_intermediate_size"] = sizes[0]
    spec = ernie4_5_moe(fields.with_values(firsts), second_size=sizes[1])
    axes = _axes(fields, counts, spec.head_dim // 2)
    layers = tuple(
        replace(layer, rope=replace(layer.rope, axes=axes)) if layer.rope is not None else layer
        for layer in spec.layers
    )
    tower = (r".*\b(vision|resampler)_model\..*", "")
    return replace(spec, layers=layers, head_bias=False, tensor_names=(tower, *spec.tensor_names))


def _axes(fields: ConfigFields, counts: Any, num_frequencies: int) -> tuple[int, ...]:
    """Return the axis of each frequency. Rows and columns alternate, and the lowest frequencies belong to time."""
    if (
        not isinstance(counts, list)
        or len(counts) != 3
        or not all(type(count) is int and count >= 0 for count in counts)
        or counts[0] != counts[1]
        or sum(counts) != num_frequencies
    ):
        needed = f"three numbers whose sum is {num_frequencies}, of which the first two are equal"
        raise fields.wrong("mrope_section", needed, counts)
    return (ROW_AXIS, COLUMN_AXIS) * counts[0] + (TIME_AXIS,) * counts[2]


def with_images(spec: ModelSpec, tokens: tuple[int, ...]) -> ModelSpec:
    """Return the spec of a model in which `tokens` choose among the experts of the second mixture."""
    layers = tuple(
        layer
        if layer.experts is None
        else replace(layer, experts=replace(layer.experts, second_tokens=tokens))
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


FAMILIES = (
    Family("Ernie4_5_VLMoeForConditionalGeneration", "ernie4_5_vl_moe", _ernie4_5_vl),
    Family("Ernie4_5_VL_MoeForConditionalGeneration", "ernie4_5_moe_vl", _ernie4_5_vl),
)
