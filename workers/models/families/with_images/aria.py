"""Aria, a mixture of experts whose decoder is otherwise like Llama."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ..common import Family, attention_biases, base_spec, head_dim, uniform_layers
from ..experts import read_experts, with_experts


def _aria(fields: ConfigFields) -> ModelSpec:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        # The routed experts have this activation, whatever the config says.
        raise fields.wrong("hidden_act", "silu", activation)
    num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    experts = read_experts(
        fields,
        (8, 2),
        intermediate_size="intermediate_size",
        shared_intermediate_size=fields.integer("intermediate_size") * num_shared,
    )
    spec = base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields))),
        mlp_bias=fields.boolean("mlp_bias", False),
        **attention_biases(fields),
    )
    names = (
        (r"\.mlp\.router\.", ".mlp.gate."),
        (r"\.experts\.(\d+)\.fc1\.", r".experts.\1.gate_up_proj."),
        (r"\.experts\.(\d+)\.fc2\.", r".experts.\1.down_proj."),
    )
    return with_experts(spec, experts, tensor_names=names)


FAMILIES = (
    Family("AriaTextForCausalLM", "aria_text", _aria),
    Family("AriaForConditionalGeneration", "aria", _aria),
)
