"""Inkling, whose layers have four short convolutions, and whose attention has biases by query and distance."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.recurrent_config import read_inner_convolutions
from ....layers.rope import QueryScaling
from ....layers.spec import LayerSpec, ModelSpec
from ....layers.specs.relative_biases import RelativeBiasSpec
from ....loaders.row_factors import RowFactors
from ..common import Family, base_spec
from ..experts import has_listed_experts, read_experts, with_experts

_NAMES = (
    (r"^(model\.)?mtp\..*", ""),
    (r"^model\.(audio|visual|audio_tower|vision_tower)\..*", ""),
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"(^|\.)embed\.weight$", r"\1embed_tokens.weight"),
    (r"(^|\.)embed_tokens\.embed_norm\.", r"\1embed_norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.(self_)?attn\.", ".self_attn."),
    (r"\.w([qkv])_d[uv]\.", r".\1_proj."),
    (r"\.wo_ud\.", ".o_proj."),
    (r"\.(wr_du|r_proj)\.", ".bias_proj."),
    (r"\.rel_logits_proj\.proj$", ".distance_profiles"),
    (r"_sconv\.(conv1d\.)?", "_conv."),
    (r"\.attn_conv\.", ".attention_conv."),
    (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
)


def _inkling(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, hidden_act="silu"
    )
    if (dense_size := fields.optional_integer("dense_intermediate_size")) is not None:
        size = fields.integer("intermediate_size")
        fields = fields.with_values(
            {"moe_intermediate_size": size, "intermediate_size": dense_size}
        )
    if (num_outputs := fields.optional_integer("unpadded_vocab_size")) is not None:
        unused = fields.integer("vocab_size", minimum=num_outputs) - num_outputs
        fields = fields.with_values({"vocab_size": num_outputs, "num_unused_embeddings": unused})
    head_dim, local_dim = fields.integer("head_dim"), fields.integer("swa_head_dim", 128)
    scaling = None
    if (floor := fields.optional_integer("log_scaling_n_floor")) is not None:
        scaling = QueryScaling(fields.number("log_scaling_alpha", 0.1), floor, 1, "log")
    full = LayerSpec(
        None,
        query_scaling=scaling,
        recurrent=read_inner_convolutions(fields, is_local=False),
    )
    local = LayerSpec(
        None,
        window=fields.integer("sliding_window_size", fields.integer("sliding_window", 512)),
        num_heads=fields.integer("swa_num_attention_heads", 64),
        num_kv_heads=fields.integer("swa_num_key_value_heads", 16),
        head_dim=local_dim,
        # Queries and keys are normed, so the divisor is not a square root.
        attention_scale=1 / local_dim,
        recurrent=read_inner_convolutions(fields, is_local=True),
    )
    spec = base_spec(
        fields,
        tuple(local if is_local else full for is_local in _are_local(fields, count)),
        attention_scale=1 / head_dim,
        tie_word_embeddings=False,
        qk_norm="head",
        has_embedding_norm=True,
        num_unused_embeddings=fields.integer("num_unused_embeddings", 0, minimum=0),
        relative_biases=RelativeBiasSpec(
            fields.integer("d_rel", 16), fields.integer("rel_extent", 1024)
        ),
        logits_divisor=fields.positive("logits_mup_width_multiplier", 24.0),
        row_factors=(RowFactors(r"\.mlp\.down_proj\.weight$", ".mlp.global_scale"),),
    )
    num_experts = fields.integer("n_routed_experts", 256)
    num_shared = fields.integer("n_shared_experts", 2, minimum=0)
    experts = read_experts(
        fields.with_defaults(moe_intermediate_size=3072),
        num_experts,
        6,
        scoring="sigmoid",
        renormalizes=True,
        scale=fields.positive("route_scale", 8.0),
        has_correction_bias=True,
        num_always=num_shared,
        has_stored_scale=True,
    )
    experts = replace(
        experts,
        num_experts=num_experts + num_shared,
        num_experts_per_token=experts.num_experts_per_token + num_shared,
    )
    first = fields.integer("dense_mlp_idx", 0, minimum=0)
    shared = tuple(
        (rf"\.shared_experts\.{i}\.", f".experts.{num_experts + i}.") for i in range(num_shared)
    )
    return with_experts(
        spec,
        experts,
        has_listed_experts(fields, lambda i: i >= first),
        tensor_names=(*_NAMES, *shared),
    )


def _are_local(fields: ConfigFields, count: int) -> list[bool]:
    """Return for each layer whether it has a window."""
    kinds = fields.per_layer("layer_types", count)
    if kinds is None:
        ids = fields.get("local_layer_ids")
        if ids is None:
            return [(i + 1) % 6 != 0 for i in range(count)]
        if not isinstance(ids, list):
            raise fields.wrong("local_layer_ids", "a list of layers", ids)
        return [i in ids for i in range(count)]
    for kind in kinds:
        if kind not in ("hybrid", "hybrid_sliding"):
            raise fields.wrong("layer_types", "hybrid or hybrid_sliding for each layer", kind)
    return [kind == "hybrid_sliding" for kind in kinds]


FAMILIES = (
    Family("InklingForCausalLM", "inkling_text", _inkling),
    Family("InklingForConditionalGeneration", "inkling_mm_model", _inkling),
)
