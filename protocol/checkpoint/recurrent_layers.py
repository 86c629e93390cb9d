"""Layers with a recurrent state: their sizes, read from a checkpoint's config without torch.

Such a layer reads a state of fixed size instead of keys and values. The state has a recurrent part in float32, and the
layer's inputs of the last few tokens in the dtype of the model.

A layer is computed in segments of tokens at fixed positions, `SEGMENT` tokens if it has a recurrence. The recurrent
part is the state at the start of the last segment. The inputs are those since then, and before it as many as the
convolution reads. So a token is always computed by the same operations, however a prompt is divided into steps.

Of such a state, only the first inputs are read by a token that comes before its end in the segment. So a step can end
with tokens that may be rejected, if they do not complete a segment (`KVCacheGroup.limit_drafts`). Nothing has to be
undone when they are: the next step reads the same state, and overwrites their inputs. Code that computes a layer must
therefore read the inputs of a state by position, up to the first token of the step, and not by their number.
"""

from __future__ import annotations

from typing import Final, Self, TypeAlias

import msgspec

from .config_fields import ConfigFields

SEGMENT: Final = 16
"""Tokens of a segment."""


class StateSize(msgspec.Struct, frozen=True):
    """The state of one layer in one worker: `num_recurrent` numbers, and `num_inputs` inputs of `channels` numbers."""

    num_recurrent: int
    num_inputs: int
    channels: int

    def num_bytes(self, input_bytes: int) -> int:
        """Return the bytes of the state, if a number of an input has `input_bytes`."""
        return 4 * self.num_recurrent + self.num_inputs * self.channels * input_bytes


