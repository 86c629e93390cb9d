"""The names of a GGUF file's tensors in a Hugging Face checkpoint."""

import re

_MODULES = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "position_embd": "model.embed_positions",
    "token_types": "model.embed_token_types",
    "output_norm": "model.norm",
    "enc.output_norm": "model.norm",
    "output": "lm_head",
    "cls": "score_head.dense",
    "cls.norm": "score_head.norm",
    "cls.output": "score_head.output",
    "output_res_score": "model.head_res_query",
    "output_hc_norm": "model.head_hc.hc_norm",
    "output_hc_down": "model.head_hc.input_mix_weight_down",
    "output_hc_up": "model.head_hc.input_mix_weight_up",
    "altup_proj": "model.altup_projections.{part}",
    "altup_unembd_proj": "model.altup_unembed_projections.{part}",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj.{part}",
    "attn_v_b": "self_attn.v_b_proj.{part}",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{part}.gate_proj",
    "ffn_up_exps": "mlp.experts.{part}.up_proj",
    "ffn_gate_up_exps": "mlp.experts.{part}.gate_up_proj",
    "ffn_down_exps": "mlp.experts.{part}.down_proj",
    **{f"ffn_{x}_chexps": f"mlp.chunk_experts.{{part}}.{x}_proj" for x in ("gate", "up", "down")},
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_latent_down": "mlp.to_latent",
    "ffn_latent_up": "mlp.from_latent",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.k_proj": "self_attn.indexer.k_proj",
    "indexer.proj": "self_attn.indexer.weights_proj",
    "indexer.q_norm": "self_attn.indexer.q_norm",
    "indexer.q_proj": "self_attn.indexer.q_proj",
    "shortconv.in_proj": "mixer.in_proj",
    "shortconv.conv": "mixer.conv1d",
    "shortconv.out_proj": "mixer.out_proj",
    "ssm_in": "mixer.in_proj",
    "ssm_conv1d": "mixer.conv1d",
    "ssm_norm": "mixer.norm",
    "ssm_out": "mixer.out_proj",
}
_GEMMA_MODULES = _LAYER_MODULES | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA3N_MODULES = _GEMMA_MODULES | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4_MODULES = _GEMMA_MODULES | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_exps": "experts.{part}.gate_proj",
    "ffn_up_exps": "experts.{part}.up_proj",
    "ffn_gate_up_exps": "experts.{part}.gate_up_proj",
    "ffn_down_exps": "experts.{part}.down_proj",
}
_BERT_MODULES = _LAYER_MODULES | {
    "attn_output_norm": "attention_norm",
    "layer_output_norm": "mlp_norm",
}
_JINA_CODE_MODULES = _BERT_MODULES | {
    "attn_output_norm": "attention_sum_norm",
    "attn_norm_2": "attention_norm",
}
_LFM2_MODULES = _LAYER_MODULES | {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}
_NEMOTRON_H_MODULES = _LAYER_MODULES | {"attn_norm": "norm"}
_MAMBA1_MODULES = _LAYER_MODULES | {
    "ssm_x": "mixer.x_proj",
    "ssm_dt": "mixer.dt_proj",
    **{f"ssm_{x}_norm": f"mixer.{x}_layernorm" for x in ("dt", "b", "c")},
}
_DELTA_NET_MODULES = _LAYER_MODULES | {
    "attn_qkv": "mixer.in_proj_qkv",
    "attn_gate": "mixer.in_proj_z",
    "ssm_alpha": "mixer.in_proj_a",
    "ssm_beta": "mixer.in_proj_b",
    "ssm_ba": "mixer.in_proj_ba",
}
_QWEN4_MODULES = _DELTA_NET_MODULES | {
    **{f"indexer.{x}_norm": f"self_attn.indexer.{x}_layernorm" for x in "qk"},
    **{
        f"hc_{block}_{part}": f"{own}_hc.{name}"
        for block, own in (("attn", "attn"), ("ffn", "mlp"))
        for part, name in (
            ("norm", "hc_norm"),
            ("down", "input_mix_weight_down"),
            ("up", "input_mix_weight_up"),
            ("inject", "block_inject_weight"),
        )
    },
    **{f"ple_{x}": f"ple.{x}_proj" for x in ("key", "value")},
    **{f"ple_norm_{x}": f"ple.norm_{x}" for x in ("key", "query", "conv")},
    "ple_conv1d": "ple.conv1d",
}
_KIMI_LINEAR_MODULES = _LAYER_MODULES | {
    **{f"ssm_conv1d_{x}": f"mixer.{x}_conv1d" for x in "qkv"},
    **{f"ssm_{x}": f"mixer.{x}_proj" for x in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "mixer.b_proj",
}
_KIMI_K3_MODULES = _KIMI_LINEAR_MODULES | {
    "attn_gate": "self_attn.gate_proj",
    "attn_res_score": "attn_res_query",
    "ffn_res_score": "mlp_res_query",
    "ffn_routed_down": "mlp.to_latent",
    "ffn_routed_up": "mlp.from_latent",
    "ffn_routed_norm": "mlp.latent_sum_norm",
    "ssm_g": "mixer.g_proj",
}
_DEEPSEEK4_MODULES = _LAYER_MODULES | {
    "attn_q_a_norm": "self_attn.q_a_norm",
    "attn_kv": "self_attn.kv_proj",
    "attn_kv_a_norm": "self_attn.kv_norm",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    "indexer.attn_q_b": "self_attn.compressor.indexer.q_b_proj",
    "indexer.proj": "self_attn.compressor.indexer.weights_proj",
    **{
        f"{prefix}_compressor_{stored}": f"self_attn.compressor.{own}{name}"
        for prefix, own in (("attn", ""), ("indexer", "indexer."))
        for stored, name in (("kv", "kv_proj"), ("gate", "gate_proj"), ("norm", "kv_norm"))
    },
}
_GLM5_NEXT_MODULES = _KIMI_LINEAR_MODULES | {
    "indexer.kpool_gate": "self_attn.indexer.gate_proj",
    "indexer_compressor_gate": "self_attn.indexer.gate_proj",
    "indexer_compressor_ape": "self_attn.indexer.index_kpool_compress_ape",
    "indexer.kpool_ape": "self_attn.indexer.index_kpool_compress_ape",
}
_GATED_MODULES = _LAYER_MODULES | {"attn_gate": "self_attn.gate_proj"}
_RWKV7_MODULES = _LAYER_MODULES | {
    "attn_norm": "attn_norm",
    "attn_norm_2": "ffn_norm",
    "ffn_norm": "ffn_norm",
    **{
        f"time_mix_{name}{number}": f"mixer.{name}_lora.lora.{place}"
        for name in "wavg"
        for number, place in ((1, 0), (2, 2))
    },
    "time_mix_receptance": "mixer.r_proj",
    "time_mix_key": "mixer.k_proj",
    "time_mix_value": "mixer.v_proj",
    "time_mix_output": "mixer.out_proj",
    "time_mix_ln": "mixer.norm",
    "channel_mix_key": "mlp.up_proj",
    "channel_mix_value": "mlp.down_proj",
}
_RWKV6_MODULES = _RWKV7_MODULES | {
    "time_mix_w1": "mixer.x_proj.0.linear",
    "time_mix_decay_w1": "mixer.w_proj.linear.lora.0",
    "time_mix_decay_w2": "mixer.w_proj.linear.lora.2",
    "time_mix_receptance": "mixer.r_proj.linear",
    "time_mix_key": "mixer.k_proj.linear",
    "time_mix_value": "mixer.v_proj.linear",
    "time_mix_gate": "mixer.g_proj.linear",
    "channel_mix_receptance": "mlp.receptance",
}
_BITNET_MODULES = _LAYER_MODULES | {
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
}
_FUSED_MLP = _LAYER_MODULES | {"ffn_up": "mlp.gate_up_proj"}
_PLAMO_MODULES = _FUSED_MLP | {
    "attn_norm": "pre_mixer_norm",
    "post_attention_norm": "post_mixer_norm",
    "ffn_norm": "pre_mlp_norm",
    "post_ffw_norm": "post_mlp_norm",
}
# The names by architecture. "bamba" is used for files whose architecture is "granitehybrid" but that are Bambas.
_LAYER_MODULES_OF_ARCHITECTURE = {
    "afmoe": _GATED_MODULES
    | {
        "ffn_norm": "pre_mlp_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
    "apertus": _LAYER_MODULES
    | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "arctic": _LAYER_MODULES
    | {
        "ffn_norm": "residual_layernorm",
        "ffn_norm_exps": "post_attention_layernorm",
        "ffn_gate": "residual_mlp.w1",
        "ffn_up": "residual_mlp.w3",
        "ffn_down": "residual_mlp.w2",
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.{part}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{part}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{part}.w2",
    },
    "bailingmoe2": _LAYER_MODULES | {"layer_output_norm": "final_layernorm"},
    "bailingmoe3": _KIMI_LINEAR_MODULES
    | {
        "attn_gate": "self_attn.gate_proj",
        "ssm_f_a": "mixer.f_proj",
        "ssm_g_a": "mixer.g_proj",
        "layer_output_norm": "final_layernorm",
    },
    "bert": _BERT_MODULES,
    "bitnet": _BITNET_MODULES,
    "bitnet-b1.58": _BITNET_MODULES,
    "jina-bert-v2": _BERT_MODULES | {"ffn_up": "mlp.gate_up_proj"},
    "jina-bert-v2-code": _JINA_CODE_MODULES | {"ffn_up": "mlp.up_gate_proj"},
    "jina-bert-v2-code-split": _JINA_CODE_MODULES,
    "jina-bert-v3": _BERT_MODULES,
    "modern-bert": _LAYER_MODULES
    | {
        "attn_norm": "attention_norm",
        "ffn_norm": "mlp_norm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "nomic-bert": _BERT_MODULES,
    "nomic-bert-moe": _BERT_MODULES,
    "bamba": _LAYER_MODULES | {"ffn_norm": "pre_ff_layernorm"},
    "chatglm": _FUSED_MLP,
    "deepseek4": _DEEPSEEK4_MODULES,
    "dbrx": _LAYER_MODULES | {"attn_output_norm": "post_attention_layernorm"},
    "dots3note": _GATED_MODULES | {"attn_k_norm": "self_attn.k_rope_only_layernorm"},
    "falcon-h1": _LAYER_MODULES | {"ffn_norm": "pre_ff_layernorm"},
    "gemma-embedding": _GEMMA_MODULES,
    "gemma2": _GEMMA_MODULES,
    "gemma3": _GEMMA_MODULES,
    "gemma3n": _GEMMA3N_MODULES,
    "gemma4": _GEMMA4_MODULES,
    "glm5-next": _GLM5_NEXT_MODULES,
    "glm5next": _GLM5_NEXT_MODULES,
    "grok": _LAYER_MODULES
    | {
        "attn_norm": "pre_attn_norm",
        "attn_output_norm": "post_attn_norm",
        "ffn_norm": "pre_moe_norm",
        "layer_output_norm": "post_moe_norm",
        "post_ffw_norm": "post_moe_norm",
    },
    "granite_swa": _LAYER_MODULES | {"ffn_up_shexp": "mlp.shared_experts.gate_up_proj"},
    "hrm_text": _GATED_MODULES,
    "hy_v4": _GATED_MODULES,
    "jamba": _MAMBA1_MODULES | {"ffn_norm": "pre_ff_layernorm"},
    "kimi-k3": _KIMI_K3_MODULES,
    "kimi-linear": _KIMI_LINEAR_MODULES,
    "laguna": _GATED_MODULES,
    "lfm2": _LFM2_MODULES,
    "lfm2moe": _LFM2_MODULES,
    "mamba": _MAMBA1_MODULES | {"attn_norm": "norm"},
    "mamba2": _NEMOTRON_H_MODULES,
    "minimax-01": _LAYER_MODULES
    | {"attn_norm_2": "self_attn.norm", "attn_gate": "self_attn.output_gate"},
    "muse-glimmer": _GEMMA_MODULES | {"attn_gate": "self_attn.gate_proj"},
    "neo-bert": _LAYER_MODULES
    | {
        "attn_norm": "attention_norm",
        "ffn_norm": "ffn_norm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "nemotron_h": _NEMOTRON_H_MODULES,
    "nemotron_h_moe": _NEMOTRON_H_MODULES,
    "ouro": _LAYER_MODULES
    | {"post_attention_norm": "input_layernorm_2", "post_ffw_norm": "post_attention_layernorm_2"},
    "phi3": _FUSED_MLP,
    "plamo2": _MAMBA1_MODULES | _PLAMO_MODULES,
    "plamo3": _PLAMO_MODULES,
    "qwen35": _DELTA_NET_MODULES,
    "qwen35moe": _DELTA_NET_MODULES,
    "qwen3next": _DELTA_NET_MODULES,
    "qwen4exp": _QWEN4_MODULES,
    "rwkv6": _RWKV6_MODULES,
    "rwkv6qwen2": _RWKV6_MODULES,
    "rwkv7": _RWKV7_MODULES,
    "arwkv7": _RWKV7_MODULES,
    "spark2_5": _GATED_MODULES,
    "talkie": _LAYER_MODULES
    | {
        "attn_q_norm": "self_attn.key_scale",
        "attn_output.scale": "self_attn.o_proj.gain",
        "ffn_down.scale": "mlp.down_proj.gain",
        "layer_output_scale": "embedding_scale",
    },
    "step35": _GATED_MODULES,
    "falcon": _LAYER_MODULES | {"attn_norm_2": "ln_attn"},
    "glm4": _FUSED_MLP
    | {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
}
# The final norm of these architectures has the name that others use for the norm of embeddings.
_EMBEDDING_NORM_IS_LAST = ("lfm2", "lfm2moe")
# Tensors whose names have no suffix, such as ".weight", in a Hugging Face checkpoint.
_PLAIN_TENSOR = re.compile(
    r"blk\.(\d+)\.(exp_probs_b|attn_sinks|altup_correct_scale|layer_output_scale|(?:ffn_gate_inp|ffn_down_exps)\.scale"
    r"|ssm_(?:a|d|dt|(?:dt|b|c)_norm)|hc_(?:attn|ffn)_(?:fn|base|scale)|(?:attn|indexer)_compressor_ape|ffn_gate_tid2eid"
    r"|post_(?:attention|ffw)_norm"
    r"|time_mix_(?:[wav]0|k_k|k_a|r_k|lerp_fused|lerp_x|first|decay)|channel_mix_lerp_[kr])"
    r"(?:\.(?:weight|bias))?"
)
_PLAIN_NAMES = {
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "attn_sinks": "self_attn.sinks",
    "altup_correct_scale": "altup.correct_output_scale",
    "layer_output_scale": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ssm_a": "mixer.A_log",
    "ssm_d": "mixer.D",
    "ssm_dt": "mixer.dt_bias",
    **{
        f"hc_{block}_{part}": f"{own}_hc.{part}"
        for block, own in (("attn", "attn"), ("ffn", "mlp"))
        for part in ("fn", "base", "scale")
    },
    "attn_compressor_ape": "self_attn.compressor.position_bias",
    "indexer_compressor_ape": "self_attn.compressor.indexer.position_bias",
    "ffn_gate_tid2eid": "mlp.gate.tid2eid",
    **{f"time_mix_{name}0": f"mixer.{name}_lora.lora.2.bias" for name in "wav"},
    **{f"time_mix_{name}": f"mixer.{name}" for name in ("k_k", "k_a", "r_k")},
    "time_mix_lerp_fused": "mixer.x_x",
    "time_mix_lerp_x": "mixer.x_proj.0.mu",
    "time_mix_first": "mixer.bonus",
    "time_mix_decay": "mixer.w_proj.linear.lora.2.bias",
    # PLaMo's.
    **{f"ssm_{x}_norm": f"mixer.{x}_layernorm.weight" for x in ("dt", "b", "c")},
    "post_attention_norm": "post_mixer_norm.weight",
    "post_ffw_norm": "post_mlp_norm.weight",
    "channel_mix_lerp_k": "mlp.x_k",
    "channel_mix_lerp_r": "mlp.x_r",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.((?:(?:shortconv|indexer)\.)?\w+)\.(weight|bias)")
# The first files of mixtures have one tensor per expert.
_EXPERT_TENSOR = re.compile(r"blk\.(\d+)\.(ffn_(?:gate|up|down))\.(\d+)\.weight")
_LAYER_SCALE = re.compile(r"blk\.(\d+)\.(\w+\.scale)")
_PREDICTION_TENSOR = re.compile(
    r"blk\.(\d+)\.nextn\.(eh_proj|enorm|hnorm|embed_tokens|shared_head_(?:head|norm))\.weight"
)
_TENSOR = re.compile(r"((?:enc\.|cls\.)?\w+)\.(weight|bias)")
_HEAD_STREAMS = re.compile(r"output_hc_(fn|base|scale)\.weight")


_LAYER_MODULES_OF_T5 = {
    **{f"attn_{x}": f"0.SelfAttention.{x}" for x in "qkvo"},
    "attn_norm": "0.layer_norm",
    "attn_rel_b": "0.SelfAttention.relative_attention_bias",
    **{f"cross_attn_{x}": f"1.EncDecAttention.{x}" for x in "qkvo"},
    "cross_attn_norm": "1.layer_norm",
}
_MLP_MODULES_OF_T5 = {
    "ffn_norm": "layer_norm",
    "ffn_gate": "DenseReluDense.wi_0",
    "ffn_up": "DenseReluDense.wi_1",
    "ffn_down": "DenseReluDense.wo",
}
_MODULES_OF_T5 = {
    "token_embd": "shared",
    "output": "lm_head",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
}
_SIDES_OF_T5 = {"enc": "encoder", "dec": "decoder"}
_LAYER_TENSOR_OF_T5 = re.compile(r"(enc|dec)\.blk\.(\d+)\.(\w+)\.weight")


def hf_name(name: str, architecture: str) -> str | None:
    """Return the name of a tensor, with "{part}" for one that stacks several; None if it is unknown.

    The architecture is that of the file, or what `GGUFCheckpoint` calls files that have other names.
    """
    if architecture in ("t5", "t5encoder"):
        return _t5_name(name)
    layer_modules = _LAYER_MODULES_OF_ARCHITECTURE.get(architecture, _LAYER_MODULES)
    if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in layer_modules:
        return f"model.layers.{match[1]}.{layer_modules[match[2]]}.{match[3]}"
    if match := _EXPERT_TENSOR.fullmatch(name):
        module = layer_modules.get(f"{match[2]}_exps")
        return module and f"model.layers.{match[1]}.{module.format(part=match[3])}.weight"
    if (match := _LAYER_SCALE.fullmatch(name)) and match[2] in layer_modules:
        return f"model.layers.{match[1]}.{layer_modules[match[2]]}"
    if match := _PLAIN_TENSOR.fullmatch(name):
        return f"model.layers.{match[1]}.{_PLAIN_NAMES[match[2]]}"
    if match := _PREDICTION_TENSOR.fullmatch(name):
        module = match[2].replace("shared_head_", "shared_head.")
        return f"model.layers.{match[1]}.{module}.weight"
    if name == "hrm.z_l_init":
        return "model.z_L_init"
    if match := _HEAD_STREAMS.fullmatch(name):
        return f"model.head_hc.{match[1]}"
    if (match := _TENSOR.fullmatch(name)) and match[1] in _MODULES:
        is_last = match[1] == "token_embd_norm" and architecture in _EMBEDDING_NORM_IS_LAST
        return f"{_MODULES['output_norm' if is_last else match[1]]}.{match[2]}"
    return None


def _t5_name(name: str) -> str | None:
    if (match := _LAYER_TENSOR_OF_T5.fullmatch(name)) is None:
        module = _MODULES_OF_T5.get(name.removesuffix(".weight"))
        return module and f"{module}.weight"
    side, index, module = match.groups()
    if (mlp_module := _MLP_MODULES_OF_T5.get(module)) is not None:
        found: str | None = f"{1 if side == 'enc' else 2}.{mlp_module}"
    else:
        found = _LAYER_MODULES_OF_T5.get(module)
    return found and f"{_SIDES_OF_T5[side]}.block.{index}.layer.{found}.weight"
