"""PLaMo 1, and PLaMo 2 and 3, whose norms' weights have different offsets."""

from __future__ import annotations

from typing import Any

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope, read_rope_of_layer_type
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, attention_biases, base_spec, head_dim, windowed_layers
from ..hybrid import recurrent_layer
from ..llama import llama

_PLAMO2_NAMES = (
    (r"(^|\.)layers\.layers\.", r"\1layers."),
    (r"\.mixer\.(qkv_proj|o_proj)\.", r".self_attn.\1."),
    (r"\.mixer\.([qk])_weight$", r".self_attn.\1_norm.weight"),
    (r"\.mixer\.dt_norm_weight$", ".mixer.dt_layernorm.weight"),
    (r"\.mixer\.B_norm_weight$", ".mixer.b_layernorm.weight"),
    (r"\.mixer\.C_norm_weight$", ".mixer.c_layernorm.weight"),
    (r"\.mixer\.bcdt_proj\.", ".mixer.x_proj."),
    (r"\.mixer\.dt_bias$", ".mixer.dt_proj.bias"),
)
_PLAMO3_NAMES = (
    (r"(^|\.)layers\.layers\.", r"\1layers."),
    (r"\.mixer\.", ".self_attn."),
)
_NORM_OFFSETS = (("post_mixer_norm", 1 / 5), ("post_mlp_norm", 1 / 5**1.5))
_NORM_NAMES = NormNames("pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm")


def _norms(fields: ConfigFields, *others: tuple[str, float]) -> dict[str, Any]:
    """Return the names and the offsets of norms, with those of `others`. GGUF files include the offsets."""
    is_whole = fields.boolean("has_whole_norm_weights", False)
    return {
        "norms": _NORM_NAMES,
        "norm_weight_offset": 0.0 if is_whole else 1.0,
        "norm_offsets": () if is_whole else (*_NORM_OFFSETS, *others),
    }


def _plamo(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first PLaMo, a Llama whose attention and MLP read the same normed hidden states."""
    fields.require("n_shared_head", 1, ": convert the model to GGUF, which sorts its heads")
    return llama(fields, is_parallel=True, norms=NormNames(mlp_input=None))


def _plamo2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a PLaMo 2, which has Mamba layers, and attention with a window in every second one."""
    fields = fields.with_values({"hidden_activation": None, "hidden_act": "silu"})
    fields = fields.with_defaults(num_key_value_heads=4, head_dim=128, tie_word_embeddings=True)
    count, step = fields.layer_count("num_hidden_layers"), fields.integer("mamba_step", 2)
    rope = read_rope(fields, head_dim(fields), theta=10_000.0)
    # The published code counts the tokens before the current one.
    window = fields.integer("attention_window_size", 2048, minimum=0)
    local = LayerSpec(rope, window + 1 if window else None)
    full = fields.integers("full_attention_idx") if fields.get("full_attention_idx") else []
    mamba = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False)
    kinds = fields.per_layer("layer_types", count)

    def attends(i: int) -> bool:
        if kinds is not None:
            return bool(kinds[i] == "attention")
        if not fields.boolean("mamba_enabled", True):
            return True
        return i == count - 1 if count <= step // 2 else i % step == step // 2

    layers = (
        mamba if not attends(i) else LayerSpec(rope) if i in full else local for i in range(count)
    )
    return base_spec(
        fields,
        tuple(layers),
        qk_norm="each head",
        tensor_names=_PLAMO2_NAMES,
        **_norms(fields, ("q_norm", 0.0), ("k_norm", 0.0)),
    )


def _plamo3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a PLaMo 3, which has norms before and after each block, and windows in most layers.

    The norms' weights have different offsets, which GGUF files include.
    """
    fields = _plamo3_windows(fields).with_values({"hidden_activation": None, "hidden_act": "silu"})
    fields = fields.with_defaults(num_key_value_heads=4, head_dim=128, tie_word_embeddings=True)
    factor = fields.positive("rope_scaling_factor", 1.0)
    if factor != 1.0 and fields.get("rope_scaling") is None:
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": fields.integer("initial_context_length"),
            "truncate": False,
        }
        fields = fields.with_values({"rope_scaling": scaling})
    local, full = (
        read_rope_of_layer_type(fields, kind, head_dim(fields), theta_field=name, theta=theta)
        for kind, name, theta in (
            ("sliding_attention", "rope_local_theta", 10_000.0),
            ("full_attention", "rope_theta", 150_000.0),
        )
    )
    period = fields.integer("sliding_window_pattern", 8)
    is_scaled = fields.boolean("scale_embedding", False)
    return base_spec(
        fields,
        windowed_layers(fields, lambda i: (i + 1) % period != 0, local, full),
        qk_norm="head",
        embedding_scale=fields.integer("hidden_size") ** 0.5 if is_scaled else 1.0,
        tensor_names=_PLAMO3_NAMES,
        **_norms(fields),
        **attention_biases(fields),
    )


def _plamo3_windows(fields: ConfigFields) -> ConfigFields:
    """Return the fields with Llama's name of the window, and with the base of earlier configs."""
    window = fields.get("sliding_window")
    if isinstance(window, list):
        # Earlier configs list the window of each layer. All windows are equal.
        window = next((each for each in window if each is not None), None)
    if window is None:
        window = fields.get("window_size", 128)
    theta = fields.get("rope_theta") or fields.get("rope_global_theta")
    return fields.with_values({"sliding_window": window, "rope_theta": theta})


FAMILIES = (
    Family("PlamoForCausalLM", "plamo", _plamo),
    Family("Plamo2ForCausalLM", "plamo2", _plamo2),
    Family("Plamo3ForCausalLM", "plamo3", _plamo3),
)
