"""Families of Llama's time that have layer norms instead of root-mean-square norms."""

from __future__ import annotations

from typing import Any

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.spec import LayerSpec, ModelSpec, NormNames
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    sliding_layers,
    uniform_layers,
)
from .gpt import gpt_spec
from .rope import read_rope

_QK_NORM_NAMES = ((r"\.([qk])_layernorm\.(norms\.)?", r".\1_norm."),)


def _cohere_spec(
    fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any
) -> ModelSpec:
    return base_spec(
        fields,
        layers,
        norm_kind="layer",
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        rope_order="interleaved",
        logits_divisor=1 / fields.positive("logit_scale", 0.0625),
        **attention_biases(fields),
        **differences,
    )


def _cohere(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500_000.0)
    rope = read_rope(fields, head_dim(fields))
    return _cohere_spec(
        fields,
        uniform_layers(fields, rope),
        qk_norm="each head" if fields.boolean("use_qk_norm", False) else None,
    )


def _cohere2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True, rms_norm_eps=1e-5, sliding_window=4096)
    rope, window = read_rope(fields, head_dim(fields)), fields.integer("sliding_window")
    period = fields.integer("sliding_window_pattern", 4)
    sliding = sliding_layers(fields, lambda i: bool((i + 1) % period))
    layers = tuple(LayerSpec(rope, window) if slides else LayerSpec(None) for slides in sliding)
    return _cohere_spec(fields, layers)


def _jais2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="relu2", attention_bias=True)
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields))),
        mlp_bias=fields.boolean("mlp_bias", True),
        **attention_biases(fields),
    )


def _nemotron(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="relu2", partial_rotary_factor=0.5)
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        norm_weight_offset=1.0,
        mlp_bias=fields.boolean("mlp_bias", False),
        **attention_biases(fields),
    )


def _olmo(fields: ConfigFields) -> ModelSpec:
    if fields.get("clip_qkv") is not None:
        raise fields.error("clip_qkv is not supported; use a model without it")
    fields = fields.with_values({"rms_norm_eps": 1e-5})
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields))),
        norm_kind="layer",
        has_norm_weights=False,
        **attention_biases(fields),
    )


def _phi(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="gelu_new", partial_rotary_factor=0.5)
    has_qk_norm = fields.boolean("qk_layernorm", False)
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        qk_norm="head" if has_qk_norm else None,
        qk_norm_bias=True,
        head_bias=True,
        tensor_names=(
            (r"\.final_layernorm\.", ".norm."),
            (r"\.dense\.", ".o_proj."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
            *_QK_NORM_NAMES,
        ),
    )


def _stablelm(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, partial_rotary_factor=0.25)
    is_parallel = fields.boolean("use_parallel_residual", False)
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        norm_kind="layer",
        norm_bias=True,
        is_parallel=is_parallel,
        norms=NormNames(mlp_input=None if is_parallel else "post_attention_layernorm"),
        qkv_bias=fields.boolean("use_qkv_bias", False),
        qk_norm="each head" if fields.boolean("qk_layernorm", False) else None,
        tensor_names=_QK_NORM_NAMES,
    )


def _starcoder2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="gelu_pytorch_tanh", tie_word_embeddings=True)
    rope, window = read_rope(fields, head_dim(fields)), fields.optional_integer("sliding_window")
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, rope, window),
        has_biases=fields.boolean("use_bias", True),
        tensor_names=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
    )


FAMILIES = (
    Family("Cohere2ForCausalLM", "cohere2", _cohere2),
    Family("CohereForCausalLM", "cohere", _cohere),
    Family("Jais2ForCausalLM", "jais2", _jais2),
    Family("NemotronForCausalLM", "nemotron", _nemotron),
    Family("OlmoForCausalLM", "olmo", _olmo),
    Family("PhiForCausalLM", "phi", _phi),
    Family("StableLmForCausalLM", "stablelm", _stablelm),
    Family("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
)
