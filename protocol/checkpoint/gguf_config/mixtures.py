"""Translate the metadata of mixture-of-experts models."""

from typing import Any

from .fields import ModelFields, Translate
from .parts import (
    expert_fields,
    gate_limits,
    granite,
    latent_attention,
    layer_counts,
    layer_types,
    mixture,
    named,
    partial_rotary,
    rope_scaling,
    rotary_axes,
    rotary_dim,
    yarn_weight,
)

# The value of the metadata key that means: scores are sigmoids of the router's logits.
_SIGMOID = 2


def _qwen3_moe(fields: ModelFields) -> dict[str, Any]:
    return mixture(fields, "Qwen3Moe", "qwen3_moe", norm_topk_prob=True)


def _qwen3_vl_moe(fields: ModelFields) -> dict[str, Any]:
    return _qwen3_moe(fields) | rotary_axes(fields)


def _hunyuan3(fields: ModelFields) -> dict[str, Any]:
    experts, counts = expert_fields(fields), layer_counts(fields)
    return mixture(
        fields,
        "HYV3",
        "hy_v3",
        **counts,
        num_shared_experts=experts["n_shared_experts"],
        router_scaling_factor=experts["routed_scaling_factor"],
        norm_topk_prob=fields.boolean("expert_weights_norm", True),
        mlp_layer_types=_mlp_types(fields)[: counts["num_hidden_layers"]],
    )


