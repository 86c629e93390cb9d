"""Step 3 and its successors, with gates of heads and with sliding windows in some layers."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope, read_rope_of_layer_type
from ....layers.spec import ModelSpec
from ....layers.specs.block_indexer import BlockIndexerSpec
from ..common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    read_layer_numbers,
    read_limits,
    sliding_layers,
    with_limits,
)
from ..experts import has_listed_experts, read_experts, unused_layers, with_experts
from ..llama import llama

_STEP3_NAMES = (
    (r"\.moe\.gate\.", ".mlp.gate."),
    (r"\.moe\.(\d+)\.", r".mlp.experts.\1."),
    (r"\.share_expert\.", ".mlp.shared_experts."),
)


def _step3_text(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text of a Step 3, whose queries have a low rank (arXiv 2507.19427)."""
    fields = fields.with_values({"num_key_value_heads": fields.integer("num_attention_groups", 1)})
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        max_position_embeddings=fields.integer("max_position_embedding", 65_536),
        num_experts=fields.integer("moe_num_experts", 48),
        num_experts_per_tok=fields.integer("moe_top_k", 3),
    )
    experts = read_experts(
        fields,
        renormalizes=fields.boolean("norm_expert_weight", False),
        shared_intermediate_size=fields.integer("share_expert_dim"),
    )
    listed = read_layer_numbers(fields, "moe_layers_enum")
    spec = llama(fields, query_rank=fields.integer("share_q_dim", head_dim(fields)))
    return with_experts(
        spec, experts, lambda i: i > 0 if listed is None else i in listed, tensor_names=_STEP3_NAMES
    )


def _step3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Step 3.5 or 3.7. Its layers with a window may have another number of query heads."""
    num_layers = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        head_dim=128,
        num_key_value_heads=fields.integer("num_attention_groups", 8),
        rms_norm_eps=1e-5,
        moe_intermediate_size=1280,
    )
    fields = _first_layers(fields, num_layers)
    size = head_dim(fields)
    slides = sliding_layers(fields, lambda _: False)
    # The sliding layers' heads are in a separate field, or in a section that replaces fields of the config.
    own = fields.section("attention_other_setting") or fields
    num_heads = fields.integer("num_attention_heads")
    num_local = fields.integer(
        "num_sliding_attention_heads", own.integer("num_attention_heads", num_heads)
    )
    window = fields.integer("sliding_window") if any(slides) else None
    layers = []
    for i, sliding in enumerate(slides):
        kind = "sliding_attention" if sliding else "full_attention"
        own_fields = _of_layer(fields, i)
        rope = read_rope_of_layer_type(own_fields, kind, size, theta=10_000.0, partial=True)
        layers.append(
            LayerSpec(
                rope,
                window if sliding else None,
                num_heads=num_local if sliding else None,
            )
        )
    spec = base_spec(
        fields,
        tuple(layers),
        qk_norm="head",
        norm_weight_offset=1.0,
        attention_scale=fields.positive("query_pre_attn_scalar", size) ** -0.5,
        gates_attention=True,
        has_gate_projection=True,
        has_head_gates=True,
        **attention_biases(fields),
    )
    experts = read_experts(
        fields,
        (288, fields.integer("moe_top_k", 8)),
        scoring="sigmoid",
        scale=fields.positive("moe_router_scaling_factor", 1.0),
        has_correction_bias=True,
        shared_intermediate_size=fields.integer(
            "share_expert_dim", fields.integer("share_expert_dims", 1280)
        ),
    )
    sparse = read_layer_numbers(fields, "moe_layers_enum")
    has_experts = has_listed_experts(fields, lambda i: i >= 3 if sparse is None else i in sparse)
    names = (
        (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
        (r"\.moe\.gate\.", ".mlp.gate."),
        (r"\.moe\.router_bias$", ".mlp.gate.e_score_correction_bias"),
        (r"\.moe\.(\d+)\.", r".mlp.experts.\1."),
        (r"\.share_expert\.", ".mlp.shared_experts."),
        (r"\.sparse_indexer_([qk]_norm)\.", r".indexer.\1."),
        (r"\.sparse_indexer_([qk])\.", r".indexer.\1_proj."),
        (r"\.sparse_indexer_z\.", ".indexer.gate_proj."),
        (r"\.sparse_indexer_w\.", ".indexer.weights_proj."),
        # The published code does not read this.
        (r".*\.self_attn\.ssmax_s$", ""),
        *unused_layers(fields),
    )
    return with_limits(
        with_experts(spec, experts, has_experts, tensor_names=names),
        read_limits(fields, "swiglu_limits"),
        read_limits(fields, "swiglu_limits_shared"),
    )


def _step5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Step 5: a Step 3.5 whose layers without a window choose blocks of keys."""
    fields.require_all(
        att_impl_type="GQA", moe_router_activation="sigmoid", use_moe_router_bias=True
    )
    num_layers = fields.layer_count("num_hidden_layers")
    num_chosen, size = fields.integer("moe_top_k", 4), fields.integer("moe_intermediate_size")
    groups = {"num_key_value_heads": fields.integer("num_attention_groups", 8)}
    fields = fields.with_values(groups).with_defaults(
        layer_types=fields.get("layer_types_with_mtp"),
        num_sliding_attention_heads=fields.get("swa_num_attention_heads"),
        moe_layers_enum=fields.get("moe_layer_list", list(range(1, num_layers))),
        share_expert_dim=size * num_chosen,
        max_position_embeddings=fields.get("max_seq_len"),
        rope_theta=500_000.0,
    )
    fields = _first_layers(fields, num_layers)
    fields.first_section("attention_other_setting").require("attention_type", "sliding_attention")
    spec, layers = _step3(fields), []
    rotates = fields.per_layer("use_rope_layers", num_layers) or [True] * num_layers
    scaled = fields.texts("yarn_only_types") or ["sliding_attention", "full_attention"]
    for i, (layer, rotated) in enumerate(zip(spec.layers, rotates, strict=True)):
        own = _of_layer(fields, i)
        if ("full_attention" if layer.window is None else "sliding_attention") not in scaled:
            own = own.with_values({"rope_scaling": None})
        rope = read_rope(own, head_dim(fields), partial=True) if rotated else None
        layers.append(replace(layer, rope=rope, chooses_keys=layer.window is None))
    is_centered = fields.boolean("zero_centered", True)
    spec = replace(spec, norm_weight_offset=float(is_centered), layers=tuple(layers))
    indexer = fields.section("sparse_config")
    if indexer is None or not indexer.boolean("enabled", True):
        layers = [replace(layer, chooses_keys=False) for layer in layers]
        return replace(spec, layers=tuple(layers))
    return replace(spec, block_indexer=_read_indexer(fields, indexer, spec))


