"""Families with experts as in DeepSeek, most with sigmoid scores and a correction bias, and layers like Llama's."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.rope import QueryScaling
from ...layers.spec import ModelSpec
from ...layers.specs.block_indexer import BlockIndexerSpec
from ...layers.specs.norm_names import NormNames
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    require_usual_swiglu,
    sliding_layers,
    uniform_layers,
    windowed_layers,
)
from .experts import (
    MIXTRAL_NAMES,
    deepseek,
    deepseek_experts,
    first_dense,
    has_listed_experts,
    read_experts,
    unused_layers,
    with_experts,
)
from .llama import llama

_FUSED_NAMES = (
    (r"(^|\.)word_embeddings\.", r"\1embed_tokens."),
    (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.query_layernorm\.", ".self_attn.q_norm."),
    (r"\.attention\.key_layernorm\.", ".self_attn.k_norm."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


_SMALLTHINKER_NAMES = (
    (r"\.block_sparse_moe\.primary_router\.", ".mlp.gate."),
    (r"\.block_sparse_moe\.experts\.(\d+)\.(gate|up|down)\.", r".mlp.experts.\1.\2_proj."),
)


def _exaone_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        sliding_window=4096,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        routed_scaling_factor=2.5,
        moe_intermediate_size=1024,
    )
    pattern = fields.get("sliding_window_pattern", 4)
    if not isinstance(pattern, str):
        pattern = "L" * (fields.integer("sliding_window_pattern", 4) - 1) + "G"
    # The pattern has one letter per layer; "L" means a window.
    layers = windowed_layers(
        fields,
        lambda i: pattern[i % len(pattern)] == "L",
        read_rope(fields, head_dim(fields)),
        None,
    )
    return with_experts(
        llama(fields, layers=layers, qk_norm="head"),
        deepseek_experts(fields),
        has_listed_experts(fields, first_dense(fields, 1)),
        tensor_names=(
            (r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            *unused_layers(fields),
        ),
    )


def _beam(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        num_key_value_heads=8,
        head_dim=128,
        sliding_window=512,
        moe_intermediate_size=2560,
        num_experts=256,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        final_logit_softcapping=30.0,
    )
    fields = fields.with_values({"n_shared_experts": 0})
    window = fields.integer("sliding_window")
    ropes = fields.section("rope_parameters")
    # Layers without a rotary embedding scale their queries.
    scaled = LayerSpec(None, query_scaling=QueryScaling(0.1, 2048, 1, kind="power"))

    def layer(kind: str) -> LayerSpec:
        if (kind == "full_attention") if ropes is None else (ropes.section(kind) is None):
            return scaled
        return LayerSpec(read_rope_of_layer_type(fields, kind, head_dim(fields), theta=10_000.0))

    local, full = replace(layer("sliding_attention"), window=window), layer("full_attention")
    slides = sliding_layers(fields, lambda i: (i + 1) % 6 != 0 and i != count - 1)
    spec = base_spec(
        fields,
        tuple(local if has_window else full for has_window in slides),
        norms=NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_feedforward_layernorm",
            mlp_output="post_feedforward_layernorm",
        ),
        qk_norm="head",
        averages_blocks=True,
        gates_attention=True,
        has_gate_projection=True,
        has_gate_biases=True,
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        **attention_biases(fields),
    )
    return with_experts(
        spec,
        deepseek_experts(fields),
        has_listed_experts(fields, lambda i: i >= 3),
        tensor_names=((r"\.self_attn\.gate_bias$", ".self_attn.gate_proj.bias"),),
    )


def _hunyuan3(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        routed_scaling_factor=fields.positive("router_scaling_factor", 2.826),
        moe_intermediate_size=1536,
        num_experts=192,
    )
    rope = read_rope(fields, head_dim(fields), theta=11_158_840.0)
    return with_experts(
        llama(fields, layers=uniform_layers(fields, rope), qk_norm="head"),
        deepseek_experts(fields),
        has_listed_experts(fields, lambda i: i > 0),
        tensor_names=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (
                r"\.mlp\.(expert_bias|e_score_correction_bias)$",
                ".mlp.gate.e_score_correction_bias",
            ),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
            *unused_layers(fields),
        ),
    )


def _solar_open(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        head_dim=128, num_key_value_heads=8, rms_norm_eps=1e-5, n_shared_experts=1
    )
    rope = read_rope(fields, head_dim(fields), theta=1_000_000.0, partial=True)
    size = fields.integer("moe_intermediate_size", 1280)
    # Every layer has experts, so none has a dense MLP.
    fields = fields.with_defaults(moe_intermediate_size=size, intermediate_size=size)
    spec = llama(fields, layers=uniform_layers(fields, rope), attention_output_bias=False)
    experts = deepseek_experts(fields)
    return with_experts(spec, experts, tensor_names=unused_layers(fields))


def _sarvam_moe(fields: ConfigFields) -> ModelSpec:
    return _fused(
        fields.with_defaults(
            head_dim=64,
            num_key_value_heads=4,
            routed_scaling_factor=2.5,
            moe_intermediate_size=1024,
        ),
        theta=8_000_000.0,
    )


def ling2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ling 2."""
    return _fused(
        fields.with_defaults(moe_intermediate_size=512, n_group=8, topk_group=4), theta=600_000.0
    )


