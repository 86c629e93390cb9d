"""Read the recurrent layers of a model from its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self, TypeAlias

import msgspec

from .config_fields import ConfigFields
from .lightning_config import (
    LING_2_5,
    read_lightning_attention,
    read_minicpm_lightning,
    read_rotated_lightning,
)
from .recurrent_layers import (
    ConvolvedAttention,
    GatedDeltaNet,
    HeadConvolutions,
    InnerConvolutions,
    KimiDeltaAttention,
    LightningAttention,
    NgramConvolution,
    RecurrentLayer,
    ShortConvolution,
    nominal_heads,
)
from .rwkv_config import READERS as RWKV_READERS
from .state_spaces.jet import read_jet_block
from .state_spaces.mamba import (
    read_falcon_h1,
    read_mamba1,
    read_mamba2,
    read_nemotron_h,
    read_plamo2,
    read_pure_mamba2,
    read_zamba2,
)
from .state_spaces.rg_lru import RgLru
from .state_spaces.rwkv4 import read_rwkv4
from .state_spaces.xlstm import read_xlstm

_Reader: TypeAlias = Callable[[ConfigFields], RecurrentLayer]

DEFAULT_LENGTH: Final = 8192
"""Context length of models without a limit whose config does not set one. Most do not."""


def read_recurrent_layer(fields: ConfigFields) -> RecurrentLayer | None:
    """Return the sizes of a model's recurrent layers, which are all alike, or None if it has none.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    read = _READERS.get(fields.text("model_type", ""))
    layer = None if read is None else read(fields)
    if isinstance(layer, ShortConvolution) and fields.get("is_causal") is False:
        # An encoder reads a text as a whole, so its convolutions have no state.
        return None
    return layer


def _read_short_convolution(fields: ConfigFields) -> ShortConvolution:
    return ShortConvolution(
        fields.integer("hidden_size"),
        fields.integer("conv_L_cache", 7 if fields.get("model_type") == "lfm3" else 3),
        fields.boolean("conv_bias", False),
    )


def _read_ling_hybrid(fields: ConfigFields) -> LightningAttention | KimiDeltaAttention:
    """Return the recurrent layer of Ling 2.5 or Ling 3, which have the same model type."""
    if LING_2_5 in fields.texts("architectures"):
        return read_rotated_lightning(fields)
    return _read_ling3(fields)


def _read_larger(fields: ConfigFields) -> InnerConvolutions:
    """Return the larger of the convolutions in an Inkling's layers. The state of each layer fits into its block."""
    is_second = fields.text("model_type").startswith("inkling2")
    read = read_scaled_convolutions if is_second else read_inner_convolutions
    both = [read(fields, is_local=is_local) for is_local in (False, True)]
    return max(both, key=lambda each: each.num_kv_heads * each.head_dim)


def read_inner_convolutions(fields: ConfigFields, *, is_local: bool) -> InnerConvolutions:
    """Return the convolutions in an Inkling layer, with or without a window. Those of layers with one are larger."""
    prefix = "swa_" if is_local else ""
    return InnerConvolutions(
        fields.integer(f"{prefix}num_key_value_heads", 16 if is_local else 8),
        fields.integer(f"{prefix}head_dim", 128),
        fields.integer("hidden_size"),
        fields.integer("conv_kernel_size", fields.integer("sconv_kernel_size", 4)),
    )


def read_scaled_convolutions(fields: ConfigFields, *, is_local: bool) -> InnerConvolutions:
    """Return the convolutions in a layer of Inkling 2, with or without a window."""
    fields = fields.with_defaults(swa_num_key_value_heads=8)
    layer = read_inner_convolutions(fields, is_local=is_local)
    return msgspec.structs.replace(layer, is_scaled=True, is_dynamic=not is_local)


def read_head_convolutions(fields: ConfigFields) -> HeadConvolutions:
    """Return the convolutions of ZAYA1, of which one follows another."""
    return HeadConvolutions(
        fields.integer("num_key_value_heads", 2),
        fields.integer("head_dim", 128),
        fields.integer("num_attention_heads", 8),
        fields.integer("cca_time0", 2),
        fields.integer("cca_time1", 2, minimum=2),
    )


def _with_silu(read: _Reader, name: str = "hidden_act", others: tuple[str, ...] = ()) -> _Reader:
    """Return `read` for models whose field `name` must be SiLU, because convolutions and gates use that."""

    def read_checked(fields: ConfigFields) -> RecurrentLayer:
        activation = fields.text(name, "silu")
        if activation not in ("silu", "swish", *others):
            raise fields.error(
                f"{name} {activation!r} is not supported in recurrent layers; use silu"
            )
        return read(fields)

    return read_checked