def _mellum(fields: ModelFields) -> dict[str, Any]:
    theta = fields.positive("rope.freq_base", 500_000.0)
    scaling = rope_scaling(fields) or {"rope_type": "default"}
    local = {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base_swa", theta)}
    return mixture(
        fields,
        "Mellum",
        "mellum",
        norm_topk_prob=True,
        layer_types=layer_types(fields, default_period=4)
        if fields.optional_integer("attention.sliding_window")
        else None,
        sliding_window=fields.optional_integer("attention.sliding_window"),
        rope_parameters={
            "full_attention": scaling | {"rope_theta": theta},
            "sliding_attention": local,
        },
        rope_scaling=None,
        mlp_layer_types=_mlp_types(fields),
    )


def _mlp_types(fields: ModelFields) -> list[str]:
    """Return `mlp_layer_types`: sparse for layers with a router."""
    routers = (f"blk.{i}.ffn_gate_inp.weight" for i in range(fields.num_layers))
    return ["sparse" if fields.has_tensor(router) else "dense" for router in routers]


def _olmoe(fields: ModelFields) -> dict[str, Any]:
    size = expert_fields(fields)["moe_intermediate_size"]
    return mixture(fields, "Olmoe", "olmoe", norm_topk_prob=False, intermediate_size=size)


def _cohere2_moe(fields: ModelFields) -> dict[str, Any]:
    experts, counts = expert_fields(fields), layer_counts(fields)
    is_rms = fields.optional_positive("attention.layer_norm_rms_epsilon") is not None
    differences = {} if is_rms else {"rms_norm_eps": None}
    scoring = fields.integer("expert_gating_func", _SIGMOID)
    return mixture(
        fields,
        "Cohere2Moe",
        "cohere2_moe",
        **counts,
        **differences,
        layer_norm_eps=fields.optional_positive("attention.layer_norm_epsilon"),
        logit_scale=fields.positive("logit_scale", 1.0),
        intermediate_size=experts["moe_intermediate_size"],
        prefix_dense_intermediate_size=fields.optional_integer("feed_forward_length"),
        num_shared_experts=experts["n_shared_experts"],
        expert_selection_fn="sigmoid" if scoring == _SIGMOID else "softmax",
        layer_types=layer_types(fields, default_period=4)[: counts["num_hidden_layers"]],
        sliding_window=fields.integer("attention.sliding_window"),
    )


def _dbrx(fields: ModelFields) -> dict[str, Any]:
    experts = expert_fields(fields)
    return {
        "model_type": "dbrx",
        "architectures": ["DbrxForCausalLM"],
        "attn_config": {
            "kv_n_heads": fields.integer("attention.head_count_kv"),
            "clip_qkv": fields.optional_positive("attention.clamp_kqv"),
            "rope_theta": fields.positive("rope.freq_base", 10_000.0),
        },
        "ffn_config": {
            "ffn_hidden_size": experts["moe_intermediate_size"],
            "moe_num_experts": experts["num_experts"],
            "moe_top_k": experts["num_experts_per_tok"],
        },
    }


def _granite_moe(fields: ModelFields) -> dict[str, Any]:
    size = expert_fields(fields)["moe_intermediate_size"]
    return granite(fields) | mixture(
        fields, "GraniteMoeShared", "granitemoeshared", intermediate_size=size
    )


def _glm4_moe(fields: ModelFields) -> dict[str, Any]:
    return mixture(
        fields,
        "Glm4Moe",
        "glm4_moe",
        use_qk_norm=fields.has_tensor("blk.0.attn_q_norm.weight"),
        **layer_counts(fields),
        **partial_rotary(fields),
    )


def _minimax_m2(fields: ModelFields) -> dict[str, Any]:
    rotary_dim = fields.integer("rope.dimension_count", fields.head_dim)
    size = expert_fields(fields)["moe_intermediate_size"]
    return mixture(fields, "MiniMaxM2", "minimax_m2", rotary_dim=rotary_dim, intermediate_size=size)


def _minimax_m3(fields: ModelFields) -> dict[str, Any]:
    kinds, layers = _mlp_types(fields), range(fields.num_layers)
    indexed = [fields.has_tensor(f"blk.{i}.indexer.q_proj.weight") for i in layers]
    prefix = "attention.indexer"
    dense_size = fields.integer("feed_forward_length")
    if "dense" in kinds:
        # Earlier converters wrote the size of the experts.
        dense_size = fields.gguf.tensors[f"blk.{kinds.index('dense')}.ffn_down.weight"].shape[1]
    return mixture(
        fields,
        "MiniMaxM3Sparse",
        "minimax_m3",
        rotary_dim=rotary_dim(fields),
        intermediate_size=expert_fields(fields)["moe_intermediate_size"],
        dense_intermediate_size=dense_size,
        mlp_layer_types=kinds,
        layer_types=["minimax_m3_sparse" if each else "full_attention" for each in indexed],
        index_n_heads=fields.integer(f"{prefix}.head_count", 4),
        index_head_dim=fields.integer(f"{prefix}.key_length", 128),
        index_topk_blocks=fields.integer(f"{prefix}.top_k", 16),
        index_block_size=fields.integer(f"{prefix}.block_size", 128),
        index_local_blocks=fields.integer(f"{prefix}.local_blocks", 1, minimum=0),
    )


def _ernie4_5_moe(fields: ModelFields) -> dict[str, Any]:
    return mixture(
        fields,
        "Ernie4_5_Moe",
        "ernie4_5_moe",
        moe_num_shared_experts=fields.integer("expert_shared_count", 0, minimum=0),
        moe_layer_start_index=fields.integer("leading_dense_block_count", 0, minimum=0),
        moe_layer_interval=fields.integer("interleave_moe_layer_step", 1),
        use_bias=False,
    )


def _hunyuan_moe(fields: ModelFields) -> dict[str, Any]:
    size = expert_fields(fields)["moe_intermediate_size"]
    return mixture(
        fields,
        "HunYuanMoEV1",
        "hunyuan_v1_moe",
        intermediate_size=size,
        num_shared_expert=expert_fields(fields)["shared_expert_intermediate_size"] // size,
    )


def _gpt_oss(fields: ModelFields) -> dict[str, Any]:
    size = expert_fields(fields)["moe_intermediate_size"]
    # Without this factor, the default scaling of the family would apply.
    scaling = rope_scaling(fields) or {"rope_type": "default"}
    scaling["truncate"] = False
    return mixture(
        fields,
        "GptOss",
        "gpt_oss",
        intermediate_size=size,
        rope_scaling=scaling,
        sliding_window=fields.integer("attention.sliding_window", 128),
        attention_bias=True,
    )


def _phimoe(fields: ModelFields) -> dict[str, Any]:
    return mixture(
        fields,
        "PhiMoE",
        "phimoe",
        intermediate_size=expert_fields(fields)["moe_intermediate_size"],
        attention_bias=fields.has_tensor("blk.0.attn_output.bias"),
        lm_head_bias=fields.has_tensor("output.bias"),
        sliding_window=fields.optional_integer("attention.sliding_window"),
    )


def _llama4(fields: ModelFields) -> dict[str, Any]:
    step = fields.integer("interleave_moe_layer_step", 1)
    return mixture(
        fields,
        "Llama4",
        "llama4_text",
        intermediate_size=expert_fields(fields)["moe_intermediate_size"],
        intermediate_size_mlp=fields.integer("feed_forward_length"),
        interleave_moe_layer_step=step,
        attention_chunk_size=fields.integer("attention.chunk_size", 8192),
        # There are two published models, and the one with 128 experts does not norm queries and keys.
        use_qk_norm=fields.integer("expert_count") != 128,
    )


def _deepseek2(fields: ModelFields) -> dict[str, Any]:
    experts = expert_fields(fields)
    counts = layer_counts(fields)
    scaling = rope_scaling(fields)
    if scaling is not None and (weight := yarn_weight(fields, 0.1)):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    has_correction = f"blk.{counts['num_hidden_layers'] - 1}.exp_probs_b.bias"
    # Older files do not say which function turns the router's logits into scores.
    scoring = fields.integer("expert_gating_func", 2 if fields.has_tensor(has_correction) else 1)
    differences = latent_attention(fields) | counts | {"rope_scaling": scaling}
    if scoring == _SIGMOID:
        return mixture(fields, "DeepseekV3", "deepseek_v3", **differences)
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return mixture(fields, "DeepseekV2", "deepseek_v2", topk_method=method, **differences)


def _mistral4(fields: ModelFields) -> dict[str, Any]:
    config = _deepseek2(fields)
    beta = fields.optional_positive("attention.temperature_scale")
    if config["rope_scaling"] is not None and beta is not None:
        config["rope_scaling"] |= {"llama_4_scaling_beta": beta}
    return config | {"model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"]}