def _param2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Param2, a Ling 2 without groups of experts whose heads are rotated as a whole."""
    fields.require("score_function", "sigmoid")
    return ling2(fields.with_defaults(n_group=1, topk_group=1))


def _ling(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the first Ling, with experts like those of DeepSeek-MoE and softmax scores."""
    fields.require("norm_head", False, " (a GGUF file has a normed head)")
    num_shared = fields.integer("num_shared_experts", 1, minimum=0)
    fields = fields.with_values({"n_shared_experts": num_shared}).with_defaults(
        attention_bias=fields.boolean("use_qkv_bias", False), rope_theta=600_000.0
    )
    return replace(
        deepseek(fields),
        attention_output_bias=fields.boolean("use_bias", False),
        tensor_names=_FUSED_NAMES,
    )


def _fused(fields: ConfigFields, *, theta: float) -> ModelSpec:
    """Return the spec of a model with the config fields and fused matrices of Ling 2."""
    fields = fields.with_defaults(
        attention_bias=fields.boolean("use_qkv_bias", False),
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
    )
    rope = read_rope(fields, head_dim(fields), theta=theta, partial=True)
    spec = llama(
        fields,
        layers=uniform_layers(fields, rope),
        attention_output_bias=fields.boolean("use_bias", False),
        qk_norm="head" if fields.boolean("use_qk_norm", True) else None,
    )
    return with_experts(
        spec,
        deepseek_experts(fields),
        first_dense(fields, 1),
        tensor_names=(*_FUSED_NAMES, *unused_layers(fields)),
    )