def _read_rg_lru(fields: ConfigFields) -> RgLru:
    channels = fields.optional_integer("lru_width") or fields.integer("hidden_size")
    num_blocks = fields.integer("num_attention_heads")
    if channels % num_blocks:
        raise fields.wrong("lru_width", f"a multiple of num_attention_heads {num_blocks}", channels)
    return RgLru(channels, num_blocks, fields.integer("conv1d_width", 4))


def _read_gated_delta_net(fields: ConfigFields) -> GatedDeltaNet:
    if fields.text("model_type") == "olmo_hybrid":
        fields = _olmo_hybrid_with_defaults(fields)
    if fields.text("model_type") == "lara_mini":
        fields = fields.with_defaults(linear_num_key_heads=8, linear_num_value_heads=16)
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
        has_sigmoid_gate=fields.choice("output_gate_type", ("sigmoid", "silu"), "silu")
        == "sigmoid",
        ngrams=_read_ngrams(fields),
    )


def _read_gigachat(fields: ConfigFields) -> GatedDeltaNet:
    fields = fields.with_defaults(
        linear_num_key_heads=8, linear_num_value_heads=16, output_gate_type="sigmoid"
    )
    return msgspec.structs.replace(
        _read_gated_delta_net(fields),
        is_interleaved=True,
        has_interleaved_steps=True,
        norm_offset=float("zero_centered" in fields.text("linear_gating_type", "").lower()),
        norm_factor=fields.positive("linear_sigmoid_gate_scale", 2.0),
    )


def _read_ngrams(fields: ConfigFields) -> NgramConvolution | None:
    if not fields.get("ple_layer_ids"):
        return None
    return NgramConvolution(
        fields.integer("hc_count", 4) * fields.integer("hidden_size"),
        fields.integer("ple_conv_kernel_size", 4),
        fields.integer("ngram_size", 3, minimum=2),
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
        has_full_gates=own.boolean("use_full_rank_gate", False),
        lowest_log_decay=_log_decay(own, "gate_lower_bound", own.get("gate_lower_bound")),
    )


def _read_alice_ai(fields: ConfigFields) -> KimiDeltaAttention:
    num_heads = fields.integer("linear_num_key_heads", 32)
    head_dim = fields.integer("linear_key_head_dim", 128)
    if fields.integer("linear_num_value_heads", num_heads) != num_heads:
        raise fields.wrong(
            "linear_num_value_heads",
            f"linear_num_key_heads {num_heads}",
            fields.get("linear_num_value_heads"),
        )
    if fields.integer("linear_value_head_dim", head_dim) != head_dim:
        raise fields.wrong(
            "linear_value_head_dim",
            f"linear_key_head_dim {head_dim}",
            fields.get("linear_value_head_dim"),
        )
    return KimiDeltaAttention(num_heads, head_dim, fields.integer("linear_conv_kernel_dim", 4))


def _read_glm5_next(fields: ConfigFields) -> KimiDeltaAttention:
    own = fields.section_or_empty("linear_attn_config")
    # A null means that decays have no bound, as in transformers.
    bound = own.config.get("gate_lower_bound", fields.config.get("linear_lower_bound", -5.0))
    if bound is None and own.config and own.boolean("safe_gate", True):
        bound = -5.0
    return KimiDeltaAttention(
        own.integer("num_heads", fields.integer("linear_num_heads", 64)),
        own.integer("head_dim", fields.integer("linear_head_dim", 128)),
        own.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4)),
        lowest_log_decay=_log_decay(fields, "linear_lower_bound", bound),
    )


def _log_decay(fields: ConfigFields, name: str, bound: Any) -> float:
    """Return the bound of decays that the field `name` has, or 0 for a null."""
    if bound is not None and (type(bound) not in (int, float) or bound >= 0):
        raise fields.wrong(name, "a negative number or null", bound)
    return float(bound or 0.0)