def _read_indexer(fields: ConfigFields, own: ConfigFields, spec: ModelSpec) -> BlockIndexerSpec:
    own.require_all(
        compression_method="csa_block_compress",
        attention_impl="sparse_gqa",
        sparse_indexer_use_rope=True,
        sparse_indexer_q_norm_type="rmsnorm",
        sparse_indexer_k_norm_type="layernorm",
        sparse_indexer_csa_z_norm_type="none",
        sparse_indexer_num_k_heads=1,
        apply_to_layer_types=["full_attention"],
    )
    num_groups = own.integer("index_tp_size", own.integer("num_provider_groups", 4))
    if num_groups != spec.num_kv_heads:
        raise own.wrong("index_tp_size", f"num_attention_groups, {spec.num_kv_heads}", num_groups)
    num_heads, size = own.integer("sparse_indexer_num_heads", 16), own.integer("proxy_dim", 256)
    if num_heads % num_groups:
        raise own.wrong("sparse_indexer_num_heads", f"a multiple of {num_groups}", num_heads)
    rotary_dim = own.integer("sparse_indexer_rope_dim", 32, maximum=size)
    ropes = {
        read_rope(_of_layer(fields, i, partial_rotary_factor=rotary_dim / size), size, partial=True)
        for i, layer in enumerate(spec.layers)
        if layer.chooses_keys
    }
    if len(ropes) != 1:
        raise fields.error("rope_theta must be the same for all layers with full attention")
    return BlockIndexerSpec(
        size,
        own.integer("region_block_size", 8),
        own.integer("topk", 512),
        num_local=0,
        heads_per_group=num_heads // num_groups,
        rope=ropes.pop(),
    )


_PER_LAYER = (
    "layer_types",
    "use_rope_layers",
    "mlp_layer_types",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)


def _first_layers(fields: ConfigFields, num_layers: int) -> ConfigFields:
    """Return the fields without the entries of layers after the last, which are for multi-token prediction."""
    values = {name: fields.get(name) for name in _PER_LAYER}
    return fields.with_values(
        {name: x[:num_layers] for name, x in values.items() if isinstance(x, list)}
    )


def _of_layer(fields: ConfigFields, index: int, **others: float) -> ConfigFields:
    """Return the fields with this layer's entries in place of those lists that describe the rotary embedding.

    `others` replace further fields.
    """
    theta, factors = fields.get("rope_theta"), fields.get("partial_rotary_factors")
    values: dict[str, object] = {}
    if isinstance(theta, list):
        values["rope_theta"] = theta[index]
    if isinstance(factors, list):
        values["partial_rotary_factor"] = factors[index]
    return fields.with_values(values | others)


FAMILIES = (
    Family("Step3TextForCausalLM", "step3_text", _step3_text),
    Family("Step3p5ForCausalLM", "step3p5", _step3),
    Family("Step3p7ForConditionalGeneration", "step3p7", _step3),
    Family("Step5ForCausalLM", "step5", _step5),
    Family("Step5ForConditionalGeneration", "step5_vl", _step5),
)
