"""Translate the metadata of models with recurrent layers."""

from typing import Any, Final

import numpy as np

from ...errors import CheckpointError
from .declared import Rule, boolean, declared, has, integer, optional_integer, positive
from .fields import ModelFields, Translate
from .parts import (
    expert_fields,
    gate_limit,
    gate_limits,
    granite,
    indexers,
    latent_attention,
    layer_counts,
    optional_axes,
    partial_rotary,
    rotary_axes,
)


def _kinds(attention: str, other: str) -> Rule:
    """Return the rule of a list with the kind of each layer: `attention` for layers with keys and values."""

    def kinds(fields: ModelFields) -> list[str]:
        counts = fields.of_layers("attention.head_count_kv")
        return [attention if count else other for count in counts]

    return kinds


def _any_layer(tensor: str) -> Rule:
    """Return the rule of a field that is true if at least one layer has a tensor."""
    return lambda fields: fields.has_tensor_of_a_layer(tensor)


_LFM2: Final = declared(
    "lfm2",
    "Lfm2ForCausalLM",
    layer_types=_kinds("full_attention", "conv"),
    block_auto_adjust_ff_dim=False,
    conv_L_cache=integer("shortconv.l_cache"),
    conv_bias=_any_layer("shortconv.conv.bias"),
)


def _mamba2(fields: ModelFields) -> dict[str, Any]:
    num_heads = fields.integer("ssm.time_step_rank")
    size = fields.integer("ssm.inner_size")
    return {
        "mamba_n_heads": num_heads,
        "mamba_d_head": size // num_heads,
        "mamba_d_ssm": size,
        "mamba_n_groups": fields.integer("ssm.group_count"),
        "mamba_d_state": fields.integer("ssm.state_size"),
        "mamba_d_conv": fields.integer("ssm.conv_kernel"),
        "mamba_conv_bias": fields.has_tensor_of_a_layer("ssm_conv1d.bias"),
        "mamba_proj_bias": fields.has_tensor_of_a_layer("ssm_in.bias"),
    }


