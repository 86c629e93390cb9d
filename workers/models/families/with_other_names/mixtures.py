"""Mixtures of experts that transformers has no class for."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ..common import Family, attention_biases, base_spec
from ..experts import gpt_oss, has_sparse_step, read_experts, with_experts
from ..llama import qwen_layers

_PUZZLE_NAMES = (
    (r".*\.q_scale$", ""),
    (r"\.self_attn\.(?:[kv]_proj|attn)\.([kv]_scale)$", r".self_attn.\1"),
)
"""Names of scales for queries, which are not rounded, and for keys and values in an FP8 cache."""

_GROVE_NAMES = ((r".*\.mlp\.expert_bias", ""),)
"""The biases are not used: experts are chosen by their scores."""


def _grove(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a GroveMoE: a Qwen3-MoE whose groups of experts have adjugate experts (arXiv 2508.07785).

    Published configs have neither the size of adjugate experts nor the number of experts of a group.
    """
    fields = fields.with_defaults(moe_intermediate_size=768, num_key_value_heads=4, head_dim=128)
    experts = read_experts(fields, 128, 8)
    group = fields.integer("num_experts_per_group", 2)
    if experts.num_experts % group:
        raise fields.wrong(
            "num_experts_per_group", f"a divisor of {experts.num_experts} experts", group
        )
    experts = replace(
        experts,
        adjugate_size=fields.integer("parallel_expert_intermediate_size", 128),
        adjugate_group=group,
        adjugate_scale=fields.positive("expert_group_scale", 0.05),
    )
    spec = base_spec(
        fields, qwen_layers(fields, lambda _: True), qk_norm="head", **attention_biases(fields)
    )
    return with_experts(spec, experts, has_sparse_step(fields), tensor_names=_GROVE_NAMES)


def _gpt_oss_puzzle(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a gpt-oss-puzzle: a gpt-oss whose layers have different windows and numbers of experts."""
    blocks = fields.get("block_configs")
    count = fields.layer_count("num_hidden_layers")
    if not isinstance(blocks, list) or len(blocks) != count:
        raise fields.wrong("block_configs", f"a list of {count} objects", blocks)
    spec = gpt_oss(fields.with_values({"layer_types": ["full_attention"] * count}))
    layers = []
    for layer, block in zip(spec.layers, blocks, strict=True):
        if not isinstance(block, dict):
            raise fields.wrong("block_configs", f"a list of {count} objects", blocks)
        own = ConfigFields(block, fields.path)
        experts = layer.experts
        assert experts is not None, "all layers of a gpt-oss have experts"
        chosen = experts.num_experts_per_token
        layers.append(
            replace(
                layer,
                window=own.optional_integer("sliding_window"),
                experts=replace(
                    experts, num_experts=own.integer("num_local_experts", minimum=chosen)
                ),
            )
        )
    return replace(spec, layers=tuple(layers), tensor_names=(*_PUZZLE_NAMES, *spec.tensor_names))


FAMILIES = (
    Family("GptOssPuzzleForCausalLM", "gpt_oss_puzzle", _gpt_oss_puzzle),
    Family("GroveMoeForCausalLM", "grove_moe", _grove),
)
