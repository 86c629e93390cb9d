"""Read the sizes of Mamba and Mamba-2 layers from configs."""

from __future__ import annotations

import math

import msgspec

from ..config_fields import ConfigFields
from ..recurrent_layers import Mamba1, Mamba2


def read_mamba1(fields: ConfigFields) -> Mamba1:
    """Return the sizes of the Mamba layers of Mamba, Falcon-Mamba, Jamba, Phi-4-mini-Flash or Zamba."""
    kind, hidden_size = fields.text("model_type"), fields.integer("hidden_size")
    prefix = "mamba_" if kind in ("jamba", "phi4flash", "zamba") else ""
    rank = fields.get("mamba_dt_rank" if prefix else "time_step_rank", "auto")
    norm_eps = {"jamba": ("rms_norm_eps", 1e-6), "falcon_mamba": ("mixer_rms_eps", 1e-6)}.get(kind)
    if prefix:
        fields = fields.with_values(
            {
                "state_size": fields.integer("mamba_d_state", 16),
                "conv_kernel": fields.integer("mamba_d_conv", 4),
                "intermediate_size": fields.integer("mamba_expand", 2) * hidden_size,
                "use_conv_bias": fields.boolean("mamba_conv_bias", True),
                "use_bias": fields.boolean("mamba_proj_bias", False),
                "time_step_rank": rank,
            }
        )
    channels = fields.integer("intermediate_size", fields.integer("expand", 2) * hidden_size)
    num_heads = fields.integer("n_mamba_heads", 2) if kind == "zamba" else 1
    if channels % num_heads:
        raise fields.error(f"n_mamba_heads {num_heads} must divide {channels} channels")
    return Mamba1(
        channels,
        fields.integer("state_size", 16),
        -(-hidden_size // 16) if rank == "auto" else fields.integer("time_step_rank"),
        fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        has_bias=fields.boolean("use_bias", False),
        norm_eps=None if norm_eps is None else fields.number(*norm_eps),
        has_norm_weights=kind == "jamba",
        num_heads=num_heads,
    )


def read_plamo2(fields: ConfigFields) -> Mamba1:
    """Return the sizes of the Mamba layers of PLaMo 2, in which the channels of a head have equal steps and decays."""
    num_heads, size = fields.integer("mamba_num_heads", 64), fields.integer("head_dim", 128)
    return Mamba1(
        num_heads * size,
        fields.integer("mamba_d_state", 64),
        max(64, fields.integer("hidden_size") // 16),
        fields.integer("mamba_d_conv", 4),
        conv_bias=False,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        has_norm_weights=True,
        head_dim=size,
    )


def read_pure_mamba2(fields: ConfigFields) -> Mamba2:
    """Return the sizes of the layers of a Mamba-2 without attention."""
    num_heads, num_groups = fields.integer("num_heads", 128), fields.integer("n_groups", 8)
    if num_heads % num_groups:
        raise fields.error(f"n_groups {num_groups} must divide the {num_heads} heads")
    has_bias = fields.boolean("use_bias", False)
    least, most = _step_limits(fields)
    return Mamba2(
        num_heads,
        fields.integer("head_dim", 64),
        num_groups,
        fields.integer("state_size", 128),
        fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        projection_bias=has_bias,
        output_bias=has_bias,
        norm_groups=num_groups,
        min_step=least,
        max_step=most,
    )


def _step_limits(fields: ConfigFields) -> tuple[float, float]:
    limits = fields.get("time_step_limit", [0.0, math.inf])
    if not isinstance(limits, list | tuple) or len(limits) != 2:
        raise fields.wrong("time_step_limit", "a list of 2 numbers", limits)
    # transformers writes infinity as an object.
    least, most = (math.inf if isinstance(each, dict) else each for each in limits)
    if not all(type(each) in (int, float) for each in (least, most)):
        raise fields.wrong("time_step_limit", "a list of 2 numbers", limits)
    return float(least), float(most)


def read_mamba2(fields: ConfigFields) -> Mamba2:
    """Return the sizes of the Mamba-2 layers of Bamba or Granite 4."""
    num_heads, num_groups = (
        fields.integer("mamba_n_heads", 128),
        fields.integer("mamba_n_groups", 1),
    )
    size = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    size = fields.integer("mamba_d_ssm", size)
    head_dim = size // num_heads
    if fields.get("mamba_d_head", "auto") != "auto":
        head_dim = fields.integer("mamba_d_head")
    if head_dim * num_heads != size or num_heads % num_groups:
        raise fields.error(
            f"mamba_n_heads {num_heads} x mamba_d_head {head_dim} must equal the inner size {size}, and "
            f"mamba_n_groups {num_groups} must divide mamba_n_heads"
        )
    return Mamba2(
        num_heads,
        head_dim,
        num_groups,
        fields.integer("mamba_d_state", 256),
        fields.integer("mamba_d_conv", 4),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        projection_bias=fields.boolean("mamba_proj_bias", False),
        output_bias=fields.boolean("mamba_proj_bias", False),
        norm_groups=num_groups,
    )


def read_zamba2(fields: ConfigFields) -> Mamba2:
    """Return the sizes of the Mamba-2 layers of Zamba2."""
    # The convolution has a bias whatever `use_conv_bias` says.
    has_bias = fields.boolean("add_bias_linear", False)
    layer = read_mamba2(
        fields.with_values(
            {
                "mamba_n_heads": fields.integer("n_mamba_heads", 8),
                "mamba_n_groups": fields.integer("mamba_ngroups", 1),
                "mamba_d_state": fields.integer("mamba_d_state", 64),
                "mamba_proj_bias": has_bias,
            }
        )
    )
    return msgspec.structs.replace(
        layer, min_step=fields.number("time_step_min", 0.001), norm_eps=1e-5
    )


def read_factors(fields: ConfigFields, name: str, count: int) -> list[float]:
    """Return a field with `count` numbers. The default is ones.

    Raises:
        CheckpointError: The field has another length or type.
    """
    factors = fields.get(name, [1.0] * count)
    is_list = isinstance(factors, list | tuple) and len(factors) == count
    if not is_list or not all(type(each) in (int, float) for each in factors):
        raise fields.wrong(name, f"a list of {count} numbers", factors)
    return [float(each) for each in factors]


def read_falcon_h1(fields: ConfigFields) -> Mamba2:
    """Return the sizes of the Mamba-2 layers of Falcon-H1, which have factors on their projections."""
    layer = read_mamba2(fields)
    factor, factors = (
        fields.positive("ssm_in_multiplier", 1.0),
        read_factors(fields, "ssm_multipliers", 5),
    )
    if layer.projection_bias and factor != 1.0:
        raise fields.error(
            "mamba_proj_bias with an ssm_in_multiplier is not supported; use a model without one of them"
        )
    return msgspec.structs.replace(
        layer,
        output_bias=fields.boolean("projectors_bias", False),
        norm_groups=layer.num_groups if fields.boolean("mamba_rms_norm", False) else 0,
        gates_before_norm=not fields.boolean("mamba_norm_before_gate", True),
        multipliers=tuple(factor * each for each in factors),
    )


def read_nemotron_h(fields: ConfigFields) -> Mamba2:
    """Return the sizes of the Mamba-2 layers of Nemotron-H."""
    own = {
        "num_heads": fields.integer("mamba_num_heads", 128),
        "head_dim": fields.integer("mamba_head_dim", 64),
        "state_size": fields.integer("ssm_state_size", 128),
        "time_step_limit": [fields.number("time_step_min", 0.001), math.inf],
    }
    return read_pure_mamba2(fields.with_values(own))
