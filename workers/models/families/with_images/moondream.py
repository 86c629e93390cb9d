"""Moondream 2 and 3, whose decoders are like Phi's; that of Moondream 3 has experts."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, head_dim, uniform_layers
from ..experts import first_dense, read_experts, with_experts
from ..gpt import gpt_spec

_NAMES = (
    (r"(^|\.)text\.wte$", r"\1text.embed_tokens.weight"),
    (r"(^|\.)text\.post_ln\.", r"\1text.norm."),
    (r"(^|\.)text\.blocks\.", r"\1text.layers."),
    (r"\.ln\.", ".input_layernorm."),
    (r"\.attn\.qkv\.", ".self_attn.qkv_proj."),
    (r"\.attn\.proj\.", ".self_attn.o_proj."),
    (r"\.attn\.tau\.", ".self_attn.tau."),
    (r"\.mlp\.router\.", ".mlp.gate."),
    (r"(\.experts\.\d+)\.fc1\.", r"\1.gate_up_proj."),
    (r"(\.experts\.\d+)\.fc2\.", r"\1.down_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)


def _moondream(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder, half of whose heads is rotated."""
    values = {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}
    fields = fields.with_values(values)
    spec = gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        head_bias=True,
        has_token_scales=fields.boolean("has_token_scales", False),
        tensor_names=_NAMES,
    )
    if fields.get("silent_tokens") is not None:
        first, end = fields.integers("silent_tokens")
        spec = replace(spec, silent_tokens=(first, end))
    if fields.get("num_local_experts") is None:
        return spec
    experts = read_experts(fields, has_router_bias=True, gate_activation="gelu")
    return with_experts(spec, experts, first_dense(fields, 4))


FAMILIES = (Family("HfMoondream", "moondream", _moondream),)
