"""Translate the metadata of mixture-of-experts models."""

from typing import Any, Final

from .declared import boolean, declared, expert, has, integer, optional_integer, positive, windows
from .deepseek import SIGMOID
from .fields import ModelFields, Translate
from .parts import (
    denoising,
    expert_fields,
    gate_limits,
    granite,
    layer_counts,
    layer_types,
    optional_axes,
    partial_rotary,
    rope_scaling,
    ropes_by_type,
    rotary_axes,
    rotary_dim,
)


def _mellum_ropes(fields: ModelFields) -> dict[str, Any]:
    theta = fields.positive("rope.freq_base", 500_000.0)
    scaling = rope_scaling(fields) or {"rope_type": "default"}
    local = {"rope_type": "default", "rope_theta": fields.positive("rope.freq_base_swa", theta)}
    return {
        "full_attention": scaling | {"rope_theta": theta},
        "sliding_attention": local,
    }


def _mellum_layers(fields: ModelFields) -> list[str] | None:
    window = fields.optional_integer("attention.sliding_window")
    return layer_types(fields, default_period=4) if window else None


def _mlp_types(fields: ModelFields) -> list[str]:
    """Return `mlp_layer_types`: sparse for layers with a router."""
    routers = (f"blk.{i}.ffn_gate_inp.weight" for i in range(fields.num_layers))
    return ["sparse" if fields.has_tensor(router) else "dense" for router in routers]


def _decoder_mlp_types(fields: ModelFields) -> list[str]:
    """Return `mlp_layer_types` without layers for multi-token prediction."""
    return _mlp_types(fields)[: layer_counts(fields)["num_hidden_layers"]]


def _decoder_layer_types(fields: ModelFields) -> list[str]:
    """Return `layer_types` without layers for multi-token prediction."""
    return layer_types(fields, default_period=4)[: layer_counts(fields)["num_hidden_layers"]]


def _by_kind(fields: ModelFields, key: str, kinds: list[str]) -> tuple[int, int]:
    """Return the value of `key` for the layers without a window, and the value for the layers with one."""
    counts = fields.of_layers(key)
    numbers = []
    for kind in ("full_attention", "sliding_attention"):
        found = {n for n, each in zip(counts, kinds, strict=True) if each == kind}
        if len(found) > 1:
            needed = "one number for layers with a window, and one for the others"
            raise fields.wrong(key, needed, counts)
        numbers.append(min(found, default=max(counts)))
    return numbers[0], numbers[1]


def _cohere2_norms(fields: ModelFields) -> dict[str, Any]:
    is_rms = fields.optional_positive("attention.layer_norm_rms_epsilon") is not None
    layer_norm_eps = fields.optional_positive("attention.layer_norm_epsilon")
    return {"layer_norm_eps": layer_norm_eps} | ({} if is_rms else {"rms_norm_eps": None})


def _cohere2_scoring(fields: ModelFields) -> str:
    is_sigmoid = fields.integer("expert_gating_func", SIGMOID) == SIGMOID
    return "sigmoid" if is_sigmoid else "softmax"


