"""Molmo 1 and 2, whose decoders are like Qwen 2, Qwen 3 or OLMo 2."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, base_spec, head_dim

_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 36_864,
}
_LAYER = r"^model\.transformer\.blocks\.(\d+)\."
_PREFIX = "model.language_model."
_NAMES = (
    (r"^model\.transformer\.wte\.embedding$", f"{_PREFIX}embed_tokens.weight"),
    (r"^model\.transformer\.ln_f\.", f"{_PREFIX}norm."),
    (r"^model\.transformer\.ff_out\.", "lm_head."),
    (r"^(model\.transformer\.blocks\.\d+\.)(att_proj|attn_out|[qk]_norm)", r"\1self_attn.\2"),
    (r"^(model\.transformer\.blocks\.\d+\.)(ff_proj|ff_out)", r"\1mlp.\2"),
    (_LAYER, rf"{_PREFIX}layers.\1."),
    (r"\.self_attn\.att_proj\.", ".self_attn.qkv_proj."),
    (r"\.self_attn\.attn_out\.", ".self_attn.o_proj."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"\.mlp\.ff_proj\.", ".mlp.up_gate_proj."),
    (r"\.mlp\.ff_out\.", ".mlp.down_proj."),
)
"""The names of published checkpoints, of which those of Molmo 1 come first. Those of transformers stay as they are."""


def _molmo2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder. The model never writes the last tokens of the vocabulary."""
    fields = fields.with_defaults(**_DEFAULTS)
    kind = fields.text("qk_norm_type", "qwen3")
    norm_kinds = {"qwen3": "head", "olmo": "full", "none": None}
    if kind not in norm_kinds:
        raise fields.wrong("qk_norm_type", f"one of {', '.join(norm_kinds)}", kind)
    norms = NormNames()
    if fields.boolean("norm_after", False):
        norms = NormNames(
            attention_input=None,
            attention_output="input_layernorm",
            mlp_input=None,
            mlp_output="post_attention_layernorm",
        )
    return base_spec(
        fields,
        _layers(fields),
        norms=norms,
        qk_norm=norm_kinds[kind],
        qkv_bias=fields.boolean("attention_bias", fields.boolean("qkv_bias", False)),
        num_unsampled=fields.integer("additional_vocab_size", 128),
        # Transformers never ties them, whatever the config says.
        tie_word_embeddings=False,
        tensor_names=_NAMES,
    )


def _layers(fields: ConfigFields) -> tuple[LayerSpec, ...]:
    """Return the layers, of which only those in `rope_scaling_layers` have scaled rotary embeddings."""
    num_layers, size = fields.layer_count("num_hidden_layers"), head_dim(fields)
    scaled = fields.get("rope_scaling_layers", list(range(num_layers)))
    if not isinstance(scaled, list) or not all(type(index) is int for index in scaled):
        raise fields.wrong("rope_scaling_layers", "a list of indices", scaled)
    parameters = fields.first_section("rope_parameters")
    theta = parameters.positive("rope_theta", fields.positive("rope_theta", 1e6, above=1), above=1)
    own = {"rope_scaling": None, "rope_theta": theta, "rope_parameters": None}
    ropes = read_rope(fields.with_values(own), size), read_rope(fields, size, theta=1e6)
    return tuple(LayerSpec(ropes[index in scaled]) for index in range(num_layers))


FAMILIES = (
    Family("MolmoForCausalLM", "molmo", _molmo2),
    Family("Molmo2ForConditionalGeneration", "molmo2", _molmo2),
)