def _sparse_latent(fields: ModelFields, architecture: str, model_type: str) -> dict[str, Any]:
    """Return the fields of sparse latent attention, in which only some layers have an indexer."""
    config = _deepseek2(fields)
    indexers = [
        fields.has_tensor(f"blk.{i}.indexer.attn_k.weight")
        for i in range(config["num_hidden_layers"])
    ]
    return config | {
        "model_type": model_type,
        "architectures": [f"{architecture}ForCausalLM"],
        "index_n_heads": fields.integer("attention.indexer.head_count"),
        "index_head_dim": fields.integer("attention.indexer.key_length"),
        "index_topk": fields.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if has_indexer else "shared" for has_indexer in indexers],
    }


def _exaone_moe(fields: ModelFields) -> dict[str, Any]:
    counts = layer_counts(fields)
    return mixture(
        fields,
        "ExaoneMoe",
        "exaone_moe",
        **counts,
        layer_types=layer_types(fields, default_period=4)[: counts["num_hidden_layers"]],
        sliding_window=fields.integer("attention.sliding_window"),
    )


def _bailingmoe(fields: ModelFields) -> dict[str, Any]:
    num_shared = expert_fields(fields)["n_shared_experts"]
    return mixture(fields, "BailingMoe", "bailing_moe", num_shared_experts=num_shared)


