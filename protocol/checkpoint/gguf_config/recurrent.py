"""Translate the metadata of models with recurrent layers."""

from typing import Any

import numpy as np

from .fields import ModelFields, Translate
from .parts import (
    expert_fields,
    gate_limits,
    granite,
    latent_attention,
    layer_counts,
    mixture,
    partial_rotary,
)


def _lfm2(fields: ModelFields) -> dict[str, Any]:
    attends = [count > 0 for count in fields.of_layers("attention.head_count_kv")]
    return {
        "model_type": "lfm2",
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["full_attention" if x else "conv" for x in attends],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": fields.integer("shortconv.l_cache"),
        "conv_bias": any(
            fields.has_tensor(f"blk.{i}.shortconv.conv.bias") for i in range(len(attends))
        ),
    }


def _lfm2_moe(fields: ModelFields) -> dict[str, Any]:
    has_correction = any(
        fields.has_tensor(f"blk.{i}.exp_probs_b.bias") for i in range(fields.num_layers)
    )
    return _lfm2(fields) | mixture(
        fields,
        "Lfm2Moe",
        "lfm2_moe",
        num_dense_layers=fields.integer("leading_dense_block_count", 0, minimum=0),
        norm_topk_prob=True,
        use_expert_bias=has_correction,
    )