def _pure_mamba2(fields: ModelFields) -> dict[str, Any]:
    layers = _mamba2(fields)
    return {
        "num_heads": layers["mamba_n_heads"],
        "head_dim": layers["mamba_d_head"],
        "n_groups": layers["mamba_n_groups"],
        "state_size": layers["mamba_d_state"],
        "conv_kernel": layers["mamba_d_conv"],
        "use_conv_bias": layers["mamba_conv_bias"],
        "use_bias": layers["mamba_proj_bias"],
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


def _jamba_sizes(fields: ModelFields) -> dict[str, Any]:
    num_layers, size = fields.num_layers, fields.integer("embedding_length")
    routers = [i for i in range(num_layers) if fields.has_tensor(f"blk.{i}.ffn_gate_inp.weight")]
    first, second = (*routers, num_layers, num_layers)[:2]
    inner = fields.integer("ssm.inner_size")
    if inner % size:
        raise fields.wrong("ssm.inner_size", f"a multiple of the hidden size {size}", inner)
    return {
        "num_experts": fields.integer("expert_count", 1) if routers else 1,
        "expert_layer_offset": first,
        "expert_layer_period": second - first if len(routers) > 1 else num_layers,
        "mamba_expand": inner // size,
    }


_BAMBA: Final = declared(
    "bamba",
    "BambaForCausalLM",
    _mamba2,
    partial_rotary,
    layers_block_type=_kinds("attention", "mamba"),
)


def _granite_hybrid(fields: ModelFields) -> dict[str, Any]:
    if fields.boolean("rope.scaling.finetuned", False):
        return _BAMBA(fields)
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
        "layer_types": _kinds("attention", "mamba")(fields),
        "position_embedding_type": "nope",
        "shared_intermediate_size": shared,
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


def _kda(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of Kimi delta attention. The file has a single head count for layers of both kinds."""
    return {
        "linear_num_heads": fields.num_heads,
        # Forks of llama.cpp have another name for it.
        "linear_head_dim": fields.integer(
            "kda.head_dim", fields.optional_integer("ssm.state_size")
        ),
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
    }


def _kimi_k3_parts(fields: ModelFields) -> dict[str, Any]:
    own = {
        "num_heads": fields.num_heads,
        "head_dim": fields.integer("kda.head_dim"),
        "short_conv_kernel_size": fields.integer("ssm.conv_kernel"),
        "use_full_rank_gate": fields.has_tensor_of_a_layer("ssm_g.weight"),
        "gate_lower_bound": fields.get("kda.gate_lower_bound"),
    }
    return {
        "linear_attn_config": own,
        "activation_situ_linear_beta": fields.number("activation.situ_linear_beta", 0.0),
    }


def _bailing_layers(fields: ModelFields) -> dict[str, Any]:
    num_layers = layer_counts(fields)["num_hidden_layers"]
    first = expert_fields(fields)["first_k_dense_replace"]
    return optional_axes(fields) | {
        "layer_types": _kinds("full_attention", "linear_attention")(fields)[:num_layers],
        "mlp_layer_types": ["sparse" if i >= first else "dense" for i in range(num_layers)],
        "kda_lower_bound": fields.get("kda.gate_lower_bound", -5.0),
        "expert_swiglu_limit_list": gate_limits(fields, "swiglu_clamp_exp"),
        "share_expert_swiglu_limit_list": gate_limits(fields, "swiglu_clamp_shexp"),
    }


def _grouped_keys(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of a GLM-5.3-Flash. Some converters name the number of keys in a group differently."""
    count = layer_counts(fields)["num_hidden_layers"]
    size = fields.integer("attention.indexer.block_size", 4)
    select_tail = fields.boolean("attention.indexer.kpool_select_tail", True)
    return {
        "layer_types": _kinds("full_attention", "linear_attention")(fields)[:count],
        "linear_lower_bound": fields.get("kda.gate_lower_bound", -5.0),
        "linear_head_dim": fields.integer(
            "kda.head_dim", fields.optional_integer("ssm.state_size")
        ),
        "index_kpool": fields.integer("attention.indexer.kpool", size),
        "index_kpool_always_select_tail": select_tail,
    }


def _minimax_layers(fields: ModelFields) -> dict[str, Any]:
    count = fields.num_layers
    interval = fields.integer("full_attention_interval", 8)
    recurrent = [(i + 1) % interval for i in range(count)]
    if fields.get("attention.recurrent_layers") is not None:
        recurrent = fields.of_layers("attention.recurrent_layers")
    # All blocks multiply their inputs by this factor, and add their outputs as they are.
    factor = fields.positive("residual_scale")
    return {
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent],
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        **{f"{name}_alpha_factor": factor for name in ("full_attn", "linear_attn", "mlp")},
        **{f"{name}_beta_factor": 1.0 for name in ("full_attn", "linear_attn", "mlp")},
    }


def _gated_delta_net(fields: ModelFields) -> dict[str, Any]:
    counts = layer_counts(fields)
    num_layers = counts["num_hidden_layers"]
    interval = fields.integer("full_attention_interval", 4)
    recurrent = [bool((i + 1) % interval) for i in range(num_layers)]
    if fields.get("attention.recurrent_layers") is not None:
        recurrent = [bool(x) for x in fields.of_layers("attention.recurrent_layers")[:num_layers]]
    num_heads = fields.integer("ssm.time_step_rank")
    has_axes = fields.get("rope.dimension_sections") is not None
    return {
        **counts,
        **partial_rotary(fields),
        **(rotary_axes(fields) if has_axes else {}),
        "layer_types": ["linear_attention" if x else "full_attention" for x in recurrent],
        "linear_num_key_heads": fields.integer("ssm.group_count"),
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": fields.integer("ssm.state_size"),
        "linear_value_head_dim": fields.integer("ssm.inner_size") // num_heads,
        "linear_conv_kernel_dim": fields.integer("ssm.conv_kernel"),
    }


def _has_tiled_heads(fields: ModelFields) -> bool:
    return fields.integer("ssm.group_count") != fields.integer("ssm.time_step_rank")


def _qwen4(fields: ModelFields) -> dict[str, Any]:
    key = "attention.compress_ratios"
    ratios = set(np.atleast_1d(fields.config.get(fields.prefix + key, 0)).tolist()) - {0}
    if len(ratios) != 1:
        raise fields.wrong(key, "one number other than 0 for all layers with attention", ratios)
    return {
        "hc_count": fields.integer("hyper_connection.count"),
        "hc_lowrank": fields.integer("hyper_connection.low_rank"),
        "indexer_n_heads": fields.integer("attention.indexer.head_count"),
        "indexer_kv_heads": 1,
        "indexer_head_dim": fields.integer("attention.indexer.key_length"),
        "indexer_budget": fields.integer("attention.indexer.top_k"),
        "indexer_compress_ratio": ratios.pop(),
        "indexer_has_two_matrices": True,
        "output_gate_type": "sigmoid",
        **_ngrams(fields),
    }


def _ngrams(fields: ModelFields) -> dict[str, Any]:
    layers = _unsigned(fields, "ple.layers")
    if not layers:
        return {}
    if len(layers) > 1:
        raise fields.wrong("ple.layers", "at most one layer", layers)
    longest, num_heads = fields.integer("ple.ngram_size"), fields.integer("ple.heads_per_ngram")
    count = (longest - 1) * num_heads
    sizes, offsets = (_unsigned(fields, f"ple.head_{x}", count) for x in ("vocab_sizes", "offsets"))
    if 0 in sizes or offsets != [sum(sizes[:i]) for i in range(count)]:
        raise fields.wrong("ple.head_offsets", f"the sums of ple.head_vocab_sizes {sizes}", offsets)
    table = fields.gguf.tensors.get("per_layer_token_embd.weight")
    if table is None or table.shape[0] < sum(sizes):
        raise CheckpointError(
            fields.gguf.path,
            f"tensor 'per_layer_token_embd.weight' must have {sum(sizes)} rows, which ple.head_vocab_sizes need",
        )
    return {
        "ple_layer_ids": [layers[0] + 1],
        "ngram_size": longest,
        "heads_per_ngram": num_heads,
        "ple_embed_dim": count * fields.integer("embedding_length_per_layer_input"),
        "ple_conv_kernel_size": fields.integer("ple.conv_kernel"),
        "ple_eos_token_id": fields.integer("ple.eos_token_id", minimum=0),
        "ngram_hashes": {
            "multipliers": _unsigned(fields, "ple.layer_multipliers", longest),
            "head_sizes": sizes,
            "num_rows": table.shape[0],
        },
    }


def _unsigned(fields: ModelFields, name: str, count: int | None = None) -> list[int]:
    """Return a list of int64 that are not negative. With `count`, it must have so many, and more are ignored."""
    values = fields.config.get(fields.prefix + name, np.empty(0, np.int64))
    if not isinstance(values, np.ndarray) or values.dtype.kind not in "iu":
        raise fields.wrong(name, "a list of integers", values)
    numbers: list[int] = values.tolist()
    is_short = count is not None and len(numbers) < count
    if is_short or min(numbers, default=0) < 0 or max(numbers, default=0) >= 1 << 63:
        raise fields.wrong(name, f"{count or 'a list of'} integers from 0 to 2^63 - 1", numbers)
    return numbers[:count]


_GLM5_NEXT: Final = declared(
    "glm5_next_text",
    "Glm5NextForCausalLM",
    expert_fields,
    layer_counts,
    latent_attention,
    _kda,
    indexers,
    _grouped_keys,
    hc_mult=integer("hyper_connection.count"),
    hc_sinkhorn_iters=integer("hyper_connection.sinkhorn_iterations"),
    hc_eps=positive("hyper_connection.epsilon"),
    swiglu_limit=gate_limit,
)
_KIMI_LINEAR: Final = declared(
    "kimi_linear",
    "KimiLinearForCausalLM",
    expert_fields,
    latent_attention,
    _kda,
    layer_types=_kinds("full_attention", "linear_attention"),
    norm_topk_prob=boolean("expert_weights_norm", True),
)

RECURRENT: Final[dict[str, Translate]] = {
    "bailingmoe3": declared(
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        expert_fields,
        layer_counts,
        latent_attention,
        _kda,
        _bailing_layers,
        kda_safe_gate=boolean("kda.safe_gate", True),
    ),
    "falcon-h1": declared(
        "falcon_h1",
        "FalconH1ForCausalLM",
        # The converter has applied the multipliers to the weights.
        _mamba2,
        mamba_rms_norm=has("blk.0.ssm_norm.weight"),
        mamba_norm_before_gate=False,
        projectors_bias=has("blk.0.ssm_out.bias"),
    ),
    # The names that forks of llama.cpp gave to GLM-5.3-Flash, and its own.
    "glm5-next": _GLM5_NEXT,
    "glm5next": _GLM5_NEXT,
    "granitehybrid": _granite_hybrid,
    "jamba": declared(
        "jamba",
        "JambaForCausalLM",
        _jamba_sizes,
        layer_types=_kinds("attention", "mamba"),
        num_experts_per_tok=integer("expert_used_count", 1),
        mamba_d_state=integer("ssm.state_size"),
        mamba_d_conv=integer("ssm.conv_kernel"),
        mamba_dt_rank=integer("ssm.time_step_rank"),
        mamba_conv_bias=_any_layer("ssm_conv1d.bias"),
        mamba_proj_bias=_any_layer("ssm_in.bias"),
    ),
    "kimi-k3": declared(
        "kimi_linear",
        "KimiLinearForCausalLM",
        _KIMI_LINEAR,
        _kimi_k3_parts,
        hidden_act="situ",
        activation_situ_beta=positive("activation.situ_beta"),
        attn_res_block_size=optional_integer("attn_res.block_size"),
        mla_use_output_gate=_any_layer("attn_gate.weight"),
        routed_expert_hidden_size=optional_integer("expert_latent_length"),
        latent_moe_use_norm=_any_layer("ffn_routed_norm.weight"),
    ),
    "kimi-linear": _KIMI_LINEAR,
    "lfm2": _LFM2,
    "lfm2moe": declared(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _LFM2,
        expert_fields,
        num_dense_layers=integer("leading_dense_block_count", 0, minimum=0),
        norm_topk_prob=True,
        use_expert_bias=_any_layer("exp_probs_b.bias"),
    ),
    "mamba": _mamba,
    # The file says a million tokens because the model has no limit.
    "mamba2": declared("mamba2", "Mamba2ForCausalLM", _pure_mamba2, max_position_embeddings=None),
    "minimax-01": declared("minimax", "MiniMaxForCausalLM", _minimax_layers, partial_rotary),
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "plamo2": declared(
        "plamo2",
        "Plamo2ForCausalLM",
        layer_types=_kinds("attention", "mamba"),
        mamba_d_state=integer("ssm.state_size"),
        mamba_d_conv=integer("ssm.conv_kernel"),
        mamba_num_heads=integer("ssm.time_step_rank"),
        attention_window_size=integer("attention.sliding_window", 0, minimum=0),
        has_whole_norm_weights=True,
    ),
    "qwen35": declared(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _gated_delta_net,
        linear_has_tiled_heads=_has_tiled_heads,
    ),
    "qwen35moe": declared(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _gated_delta_net,
        expert_fields,
        linear_has_tiled_heads=_has_tiled_heads,
        norm_topk_prob=True,
    ),
    "qwen3next": declared(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _gated_delta_net,
        expert_fields,
        norm_topk_prob=True,
        linear_has_split_projections=True,
    ),
    "qwen4exp": declared(
        "qwen4_exp_text",
        "Qwen4ExpForCausalLM",
        _gated_delta_net,
        expert_fields,
        _qwen4,
        linear_has_tiled_heads=_has_tiled_heads,
        norm_topk_prob=True,
    ),
}