def _bailingmoe2(fields: ModelFields) -> dict[str, Any]:
    return mixture(
        fields,
        "BailingMoeV2",
        "bailing_moe_v2",
        **layer_counts(fields),
        **partial_rotary(fields),
        use_qk_norm=fields.has_tensor("blk.0.attn_q_norm.weight"),
        attention_bias=fields.has_tensor("blk.0.attn_qkv.bias"),
        use_bias=fields.has_tensor("blk.0.attn_output.bias"),
    )


def _mimo2(fields: ModelFields) -> dict[str, Any]:
    types = layer_types(fields, 6)
    counts = fields.of_layers("attention.head_count_kv")
    kv_heads, has_sinks = {}, {}
    for kind in ("full_attention", "sliding_attention"):
        layers = [i for i, each in enumerate(types) if each == kind]
        found = {counts[i] for i in layers}
        if len(found) > 1:
            needed = "one number for layers with a window, and one for the others"
            raise fields.wrong("attention.head_count_kv", needed, counts)
        kv_heads[kind] = min(found, default=max(counts))
        has_sinks[kind] = any(fields.has_tensor(f"blk.{i}.attn_sinks.weight") for i in layers)
    return mixture(
        fields,
        "MiMoV2Flash",
        "mimo_v2_flash",
        layer_types=types,
        num_key_value_heads=kv_heads["full_attention"],
        swa_num_key_value_heads=kv_heads["sliding_attention"],
        add_full_attention_sink_bias=has_sinks["full_attention"],
        add_swa_attention_sink_bias=has_sinks["sliding_attention"],
        mlp_layer_types=_mlp_types(fields),
        v_head_dim=fields.integer("attention.value_length", fields.head_dim),
        # The file counts the tokens before the current one, as the published configs do.
        sliding_window_size=fields.integer("attention.sliding_window"),
        swa_rope_theta=fields.positive("rope.freq_base_swa", 10_000.0),
        norm_topk_prob=fields.boolean("expert_weights_norm", True),
        # Converters omit the factor of the published models.
        attention_value_scale=fields.positive("attention.value_scale", 0.707),
        **partial_rotary(fields),
    )


def _afmoe(fields: ModelFields) -> dict[str, Any]:
    experts = expert_fields(fields)
    return mixture(
        fields,
        "Afmoe",
        "afmoe",
        num_dense_layers=experts["first_k_dense_replace"],
        num_shared_experts=experts["n_shared_experts"],
        route_scale=experts["routed_scaling_factor"],
        layer_types=layer_types(fields, default_period=4),
        sliding_window=fields.integer("attention.sliding_window"),
        # Files of this architecture always scale embeddings.
        mup_enabled=True,
    )


def _laguna(fields: ModelFields) -> dict[str, Any]:
    experts, gate = expert_fields(fields), fields.gguf.tensors.get("blk.0.attn_gate.weight")
    heads = fields.of_layers("attention.head_count")
    window = fields.optional_integer("attention.sliding_window")
    # Without a pattern, the first one of every four layers has no window.
    kinds = [
        "sliding_attention" if window and i % 4 else "full_attention" for i in range(len(heads))
    ]
    if fields.get("attention.sliding_window_pattern") is not None:
        kinds = layer_types(fields, default_period=4)
    return mixture(
        fields,
        "Laguna",
        "laguna",
        num_attention_heads_per_layer=heads,
        gating="per-head" if gate is None or gate.shape[0] == heads[0] else "per-element",
        layer_types=kinds,
        sliding_window=window or 512,
        mlp_layer_types=_mlp_types(fields),
        moe_routed_scaling_factor=experts["routed_scaling_factor"],
        rope_scaling=None,
        rope_parameters=_ropes(fields, rotary_dim(fields), rope_scaling(fields)),
    )