def _mamba2(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of Mamba-2 layers."""
    num_heads = fields.integer("ssm.time_step_rank")
    size = fields.integer("ssm.inner_size")

    def has_bias(module: str) -> bool:
        return any(fields.has_tensor(f"blk.{i}.{module}.bias") for i in range(fields.num_layers))

    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_d_ssm": size,
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_conv_bias": has_bias("ssm_conv1d"),
        "mamba_proj_bias": has_bias("ssm_in"),
    }


def _pure_mamba2(fields: ModelFields) -> dict[str, Any]:
    layers = _mamba2(fields)
    return {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_heads": layers["mamba_n_heads"],
        "head_dim": layers["mamba_d_head"],
        "n_groups": layers["mamba_n_groups"],
        "state_size": layers["mamba_d_state"],
        "conv_kernel": layers["mamba_d_conv"],
        "use_conv_bias": layers["mamba_conv_bias"],
        "use_bias": layers["mamba_proj_bias"],
        # The file says a million because the model has no limit.
        "max_position_embeddings": None,
    }


def _mamba(fields: ModelFields) -> dict[str, Any]:
    # A Falcon-Mamba has norms without weights.
    is_falcon = fields.boolean("ssm.dt_b_c_rms", False)
    return {
        "model_type": "falcon_mamba" if is_falcon else "mamba",
        "architectures": ["FalconMambaForCausalLM" if is_falcon else "MambaForCausalLM"],
        "state_size": fields.integer("ssm.state_size"),
        "conv_kernel": fields.integer("ssm.conv_kernel"),
        "time_step_rank": fields.integer("ssm.time_step_rank"),
        "use_conv_bias": fields.has_tensor("blk.0.ssm_conv1d.bias"),
        "use_bias": fields.has_tensor("blk.0.ssm_in.bias"),
        # The file says a million because the model has no limit.
        "max_position_embeddings": None,
    }


def _jamba(fields: ModelFields) -> dict[str, Any]:
    attends = [count > 0 for count in fields.of_layers("attention.head_count_kv")]
    num_layers, size = fields.num_layers, fields.integer("embedding_length")
    routers = [i for i in range(num_layers) if fields.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    first, second = (*routers, num_layers, num_layers)[:2]
    inner = fields.integer("ssm.inner_size")
    if inner % size:
        raise fields.wrong("ssm.inner_size", f"a multiple of the hidden size {size}", inner)

    def has_bias(module: str) -> bool:
        return any(fields.has_tensor(f"blk.{i}.{module}.bias") for i in range(num_layers))

    return {
        "model_type": "jamba",
        "architectures": ["JambaForCausalLM"],
        "layer_types": ["attention" if x else "mamba" for x in attends],
        "num_experts": fields.integer("expert_count", 1) if routers else 1,
        "num_experts_per_tok": fields.integer("expert_used_count", 1),
        "expert_layer_offset": first,
        "expert_layer_period": second - first if len(routers) > 1 else num_layers,
        "mamba_expand": inner // size,
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_dt_rank": fields.integer("ssm.time_step_rank"),
        "mamba_conv_bias": has_bias("ssm_conv1d"),
        "mamba_proj_bias": has_bias("ssm_in"),
    }


def _bamba(fields: ModelFields, attends: list[bool]) -> dict[str, Any]:
    rotary_dim = fields.integer("rope.dimension_count", fields.head_dim)
    return _mamba2(fields) | {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "layers_block_type": ["attention" if x else "mamba" for x in attends],
        "partial_rotary_factor": rotary_dim / fields.head_dim,
    }


def _granite_hybrid(fields: ModelFields) -> dict[str, Any]:
    attends = [count > 0 for count in fields.of_layers("attention.head_count_kv")]
    if fields.boolean("rope.scaling.finetuned", False):
        return _bamba(fields, attends)
    shared = fields.largest("feed_forward_length")
    experts: dict[str, Any] = {"num_local_experts": 0}
    if fields.optional_integer("expert_count"):
        experts = expert_fields(fields)
        experts["num_local_experts"] = experts["num_experts"]
        experts["intermediate_size"] = experts["moe_intermediate_size"]
        shared = experts["shared_intermediate_size"]
    else:
        shared = fields.integer("expert_shared_feed_forward_length", shared)
    return {
        **granite(fields),
        **_mamba2(fields),
        **experts,
        "model_type": "granitemoehybrid",
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["attention" if x else "mamba" for x in attends],
        "position_embedding_type": "nope",
        "shared_intermediate_size": shared,
    }


def _falcon_h1(fields: ModelFields) -> dict[str, Any]:
    # The converter has applied the multipliers to the weights.
    return _mamba2(fields) | {
        "model_type": "falcon_h1",
        "architectures": ["FalconH1ForCausalLM"],
        "mamba_rms_norm": fields.has_tensor("blk.0.ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": fields.has_tensor("blk.0.ssm_out.bias"),
    }


def _nemotron_h(fields: ModelFields) -> dict[str, Any]:
    counts = layer_counts(fields)
    num_layers = counts["num_hidden_layers"]
    attention, mlp = (
        fields.of_layers(name) for name in ("attention.head_count_kv", "feed_forward_length")
    )

    def has_bias(*modules: str) -> bool:
        return any(
            fields.has_tensor(f"blk.{i}.{module}.bias")
            for i in range(num_layers)
            for module in modules
        )

    kinds = []
    for i in range(num_layers):
        if attention[i]:
            kinds.append("attention")
        elif not mlp[i]:
            kinds.append("mamba")
        else:
            kinds.append("moe" if fields.has_tensor(f"blk.{i}.ffn_gate_inp.weight") else "mlp")
    mamba = _mamba2(fields)
    config: dict[str, Any] = {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **counts,
        "layers_block_type": kinds,
        "mlp_hidden_act": "relu2",
        "hidden_act": "relu2",
        "mlp_bias": has_bias("ffn_down", "ffn_down_shexp"),
        "attention_bias": has_bias("attn_q"),
        "mamba_num_heads": mamba["mamba_n_heads"],
        "mamba_head_dim": mamba["mamba_d_head"],
        "n_groups": mamba["mamba_n_groups"],
        "ssm_state_size": mamba["mamba_d_state"],
        "conv_kernel": mamba["mamba_d_conv"],
        "use_conv_bias": mamba["mamba_conv_bias"],
        "use_bias": mamba["mamba_proj_bias"],
    }
    if "moe" not in kinds:
        return config
    by_layer = "expert_feed_forward_length", "expert_used_count"
    experts = expert_fields(fields.with_largest(*by_layer))
    config |= experts | {
        "n_routed_experts": experts["num_experts"],
        "moe_shared_expert_intermediate_size": experts["shared_expert_intermediate_size"],
        "moe_latent_size": fields.optional_integer("moe_latent_size"),
    }
    if not any(isinstance(fields.get(name), np.ndarray) for name in by_layer):
        return config
    sizes, chosen = map(fields.of_layers, by_layer)
    blocks: dict[str, list[dict[str, int]]] = {
        "moe": [
            {"moe_intermediate_size": size, "num_experts_per_tok": count}
            for size, count in zip(sizes, chosen, strict=True)
        ],
        "mlp": [{"intermediate_size": size} for size in mlp],
    }
    return config | {
        "model_type": "nemotron_h_puzzle",
        "architectures": ["NemotronHPuzzleForCausalLM"],
        "block_configs": [
            {"block_type": kind} | (blocks[kind][i] if kind in blocks else {})
            for i, kind in enumerate(kinds)
        ],
    }


def _kimi_linear(fields: ModelFields) -> dict[str, Any]:
    attends = [count > 0 for count in fields.of_layers("attention.head_count_kv")]
    return mixture(
        fields,
        "KimiLinear",
        "kimi_linear",
        **latent_attention(fields),
        layer_types=["full_attention" if x else "linear_attention" for x in attends],
        norm_topk_prob=fields.boolean("expert_weights_norm", True),
        # The file has a single head count for layers of both kinds.
        linear_num_heads=fields.num_heads,
        linear_head_dim=fields.integer("kda.head_dim"),
        linear_conv_kernel_dim=fields.integer("ssm.conv_kernel"),
    )


def _bailingmoe3(fields: ModelFields) -> dict[str, Any]:
    counts, experts = layer_counts(fields), expert_fields(fields)
    num_layers = counts["num_hidden_layers"]
    attends = [count > 0 for count in fields.of_layers("attention.head_count_kv")][:num_layers]
    first = experts["first_k_dense_replace"]
    return mixture(
        fields,
        "BailingHybrid",
        "bailing_hybrid",
        **counts,
        **latent_attention(fields),
        layer_types=["full_attention" if x else "linear_attention" for x in attends],
        mlp_layer_types=["sparse" if i >= first else "dense" for i in range(num_layers)],
        linear_num_heads=fields.num_heads,
        linear_head_dim=fields.integer("kda.head_dim"),
        linear_conv_kernel_dim=fields.integer("ssm.conv_kernel"),
        kda_safe_gate=fields.boolean("kda.safe_gate", True),
        kda_lower_bound=fields.get("kda.gate_lower_bound", -5.0),
        expert_swiglu_limit_list=gate_limits(fields, "swiglu_clamp_exp"),
        share_expert_swiglu_limit_list=gate_limits(fields, "swiglu_clamp_shexp"),
    )


def _gated_delta_net(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of Qwen's models with gated delta nets."""
    counts = layer_counts(fields)
    num_layers = counts["num_hidden_layers"]
    interval = fields.integer("full_attention_interval", 4)
    recurrent = [bool((i + 1) % interval) for i in range(num_layers)]
    if fields.get("attention.recurrent_layers") is not None:
        recurrent = [bool(x) for x in fields.of_layers("attention.recurrent_layers")[:num_layers]]
    num_heads = fields.integer("ssm.time_step_rank")
    return {
        **counts,
        **partial_rotary(fields),
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent],
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": fields.integer("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
    }


def _qwen3_next(fields: ModelFields) -> dict[str, Any]:
    experts = mixture(fields, "Qwen3Next", "qwen3_next", norm_topk_prob=True)
    return _gated_delta_net(fields) | experts | {"linear_has_split_projections": True}


def _qwen3_5(fields: ModelFields) -> dict[str, Any]:
    config = _gated_delta_net(fields)
    return config | {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "linear_has_tiled_heads": (
            config["linear_num_key_heads"] != config["linear_num_value_heads"]
        ),
    }


def _qwen3_5_moe(fields: ModelFields) -> dict[str, Any]:
    experts = mixture(fields, "Qwen3_5Moe", "qwen3_5_moe_text", norm_topk_prob=True)
    return _qwen3_5(fields) | experts


RECURRENT: dict[str, Translate] = {
    "bailingmoe3": _bailingmoe3,
    "falcon-h1": _falcon_h1,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2_moe,
    "mamba": _mamba,
    "mamba2": _pure_mamba2,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5_moe,
    "qwen3next": _qwen3_next,
}