class ShortConvolution(msgspec.Struct, frozen=True, tag=True):
    """A gated short convolution (LFM2)."""

    channels: int
    kernel: int
    has_bias: bool = False

    @property
    def segment(self) -> int:
        """Tokens of a segment.

        There is no recurrent part, so the length matters for drafts only. The inputs of a longer one would make blocks
        large.
        """
        return 8

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.channels

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        return StateSize(0, self.segment - 1 + self.kernel - 1, self.channels // ranks)


class Mamba2(msgspec.Struct, frozen=True, tag=True):
    """A Mamba-2 layer (Dao and Gu, 2024, arXiv 2405.21060).

    Groups of heads share B and C of `state_size_per_head` elements. The output is normed in `norm_groups` groups after
    the gate is applied, or not at all if that is 0. The size of a step is limited to `min_step` .. `max_step`.
    `multipliers` are factors on the projections to the gate, x, B, C and the step.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_size_per_head: int
    kernel: int
    conv_bias: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    norm_groups: int = 1
    gates_before_norm: bool = True
    min_step: float = 0.0
    max_step: float = float("inf")
    multipliers: tuple[float, ...] = ()

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_heads if self.num_groups == 1 else self.num_groups

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads = self.num_heads // ranks
        groups = max(1, self.num_groups // ranks)
        return StateSize(
            heads * self.head_dim * self.state_size_per_head,
            SEGMENT - 1 + self.kernel - 1,
            heads * self.head_dim + 2 * groups * self.state_size_per_head + heads,
        )


class GatedDeltaNet(msgspec.Struct, frozen=True, tag=True):
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464).

    Several value heads share one key head. Keys have `key_dim` elements and values `value_dim`. `is_interleaved` says
    that the projections to queries, keys, values and gates are stored key head by key head, and `has_interleaved_steps`
    that those to strengths and steps are. With `has_tiled_heads` value head i shares key head i modulo their number,
    otherwise value heads that follow each other share one.
    """

    num_key_heads: int
    num_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    has_negative_eigenvalues: bool = False
    is_interleaved: bool = False
    has_interleaved_steps: bool = False
    has_tiled_heads: bool = False
    norm_eps: float | None = None

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_key_heads

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads, key_heads = self.num_heads // ranks, max(1, self.num_key_heads // ranks)
        return StateSize(
            heads * self.key_dim * self.value_dim,
            SEGMENT - 1 + self.kernel - 1,
            2 * key_heads * self.key_dim + heads * self.value_dim + 2 * heads,
        )


class KimiDeltaAttention(msgspec.Struct, frozen=True, tag=True):
    """Kimi delta attention (Kimi Linear, 2025, arXiv 2510.26692): a delta rule with a decay per key element.

    Keys and values of a head have `head_dim` elements.
    """

    num_heads: int
    head_dim: int
    kernel: int

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return SEGMENT

    @property
    def num_units(self) -> int:
        """The number of parts that ranks can divide equally."""
        return self.num_heads

    def state_size(self, ranks: int) -> StateSize:
        """Return the size of the state in one of `ranks` workers."""
        heads = self.num_heads // ranks
        return StateSize(
            heads * self.head_dim**2,
            SEGMENT - 1 + self.kernel - 1,
            heads * (4 * self.head_dim + 1),
        )


RecurrentLayer: TypeAlias = ShortConvolution | Mamba2 | GatedDeltaNet | KimiDeltaAttention


def read_recurrent_layer(fields: ConfigFields) -> RecurrentLayer | None:
    """Return the recurrent layers of a model, which are all alike; None if it has none.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    match fields.text("model_type", ""):
        case "lfm2" | "lfm2_moe":
            return ShortConvolution(
                fields.integer("hidden_size"),
                fields.integer("conv_L_cache", 3),
                fields.boolean("conv_bias", False),
            )
        case "granitemoehybrid" | "bamba":
            _require_silu(fields)
            return _read_mamba2(fields)
        case "falcon_h1":
            _require_silu(fields)
            return _read_falcon_h1(fields)
        case "nemotron_h":
            _require_silu(fields, "mamba_hidden_act")
            return _read_nemotron_h(fields)
        case (
            "qwen3_5"
            | "qwen3_5_text"
            | "qwen3_5_moe"
            | "qwen3_5_moe_text"
            | "qwen3_next"
            | "olmo_hybrid"
        ):
            _require_silu(fields)
            return _read_gated_delta_net(fields)
        case "kimi_linear":
            return _read_kimi_delta_attention(fields)
    return None


def _require_silu(fields: ConfigFields, name: str = "hidden_act") -> None:
    """Check the activation of the convolution and of the gate.

    Raises:
        CheckpointError: It is another one.
    """
    activation = fields.text(name, "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"{name} {activation!r} is not supported in recurrent layers; use silu")


def _read_mamba2(fields: ConfigFields) -> Mamba2:
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
            f"mamba_n_heads {num_heads} x mamba_d_head {head_dim} must be the inner size of {size}, and mamba_n_groups "
            f"{num_groups} must divide mamba_n_heads"
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


def read_factors(fields: ConfigFields, name: str, count: int) -> list[float]:
    """Return a field with `count` numbers, by default ones.

    Raises:
        CheckpointError: The field is something else.
    """
    factors = fields.get(name, [1.0] * count)
    is_list = isinstance(factors, list | tuple) and len(factors) == count
    if not is_list or not all(type(each) in (int, float) for each in factors):
        raise fields.wrong(name, f"a list of {count} numbers", factors)
    return [float(each) for each in factors]


def _read_falcon_h1(fields: ConfigFields) -> Mamba2:
    layer = _read_mamba2(fields)
    factor, factors = (
        fields.positive("ssm_in_multiplier", 1.0),
        read_factors(fields, "ssm_multipliers", 5),
    )
    if layer.projection_bias and factor != 1.0:
        raise fields.error("mamba_proj_bias with an ssm_in_multiplier is not supported")
    return msgspec.structs.replace(
        layer,
        output_bias=fields.boolean("projectors_bias", False),
        norm_groups=layer.num_groups if fields.boolean("mamba_rms_norm", False) else 0,
        gates_before_norm=not fields.boolean("mamba_norm_before_gate", True),
        multipliers=tuple(factor * each for each in factors),
    )


def _read_nemotron_h(fields: ConfigFields) -> Mamba2:
    num_heads, num_groups = fields.integer("mamba_num_heads", 128), fields.integer("n_groups", 8)
    if num_heads % num_groups:
        raise fields.error(f"n_groups {num_groups} must divide mamba_num_heads {num_heads}")
    has_bias = fields.boolean("use_bias", False)
    return Mamba2(
        num_heads,
        fields.integer("mamba_head_dim", 64),
        num_groups,
        fields.integer("ssm_state_size", 128),
        fields.integer("conv_kernel", 4),
        conv_bias=fields.boolean("use_conv_bias", True),
        projection_bias=has_bias,
        output_bias=has_bias,
        norm_groups=num_groups,
        min_step=fields.number("time_step_min", 0.001),
    )


def _read_gated_delta_net(fields: ConfigFields) -> GatedDeltaNet:
    if fields.text("model_type") == "olmo_hybrid":
        fields = _olmo_hybrid_with_defaults(fields)
    num_key_heads = fields.integer("linear_num_key_heads", 16)
    num_heads = fields.integer("linear_num_value_heads", 32)
    if num_heads % num_key_heads:
        raise fields.error(
            f"linear_num_value_heads {num_heads} must be a multiple of linear_num_key_heads {num_key_heads}"
        )
    is_interleaved = fields.text("model_type") == "qwen3_next"
    return GatedDeltaNet(
        num_key_heads,
        num_heads,
        fields.integer("linear_key_head_dim", 128),
        fields.integer("linear_value_head_dim", 128),
        fields.integer("linear_conv_kernel_dim", 4),
        has_negative_eigenvalues=fields.boolean("linear_allow_neg_eigval", False),
        is_interleaved=is_interleaved and not fields.boolean("linear_has_split_projections", False),
        has_interleaved_steps=is_interleaved,
        has_tiled_heads=fields.boolean("linear_has_tiled_heads", False),
        norm_eps=fields.optional_positive("linear_norm_eps"),
    )


def _read_kimi_delta_attention(fields: ConfigFields) -> KimiDeltaAttention:
    own = fields.section("linear_attn_config")
    if own is None:
        return KimiDeltaAttention(
            fields.integer("linear_num_heads", 32),
            fields.integer("linear_head_dim", 128),
            fields.integer("linear_conv_kernel_dim", 4),
        )
    return KimiDeltaAttention(
        own.integer("num_heads", 32),
        own.integer("head_dim", 128),
        own.integer("short_conv_kernel_size", 4),
    )


def _olmo_hybrid_with_defaults(fields: ConfigFields) -> ConfigFields:
    num_heads = fields.integer("num_attention_heads")
    num_key_heads = fields.integer("linear_num_key_heads", num_heads)
    key_dim = fields.integer(
        "linear_key_head_dim", 3 * fields.integer("hidden_size") // (4 * num_key_heads)
    )
    return fields.with_values(
        {
            "linear_num_key_heads": num_key_heads,
            "linear_num_value_heads": fields.integer("linear_num_value_heads", num_heads),
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": fields.integer("linear_value_head_dim", 2 * key_dim),
            "linear_allow_neg_eigval": fields.boolean("linear_allow_neg_eigval", True),
            "linear_norm_eps": 1e-5,
        }
    )


class RecurrentModel(msgspec.Struct, frozen=True):
    """The recurrent layers of a model, and the key/value heads of its other layers.

    With `values_are_keys` (latent attention) the cache has no values.
    """

    layer: RecurrentLayer
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool = False

    @classmethod
    def read(cls, fields: ConfigFields) -> Self | None:
        """Return the layers that a config describes; None if it has no recurrent ones.

        Raises:
            CheckpointError: A field is missing or invalid.
        """
        layer = read_recurrent_layer(fields)
        if layer is None:
            return None
        if isinstance(layer, KimiDeltaAttention):
            size = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
            return cls(layer, 1, size, values_are_keys=True)
        num_heads = fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
        return cls(layer, fields.integer("num_key_value_heads", num_heads), head_dim)

    def smallest_block_size(self, ranks: int, input_bytes: int, kv_bytes: int) -> int:
        """Return the fewest tokens whose keys and values take as much memory as a state.

        Args:
            ranks: The tensor-parallel size.
            input_bytes: Bytes of a number of the model's dtype.
            kv_bytes: Bytes of a number in the KV cache.
        """
        parts = 1 if self.values_are_keys else 2
        token_bytes = parts * max(1, self.num_kv_heads // ranks) * self.head_dim * kv_bytes
        return -(-self.layer.state_size(ranks).num_bytes(input_bytes) // token_bytes)