def _kolibri(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, sliding_window=513)
    size = fields.integer("moe_intermediate_size", 512)
    # Every layer has experts, so none has a dense MLP.
    fields = fields.with_values({"moe_intermediate_size": size, "intermediate_size": size})
    rope = read_rope(fields, head_dim(fields))
    spec = base_spec(
        fields,
        windowed_layers(fields, lambda i: (i + 1) % 5 != 0, rope, None),
        norms=NormNames(
            attention_output="post_self_attn_layernorm", mlp_output="post_mlp_layernorm"
        ),
        qk_norm="head",
    )
    experts = read_experts(
        fields,
        (384, 6),
        scoring="sigmoid",
        renormalizes=fields.boolean("norm_topk_prob", False),
        has_correction_bias=True,
        corrects_logits=True,
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    return with_experts(
        spec,
        experts,
        tensor_names=(
            (r"\.moe\.router\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.post_attn_norm\.", ".post_self_attn_layernorm."),
            (r"\.post_ffn_norm\.", ".post_mlp_layernorm."),
        ),
    )


def _minimax_m3(fields: ConfigFields) -> ModelSpec:
    fields = _with_flat_indexer(fields.with_defaults(head_dim=128, num_key_value_heads=4))
    size = head_dim(fields)
    rotary_dim = fields.integer("rotary_dim", size)
    fields = fields.with_defaults(partial_rotary_factor=rotary_dim / size)
    require_usual_swiglu(fields)
    rope = read_rope(fields, size, theta=5_000_000.0, partial=True)
    num_chosen = fields.integer("index_topk_blocks", 16)
    kinds = fields.per_layer("layer_types", fields.layer_count("num_hidden_layers")) or []
    for kind in kinds:
        if kind not in (_SPARSE, "full_attention"):
            raise fields.wrong("layer_types", f"{_SPARSE} or full_attention for each layer", kind)
    num_kv_heads = fields.integer("num_key_value_heads")
    if _SPARSE in kinds and fields.integer("index_n_heads", 4) != num_kv_heads:
        raise fields.error(
            f"index_n_heads {fields.get('index_n_heads')} must equal num_key_value_heads "
            f"{num_kv_heads}"
        )
    indexer = BlockIndexerSpec(
        fields.integer("index_head_dim", 128, minimum=rope.rotary_dim, maximum=size),
        fields.integer("index_block_size", 128),
        num_chosen,
        fields.integer("index_local_blocks", 1, minimum=0, maximum=num_chosen),
    )
    layers = uniform_layers(fields, rope)
    spec = base_spec(
        fields.with_values(
            {
                "hidden_act": "silu",
                "intermediate_size": fields.integer("dense_intermediate_size", 12288),
            }
        ),
        tuple(
            replace(layer, chooses_keys=kind == _SPARSE)
            for layer, kind in zip(layers, kinds or [None] * len(layers), strict=True)
        ),
        activation="clamped_swiglu",
        qk_norm="head",
        norm_weight_offset=1.0,
        block_indexer=indexer if _SPARSE in kinds else None,
    )
    experts = read_experts(
        fields,
        (128, 4),
        intermediate_size="intermediate_size",
        scoring="sigmoid",
        has_correction_bias=True,
        scale=fields.positive("routed_scaling_factor", 2.0),
        shared_intermediate_size=fields.integer("shared_intermediate_size", 3072),
    )
    names = (
        (r".*\.mtp\..*", ""),
        (r"\.self_attn\.index_([qk]_(proj|norm))\.", r".self_attn.indexer.\1."),
        *MIXTRAL_NAMES,
    )
    return with_experts(
        spec, experts, has_listed_experts(fields, lambda _: True), tensor_names=names
    )


def _with_flat_indexer(fields: ConfigFields) -> ConfigFields:
    """Return the fields of a MiniMax M3 with the names of transformers, which the published config lacks."""
    values: dict[str, object] = {}
    sparse = fields.section("sparse_attention_config")
    num_layers = fields.layer_count("num_hidden_layers")
    if sparse is not None:
        values = {
            name: sparse.get(published)
            for name, published in _PUBLISHED_INDEXER
            if sparse.get(published) is not None
        }
        frequency = sparse.per_layer("sparse_attention_freq", num_layers)
        if frequency is not None and fields.get("layer_types") is None:
            values["layer_types"] = [_SPARSE if each else "full_attention" for each in frequency]
    frequency = fields.per_layer("moe_layer_freq", num_layers)
    if frequency is not None and fields.get("mlp_layer_types") is None:
        values["mlp_layer_types"] = ["sparse" if each else "dense" for each in frequency]
    return fields.with_values(values)


_SPARSE = "minimax_m3_sparse"
"""The type of layers in which an indexer chooses blocks of keys."""

_PUBLISHED_INDEXER = (
    ("index_n_heads", "sparse_num_index_heads"),
    ("index_head_dim", "sparse_index_dim"),
    ("index_block_size", "sparse_block_size"),
    ("index_topk_blocks", "sparse_topk_blocks"),
    ("index_local_blocks", "sparse_local_block"),
)


def _smallthinker(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a SmallThinker (arXiv 2507.20984), whose routers read the input of a layer."""
    fields.require_all(moe_enable_early_router=True, moe_enable_secondary_experts=False)
    count = fields.layer_count("num_hidden_layers")
    layout = fields.per_layer("moe_layer_layout", count) or [1]
    if set(layout) != {1}:
        raise fields.wrong("moe_layer_layout", "1 for all layers", layout)
    rotates, slides = (
        fields.per_layer(name, count) or [default] * count
        for name, default in (("rope_layout", 1), ("sliding_window_layout", 0))
    )
    size, rope = fields.integer("moe_ffn_hidden_size"), read_rope(fields, head_dim(fields))
    window = fields.integer("sliding_window_size", 4096)
    by_softmax = fields.boolean("moe_primary_router_apply_softmax", False)
    chosen = {"num_experts_per_tok": fields.integer("moe_num_active_primary_experts")}
    experts = read_experts(
        fields.with_values(chosen),
        intermediate_size="moe_ffn_hidden_size",
        scoring="softmax" if by_softmax else "sigmoid",
        routes_input=True,
    )
    spec = base_spec(
        fields.with_values({"intermediate_size": size}),
        tuple(
            LayerSpec(rope if rotated else None, window if slid else None)
            for rotated, slid in zip(rotates, slides, strict=True)
        ),
        activation="relu",
    )
    return with_experts(spec, experts, tensor_names=_SMALLTHINKER_NAMES)


FAMILIES = (
    Family("BailingMoeForCausalLM", "bailing_moe", _ling),
    Family("BailingMoeV2ForCausalLM", "bailing_moe_v2", ling2),
    Family("BeamForCausalLM", "beam", _beam),
    Family("ExaoneMoEForCausalLM", "exaone_moe", _exaone_moe),
    Family("ExaoneMoeForCausalLM", "exaone_moe", _exaone_moe),
    Family("HYV3ForCausalLM", "hy_v3", _hunyuan3),
    Family("Kolibri1ForCausalLM", "kolibri1", _kolibri),
    Family("MiniMaxM3SparseForCausalLM", "minimax_m3", _minimax_m3),
    Family("MiniMaxM3SparseForConditionalGeneration", "minimax_m3_vl", _minimax_m3),
    Family("MiniMaxM3VLForCausalLM", "minimax_m3_vl_text", _minimax_m3),
    Family("Param2MoEForCausalLM", "param2moe", _param2),
    Family("SarvamMoEForCausalLM", "sarvam_moe", _sarvam_moe),
    Family("SmallThinkerForCausalLM", "smallthinker", _smallthinker),
    Family("SolarOpenForCausalLM", "solar_open", _solar_open),
)