def _read_ling3(fields: ConfigFields) -> KimiDeltaAttention:
    bound = fields.get("kda_lower_bound", -5.0)
    if type(bound) not in (int, float) or bound >= 0:
        raise fields.wrong("kda_lower_bound", "a negative number", bound)
    return KimiDeltaAttention(
        fields.integer("linear_num_heads", fields.integer("num_attention_heads")),
        fields.integer("linear_head_dim", fields.integer("head_dim", 128)),
        fields.integer("linear_conv_kernel_dim", fields.integer("short_conv_kernel_size", 4)),
        is_low_rank=False,
        lowest_log_decay=float(bound) if fields.boolean("kda_safe_gate", True) else 0.0,
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


_MAMBA1: Final = _with_silu(read_mamba1)
_MAMBA2: Final = _with_silu(read_mamba2)
_NEMOTRON_H: Final = _with_silu(read_nemotron_h, "mamba_hidden_act")
_GLM5_NEXT: Final = _with_silu(_read_glm5_next)
_GATED_DELTA_NETS: Final = (
    *("minicpmv4_7", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"),
    *("qwen4_exp", "qwen4_exp_text", "olmo_hybrid", "lara_mini"),
)
_READERS: Final[dict[str, _Reader]] = {
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), _read_short_convolution),
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba", "phi4flash"), _MAMBA1),
    "rwkv": read_rwkv4,
    "xlstm": read_xlstm,
    "jet_nemotron": _with_silu(read_jet_block),
    "mamba2": _with_silu(read_pure_mamba2),
    "plamo2": read_plamo2,
    "granitemoehybrid": _MAMBA2,
    "bamba": _MAMBA2,
    "zamba": _with_silu(read_mamba1, "hidden_mamba_act"),
    "zamba2": read_zamba2,
    "falcon_h1": _with_silu(read_falcon_h1),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_puzzle": _NEMOTRON_H,
    **dict.fromkeys(_GATED_DELTA_NETS, _with_silu(_read_gated_delta_net)),
    "alice_ai": _with_silu(_read_alice_ai),
    "bailing_hybrid": _with_silu(_read_ling_hybrid),
    "gigachat3_5": _with_silu(_read_gigachat),
    "glm5_next": _GLM5_NEXT,
    "glm5_next_text": _GLM5_NEXT,
    "minicpm_sala": read_minicpm_lightning,
    "minimax": _with_silu(read_lightning_attention),
    "recurrent_gemma": _read_rg_lru,
    **dict.fromkeys(
        ("inkling_text", "inkling_mm_model", "inkling2_text", "inkling2"), _read_larger
    ),
    **dict.fromkeys(("inkling2_loop_text", "inkling2_loop"), _read_larger),
    "zaya": read_head_convolutions,
    **RWKV_READERS,
    # The MLPs of Kimi K3 have another activation.
    "kimi_linear": _with_silu(_read_kimi_delta_attention, others=("situ",)),
}


def is_purely_recurrent(fields: ConfigFields) -> bool:
    """Return whether no layer of the model has attention."""
    return fields.text("model_type", "") in ("mamba", "falcon_mamba", "mamba2", *RWKV_READERS)


def has_unlimited_length(fields: ConfigFields) -> bool:
    """Return whether no layer of the model attends to all tokens, so that a context may have any length."""
    return is_purely_recurrent(fields) or fields.text("model_type", "") == "recurrent_gemma"


class RecurrentModel(msgspec.Struct, frozen=True):
    """The recurrent layers of a model, and the key/value heads of its attention layers.

    If `values_are_keys` (latent attention), the cache has no separate values. A model without attention has
    placeholder heads.
    """

    layer: RecurrentLayer
    num_kv_heads: int
    head_dim: int
    values_are_keys: bool = False

    @classmethod
    def read(cls, fields: ConfigFields) -> Self | None:
        """Return the layers that a config describes, or None if it has no recurrent ones.

        Raises:
            CheckpointError: A field is missing or invalid.
        """
        layer = read_recurrent_layer(fields)
        if layer is None:
            return None
        if is_purely_recurrent(fields):
            return cls(layer, *nominal_heads(layer))
        is_latent = fields.text("model_type") != "alice_ai"
        if isinstance(layer, LightningAttention):
            is_latent = layer.is_rotated and not layer.has_separate_projections
        if is_latent and isinstance(layer, KimiDeltaAttention | LightningAttention):
            size = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim", minimum=0)
            return cls(layer, 1, size, values_are_keys=True)
        if isinstance(layer, ConvolvedAttention):
            return cls(layer, layer.num_kv_heads, layer.head_dim)
        num_heads = fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
        if fields.text("model_type") == "phi4flash":
            # Two heads share values of twice this size.
            head_dim *= 2
        return cls(layer, fields.integer("num_key_value_heads", num_heads), head_dim)

    def smallest_block_size(self, ranks: int, input_bytes: int, kv_bytes: int) -> int:
        """Return the smallest block size, in tokens, whose keys and values take as much memory as one state.

        Args:
            ranks: The tensor-parallel size.
            input_bytes: Bytes per element of the model's dtype.
            kv_bytes: Bytes per element of the KV cache.
        """
        parts = 1 if self.values_are_keys else 2
        token_bytes = parts * max(1, self.num_kv_heads // ranks) * self.head_dim * kv_bytes
        return -(-self.layer.state_parts.size(ranks).num_bytes(input_bytes) // token_bytes)