def _dbrx(fields: ModelFields) -> dict[str, Any]:
    experts = expert_fields(fields)
    return {
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


def _minimax_m3_layers(fields: ModelFields) -> dict[str, Any]:
    kinds, layers = _mlp_types(fields), range(fields.num_layers)
    indexed = [fields.has_tensor(f"blk.{i}.indexer.q_proj.weight") for i in layers]
    dense_size = fields.integer("feed_forward_length")
    if "dense" in kinds:
        # Earlier converters wrote the size of the experts.
        dense_size = fields.gguf.tensors[f"blk.{kinds.index('dense')}.ffn_down.weight"].shape[1]
    return {
        "dense_intermediate_size": dense_size,
        "mlp_layer_types": kinds,
        "layer_types": ["minimax_m3_sparse" if each else "full_attention" for each in indexed],
    }


def _mimo2_layers(fields: ModelFields) -> dict[str, Any]:
    types = layer_types(fields, 6)
    num_kv_heads, num_local = _by_kind(fields, "attention.head_count_kv", types)
    sinks = {
        kind for i, kind in enumerate(types) if fields.has_tensor(f"blk.{i}.attn_sinks.weight")
    }
    return {
        "layer_types": types,
        "num_key_value_heads": num_kv_heads,
        "swa_num_key_value_heads": num_local,
        "add_full_attention_sink_bias": "full_attention" in sinks,
        "add_swa_attention_sink_bias": "sliding_attention" in sinks,
        "v_head_dim": fields.integer("attention.value_length", fields.head_dim),
        "swa_rope_theta": fields.positive("rope.freq_base_swa", 10_000.0),
        # Converters omit the factor of the published models.
        "attention_value_scale": fields.positive("attention.value_scale", 0.707),
    }


def _laguna_layers(fields: ModelFields) -> dict[str, Any]:
    gate = fields.gguf.tensors.get("blk.0.attn_gate.weight")
    heads = fields.of_layers("attention.head_count")
    window = fields.optional_integer("attention.sliding_window")
    # Without a pattern, the first one of every four layers has no window.
    kinds = [
        "sliding_attention" if window and i % 4 else "full_attention" for i in range(len(heads))
    ]
    if fields.get("attention.sliding_window_pattern") is not None:
        kinds = layer_types(fields, default_period=4)
    return {
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate is None or gate.shape[0] == heads[0] else "per-element",
        "layer_types": kinds,
        "sliding_window": window or 512,
        "rope_parameters": ropes_by_type(fields, rotary_dim(fields), rope_scaling(fields)),
    }


def _k2_horizon_experts(fields: ModelFields) -> dict[str, Any]:
    if not fields.optional_integer("expert_count"):
        return {"num_experts": 0}
    found = expert_fields(fields)
    first = found["first_k_dense_replace"]
    return {
        **found,
        "num_shared_experts": found["n_shared_experts"],
        "router_scaling_factor": found["routed_scaling_factor"],
        "mlp_only_layers": list(range(first)),
        "decoder_sparse_step": fields.integer("moe_every_n_layers", 1),
        "moe_gate_bias": fields.has_tensor(f"blk.{first}.exp_probs_b.bias"),
    }


def _smallthinker_layers(fields: ModelFields) -> dict[str, Any]:
    """Return the layers with rotations and windows: if there are windows, all but the first one of every four."""
    window = fields.optional_integer("attention.sliding_window")
    others = [int(i % 4 > 0) for i in range(fields.num_layers)]
    return {
        "rope_layout": others if window else None,
        "sliding_window_layout": others if window else None,
        "sliding_window_size": window,
    }


def _step35_layers(fields: ModelFields) -> dict[str, Any]:
    kinds = layer_types(fields, default_period=4)
    num_heads, num_local = _by_kind(fields, "attention.head_count", kinds)
    # Layers without a window rotate half of the elements that the file says.
    rotated, scaling = rotary_dim(fields) // 2, rope_scaling(fields)
    if scaling is not None:
        factors = {
            name: scaling[name] for name in ("short_factor", "long_factor") if name in scaling
        }
        scaling |= {name: values[: rotated // 2] for name, values in factors.items()}
    return {
        "num_attention_heads": num_heads,
        "num_sliding_attention_heads": num_local,
        "num_attention_groups": fields.largest("attention.head_count_kv"),
        "layer_types": kinds,
        "swiglu_limits": gate_limits(fields, "swiglu_clamp_exp"),
        "swiglu_limits_shared": gate_limits(fields, "swiglu_clamp_shexp"),
        "rope_parameters": ropes_by_type(fields, rotated, scaling),
    }


def _gpt_oss_scaling(fields: ModelFields) -> dict[str, Any]:
    # Without this factor, the default scaling of the family would apply.
    return (rope_scaling(fields) or {"rope_type": "default"}) | {"truncate": False}


_EXPERT_SIZE: Final = expert("moe_intermediate_size")
_NUM_SHARED: Final = expert("n_shared_experts")
_FACTOR: Final = expert("routed_scaling_factor")
_WINDOW: Final = integer("attention.sliding_window")
_OPTIONAL_WINDOW: Final = optional_integer("attention.sliding_window")
_NORMS_WEIGHTS: Final = boolean("expert_weights_norm", True)
_HAS_HEAD_NORMS: Final = has("blk.0.attn_q_norm.weight")

MIXTURES: Final[dict[str, Translate]] = {
    "afmoe": declared(
        "afmoe",
        "AfmoeForCausalLM",
        expert_fields,
        num_dense_layers=expert("first_k_dense_replace"),
        num_shared_experts=_NUM_SHARED,
        route_scale=_FACTOR,
        layer_types=windows(4),
        sliding_window=_WINDOW,
        # Files of this architecture always scale embeddings.
        mup_enabled=True,
    ),
    "arctic": declared(
        "arctic",
        "ArcticForCausalLM",
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
        moe_layer_frequency=1,
        parallel_attn_mlp_res=True,
    ),
    "bailingmoe": declared(
        "bailing_moe", "BailingMoeForCausalLM", expert_fields, num_shared_experts=_NUM_SHARED
    ),
    "bailingmoe2": declared(
        "bailing_moe_v2",
        "BailingMoeV2ForCausalLM",
        expert_fields,
        layer_counts,
        partial_rotary,
        optional_axes,
        use_qk_norm=_HAS_HEAD_NORMS,
        attention_bias=has("blk.0.attn_qkv.bias"),
        use_bias=has("blk.0.attn_output.bias"),
    ),
    "cohere2moe": declared(
        "cohere2_moe",
        "Cohere2MoeForCausalLM",
        expert_fields,
        layer_counts,
        _cohere2_norms,
        logit_scale=positive("logit_scale", 1.0),
        intermediate_size=_EXPERT_SIZE,
        prefix_dense_intermediate_size=optional_integer("feed_forward_length"),
        num_shared_experts=_NUM_SHARED,
        expert_selection_fn=_cohere2_scoring,
        layer_types=_decoder_layer_types,
        sliding_window=_WINDOW,
    ),
    "dbrx": declared("dbrx", "DbrxForCausalLM", _dbrx),
    "mimo2": declared(
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        expert_fields,
        partial_rotary,
        _mimo2_layers,
        mlp_layer_types=_mlp_types,
        # The file counts the tokens before the current one, as the published configs do.
        sliding_window_size=_WINDOW,
        norm_topk_prob=_NORMS_WEIGHTS,
    ),
    "dots1": declared("dots1", "Dots1ForCausalLM", expert_fields),
    "ernie4_5-moe": declared(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        expert_fields,
        moe_num_shared_experts=integer("expert_shared_count", 0, minimum=0),
        moe_layer_start_index=integer("leading_dense_block_count", 0, minimum=0),
        moe_layer_interval=integer("interleave_moe_layer_step", 1),
        use_bias=False,
    ),
    "exaone-moe": declared(
        "exaone_moe",
        "ExaoneMoeForCausalLM",
        expert_fields,
        layer_counts,
        layer_types=_decoder_layer_types,
        sliding_window=_WINDOW,
    ),
    "glm4moe": declared(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        expert_fields,
        layer_counts,
        partial_rotary,
        optional_axes,
        use_qk_norm=_HAS_HEAD_NORMS,
    ),
    "gpt-oss": declared(
        "gpt_oss",
        "GptOssForCausalLM",
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
        rope_scaling=_gpt_oss_scaling,
        sliding_window=integer("attention.sliding_window", 128),
        attention_bias=True,
    ),
    "granitemoe": declared(
        "granitemoeshared",
        "GraniteMoeSharedForCausalLM",
        granite,
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
    ),
    "grok": declared(
        "grok-1",
        "Grok1ForCausalLM",
        expert_fields,
        residual_moe=has("blk.0.ffn_up.weight"),
        attn_logit_softcapping=positive("attn_logit_softcapping", 30.0),
        router_logit_softcapping=positive("router_logit_softcapping", 30.0),
        final_logit_softcapping=lambda fields: fields.optional_positive("final_logit_softcapping"),
        attn_output_multiplier=positive("attention.output_scale", 128**-0.5),
        embedding_multiplier_scale=positive("embedding_scale", 78.38367176906169),
        output_multiplier_scale=positive("logit_scale", 0.5773502691896257),
    ),
    "grovemoe": declared(
        "grove_moe",
        "GroveMoeForCausalLM",
        expert_fields,
        parallel_expert_intermediate_size=integer("expert_chunk_feed_forward_length"),
        num_experts_per_group=integer("experts_per_group"),
        expert_group_scale=positive("expert_group_scale", 0.05),
    ),
    "hunyuan-moe": declared(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
        num_shared_expert=_NUM_SHARED,
    ),
    "hy_v3": declared(
        "hy_v3",
        "HYV3ForCausalLM",
        expert_fields,
        layer_counts,
        num_shared_experts=_NUM_SHARED,
        router_scaling_factor=_FACTOR,
        norm_topk_prob=_NORMS_WEIGHTS,
        mlp_layer_types=_decoder_mlp_types,
    ),
    "k2-horizon": declared(
        "k2_horizon",
        "K2HorizonForCausalLM",
        _k2_horizon_experts,
        layernorm_num_groups=integer("attention.group_norm_groups", 1),
        rope_head_dim=rotary_dim,
        rope_is_contiguous=lambda _: True,
        query_key_norm=has("blk.0.attn_q_norm.weight"),
        attention_gate_func=lambda fields: (
            "softplus" if fields.has_tensor("blk.0.attn_gate.weight") else None
        ),
    ),
    "laguna": declared(
        "laguna",
        "LagunaForCausalLM",
        expert_fields,
        _laguna_layers,
        mlp_layer_types=_mlp_types,
        moe_routed_scaling_factor=_FACTOR,
        rope_scaling=None,
    ),
    "llama4": declared(
        "llama4_text",
        "Llama4ForCausalLM",
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
        intermediate_size_mlp=integer("feed_forward_length"),
        interleave_moe_layer_step=integer("interleave_moe_layer_step", 1),
        attention_chunk_size=integer("attention.chunk_size", 8192),
        # There are two published models, and the one with 128 experts does not norm queries and keys.
        use_qk_norm=lambda fields: fields.integer("expert_count") != 128,
    ),
    "maple": declared(
        "maple",
        "MapleForCausalLM",
        expert_fields,
        partial_rotary,
        norm_topk_prob=True,
        layer_types=windows(4),
        sliding_window=_WINDOW,
        # Only layers with windows rotate keys.
        rope_theta=lambda fields: fields.positive(
            "rope.freq_base_swa", fields.positive("rope.freq_base", 10_000.0)
        ),
        swiglu_limits=lambda fields: gate_limits(fields, "swiglu_clamp_exp"),
    ),
    "mellum": declared(
        "mellum",
        "MellumForCausalLM",
        expert_fields,
        norm_topk_prob=True,
        layer_types=_mellum_layers,
        sliding_window=_OPTIONAL_WINDOW,
        rope_parameters=_mellum_ropes,
        rope_scaling=None,
        mlp_layer_types=_mlp_types,
    ),
    "llada-moe": declared(
        "llada_moe",
        "LLaDAMoEModelLM",
        expert_fields,
        denoising,
        expert_intermediate_size=expert("moe_intermediate_size"),
        norm_topk_prob=False,
    ),
    "minimax-m2": declared(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        expert_fields,
        rotary_dim=rotary_dim,
        intermediate_size=_EXPERT_SIZE,
    ),
    "minimax-m3": declared(
        "minimax_m3",
        "MiniMaxM3SparseForCausalLM",
        expert_fields,
        _minimax_m3_layers,
        rotary_dim=rotary_dim,
        intermediate_size=_EXPERT_SIZE,
        index_n_heads=integer("attention.indexer.head_count", 4),
        index_head_dim=integer("attention.indexer.key_length", 128),
        index_topk_blocks=integer("attention.indexer.top_k", 16),
        index_block_size=integer("attention.indexer.block_size", 128),
        index_local_blocks=integer("attention.indexer.local_blocks", 1, minimum=0),
    ),
    "olmoe": declared(
        "olmoe",
        "OlmoeForCausalLM",
        expert_fields,
        norm_topk_prob=False,
        intermediate_size=_EXPERT_SIZE,
    ),
    "phimoe": declared(
        "phimoe",
        "PhiMoEForCausalLM",
        expert_fields,
        intermediate_size=_EXPERT_SIZE,
        attention_bias=has("blk.0.attn_output.bias"),
        lm_head_bias=has("output.bias"),
        sliding_window=_OPTIONAL_WINDOW,
    ),
    "qwen2moe": declared("qwen2_moe", "Qwen2MoeForCausalLM", expert_fields, norm_topk_prob=False),
    "qwen3moe": declared("qwen3_moe", "Qwen3MoeForCausalLM", expert_fields, norm_topk_prob=True),
    "qwen3vlmoe": declared(
        "qwen3_moe", "Qwen3MoeForCausalLM", expert_fields, rotary_axes, norm_topk_prob=True
    ),
    "rnd1": declared("rnd1", "RND1LM", expert_fields, denoising, norm_topk_prob=True),
    "smallthinker": declared(
        "smallthinker",
        "SmallThinkerForCausalLM",
        _smallthinker_layers,
        moe_num_primary_experts=integer("expert_count"),
        moe_num_active_primary_experts=integer("expert_used_count"),
        moe_ffn_hidden_size=_EXPERT_SIZE,
        moe_primary_router_apply_softmax=lambda fields: (
            fields.integer("expert_gating_func", 1) != SIGMOID
        ),
    ),
    "step35": declared(
        "step3p5",
        "Step3p5ForCausalLM",
        expert_fields,
        layer_counts,
        _step35_layers,
        sliding_window=_WINDOW,
        mlp_layer_types=_mlp_types,
        moe_router_scaling_factor=_FACTOR,
        share_expert_dim=expert("shared_expert_intermediate_size"),
        rope_scaling=None,
    ),
}
