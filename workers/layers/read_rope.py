"""Read a `RopeSpec` from a config, in the spelling of transformers 4 or 5."""

import math

from ...protocol.checkpoint.config_fields import ConfigFields
from .rope import (
    COLUMN_AXIS,
    INDEX_AXIS,
    ROW_AXIS,
    TIME_AXIS,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_TRAINED = (
    "rope_theta",
    "partial_rotary_factor",
    "mrope_section",
    "mrope_interleaved",
    "mrope_balanced",
)
_SUPPORTED = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def read_rope(
    fields: ConfigFields, head_dim: int, *, theta: float = 10_000.0, partial: bool = False
) -> RopeSpec:
    """Return the rotary embedding that all layers share.

    `theta` is the family's default base. Only families with `partial` may rotate part of a head. Reads `rope_theta`,
    and `rope_scaling` or else `rope_parameters`.
    """
    parameters = _scaled(fields, fields.section("rope_parameters"))
    return _read(
        fields, parameters, head_dim, fields.positive("rope_theta", theta, above=1), partial
    )


def read_rope_of_layer_type(
    fields: ConfigFields,
    layer_type: str,
    head_dim: int,
    *,
    theta: float,
    theta_field: str = "rope_theta",
    partial: bool = False,
) -> RopeSpec:
    """Return the rotary embedding of one layer type, for families that have several.

    Reads `theta_field`, and `rope_parameters[layer_type]`; for full attention, `rope_scaling` takes precedence. Only
    families with `partial` may rotate part of a head.
    """
    nested = fields.section("rope_parameters")
    parameters = None if nested is None else nested.section(layer_type)
    if parameters is not None:
        # Transformers reads this field only outside of sections.
        parameters = parameters.with_values({"truncate": None})
    if layer_type == "full_attention":
        parameters = _scaled(fields, parameters)
    return _read(
        fields, parameters, head_dim, fields.positive(theta_field, theta, above=1), partial
    )


def _scaled(fields: ConfigFields, parameters: ConfigFields | None) -> ConfigFields | None:
    """Return the scaling. `rope_scaling` overrides `rope_parameters`, because users add it for longer contexts."""
    scaling = fields.section("rope_scaling")
    if scaling is None or not scaling.config:
        return parameters
    if parameters is None:
        return scaling
    # Keep the parameters with which the model was trained.
    kept = {name: parameters.get(name) for name in _TRAINED}
    return scaling.with_defaults(**kept)


def _read(
    fields: ConfigFields,
    parameters: ConfigFields | None,
    head_dim: int,
    theta: float,
    partial: bool,
) -> RopeSpec:
    if parameters is None:
        parameters = ConfigFields({}, fields.path)
    fraction = fields.positive("partial_rotary_factor", 1.0) if partial else 1.0
    if partial:
        fraction = parameters.positive("partial_rotary_factor", fraction)
    divisor = int(head_dim * fraction)
    rotary_dim = divisor + divisor % 2
    if divisor < 2 or rotary_dim > head_dim:
        raise fields.error(
            f"rotary embeddings need an even number of dimensions, at most {head_dim}, but "
            f"partial_rotary_factor {fraction} gives {divisor}"
        )
    scaling = _read_scaling(fields, parameters, rotary_dim)
    if divisor % 2 and isinstance(scaling, YarnScaling):
        raise fields.error(
            f"YaRN needs an even number of dimensions, but partial_rotary_factor {fraction} gives {divisor}"
        )
    return RopeSpec(
        theta=parameters.positive("rope_theta", theta, above=1),
        rotary_dim=rotary_dim,
        scaling=scaling,
        axes=_read_axes(parameters, rotary_dim // 2),
        divisor=None if divisor == rotary_dim else divisor,
    )


def _read_axes(parameters: ConfigFields, num_frequencies: int) -> tuple[int, ...]:
    """Return the axis of each frequency; empty if positions have one dimension.

    The frequencies of an axis are consecutive. If they are interleaved, the axes alternate until one has all of its
    frequencies, and the remaining frequencies belong to time. If they are balanced (openPangu-VL), each frequency
    belongs to the axis that has the smallest part of its own so far and not the one before. Four axes (Hunyuan-OCR) are
    the token's index, the column, the row, and the number of the image.
    """
    counts = parameters.get("mrope_section")
    if counts is None:
        return ()
    if not (
        isinstance(counts, list)
        and len(counts) in (3, 4)
        and all(type(count) is int and count >= 0 for count in counts)
    ):
        raise parameters.wrong("mrope_section", "three or four numbers", counts)
    if not parameters.boolean("mrope_interleaved", False):
        if sum(counts) != num_frequencies:
            raise parameters.wrong(
                "mrope_section", f"numbers whose sum is {num_frequencies}", counts
            )
        axes: tuple[int, ...] = (TIME_AXIS, ROW_AXIS, COLUMN_AXIS)
        if len(counts) == 4:
            axes = (INDEX_AXIS, COLUMN_AXIS, ROW_AXIS, TIME_AXIS)
        return tuple(axis for axis, count in zip(axes, counts, strict=True) for _ in range(count))
    if len(counts) == 4:
        raise parameters.wrong("mrope_section", "three numbers if they are interleaved", counts)
    if parameters.boolean("mrope_balanced", False):
        if sum(counts) != num_frequencies or not all(counts):
            needed = f"positive numbers whose sum is {num_frequencies}"
            raise parameters.wrong("mrope_section", needed, counts)
        return _balanced_axes(counts)
    return tuple(i % 3 if i // 3 < counts[i % 3] else 0 for i in range(num_frequencies))


def _balanced_axes(counts: list[int]) -> tuple[int, ...]:
    """Return the axis of each frequency, of which the last one belongs to time."""
    limits, found = [counts[0] - 1, *counts[1:]], list[int]()
    while len(found) < sum(limits):
        left = [axis for axis in range(3) if found.count(axis) < limits[axis]]
        others = [axis for axis in left if axis not in found[-1:]]
        found.append(min(others or left, key=lambda axis: found.count(axis) / limits[axis]))
    return (*found, TIME_AXIS)


def _read_scaling(
    fields: ConfigFields, parameters: ConfigFields, rotary_dim: int
) -> RopeScaling | None:
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if fields.get("model_type") in ("phi3", "phi3small") and kind in ("su", "yarn"):
        kind = "longrope"
    if kind in ("default", "mrope"):
        return None
    if kind == "linear":
        return LinearScaling(parameters.positive("factor"))
    if kind == "dynamic":
        return DynamicScaling(
            parameters.positive("factor"), fields.integer("max_position_embeddings")
        )
    if kind not in _SUPPORTED:
        raise fields.error(
            f"rope_type {kind!r} is not supported; supported types are {', '.join(_SUPPORTED)}"
        )
    if kind == "proportional":
        fraction = parameters.number("partial_rotary_factor", 1.0)
        if fraction > 1:
            raise fields.error(f"partial_rotary_factor must be at most 1, got {fraction}")
        num_frequencies = int(fraction * rotary_dim // 2)
        return ProportionalScaling(num_frequencies, parameters.positive("factor", 1.0))
    original_length = fields.integer(
        "original_max_position_embeddings",
        parameters.integer(
            "original_max_position_embeddings", fields.integer("max_position_embeddings"), minimum=2
        ),
        minimum=2,
    )
    if kind == "llama3":
        low_freq_factor = parameters.positive("low_freq_factor")
        return Llama3Scaling(
            parameters.positive("factor"),
            low_freq_factor,
            parameters.positive("high_freq_factor", above=low_freq_factor),
            original_length,
        )
    factor = parameters.optional_positive("factor")
    if factor is None:
        factor = fields.integer("max_position_embeddings") / original_length
    attention_factor = parameters.optional_positive("attention_factor")
    if kind == "yarn":
        return YarnScaling(
            factor,
            original_length,
            _yarn_attention_factor(parameters, factor)
            if attention_factor is None
            else attention_factor,
            parameters.positive("beta_fast", 32.0),
            parameters.positive("beta_slow", 1.0),
            parameters.boolean("truncate", True),
        )
    if attention_factor is None:
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_length))
    return LongRopeScaling(
        parameters.positives("short_factor", rotary_dim // 2),
        parameters.positives("long_factor", rotary_dim // 2),
        original_length,
        # Phi-3.5-MoE and Phi-3-small store the factor on cosines and sines.
        parameters.positive("short_mscale", attention_factor),
        parameters.positive("long_mscale", attention_factor),
    )


def _yarn_attention_factor(parameters: ConfigFields, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator = parameters.optional_number("mscale")
    denominator = parameters.optional_number("mscale_all_dim")
    if numerator and denominator:
        return mscale(numerator) / mscale(denominator)
    return mscale(1.0)