def _step35(fields: ModelFields) -> dict[str, Any]:
    experts, counts = expert_fields(fields), layer_counts(fields)
    kinds, heads = layer_types(fields, default_period=4), fields.of_layers("attention.head_count")
    of_kinds = {}
    for kind in ("full_attention", "sliding_attention"):
        found = {n for n, each in zip(heads, kinds, strict=True) if each == kind}
        if len(found) > 1:
            needed = "one number for layers with a window, and one for the others"
            raise fields.wrong("attention.head_count", needed, heads)
        of_kinds[kind] = min(found, default=max(heads))
    # Layers without a window rotate half of the elements that the file says.
    rotated, scaling = rotary_dim(fields) // 2, rope_scaling(fields)
    if scaling is not None:
        factors = {
            name: scaling[name] for name in ("short_factor", "long_factor") if name in scaling
        }
        scaling |= {name: values[: rotated // 2] for name, values in factors.items()}
    return mixture(
        fields,
        "Step3p5",
        "step3p5",
        **counts,
        num_attention_heads=of_kinds["full_attention"],
        num_sliding_attention_heads=of_kinds["sliding_attention"],
        num_attention_groups=fields.largest("attention.head_count_kv"),
        layer_types=kinds,
        sliding_window=fields.integer("attention.sliding_window"),
        mlp_layer_types=_mlp_types(fields),
        moe_router_scaling_factor=experts["routed_scaling_factor"],
        share_expert_dim=experts["shared_expert_intermediate_size"],
        swiglu_limits=gate_limits(fields, "swiglu_clamp_exp"),
        swiglu_limits_shared=gate_limits(fields, "swiglu_clamp_shexp"),
        rope_scaling=None,
        rope_parameters=_ropes(fields, rotated, scaling),
    )


def _ropes(
    fields: ModelFields, rotated: int, scaling: dict[str, Any] | None
) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of a model whose layers with a window have their own rotation.

    Args:
        fields: The model's metadata.
        rotated: The number of elements that layers without a window rotate.
        scaling: The scaling of their frequencies.
    """
    theta = fields.positive("rope.freq_base", 10_000.0)
    local = fields.integer("rope.dimension_count_swa", rotary_dim(fields))
    return {
        "full_attention": (scaling or {"rope_type": "default"})
        | {"rope_theta": theta, "partial_rotary_factor": rotated / fields.head_dim},
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": fields.positive("rope.freq_base_swa", theta),
            "partial_rotary_factor": local / fields.head_dim,
        },
    }


MIXTURES: dict[str, Translate] = {
    "afmoe": _afmoe,
    "bailingmoe": _bailingmoe,
    "bailingmoe2": _bailingmoe2,
    "cohere2moe": _cohere2_moe,
    "dbrx": _dbrx,
    "mimo2": _mimo2,
    "deepseek": named(mixture, "Deepseek", "deepseek"),
    "deepseek2": _deepseek2,
    "deepseek32": named(_sparse_latent, "DeepseekV32", "deepseek_v32"),
    "dots1": named(mixture, "Dots1", "dots1"),
    "ernie4_5-moe": _ernie4_5_moe,
    "exaone-moe": _exaone_moe,
    "glm-dsa": named(_sparse_latent, "GlmMoeDsa", "glm_moe_dsa"),
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "granitemoe": _granite_moe,
    "hunyuan-moe": _hunyuan_moe,
    "hy_v3": _hunyuan3,
    "laguna": _laguna,
    "llama4": _llama4,
    "mellum": _mellum,
    "minimax-m2": _minimax_m2,
    "minimax-m3": _minimax_m3,
    "mistral4": _mistral4,
    "olmoe": _olmoe,
    "phimoe": _phimoe,
    "qwen2moe": named(mixture, "Qwen2Moe", "qwen2_moe", norm_topk_prob=False),
    "qwen3moe": _qwen3_moe,
    "qwen3vlmoe": _qwen3_vl_moe,
    "step35": _step35,
}
