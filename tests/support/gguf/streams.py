"""Write checkpoints of models with several streams of hidden states as llama.cpp's converter does."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import ExpertGatingFuncType, GGUFWriter
from safetensors.torch import load_file
from support.gguf.finish import finish
from torch import Tensor

_NAMES_OF_DEEPSEEK4 = (
    (r"^model\.(embed_tokens|embed)\.", "token_embd."),
    (r"^head\.", "output."),
    (r"^model\.norm\.", "output_norm."),
    (r"^model\.hc_head\.hc_(\w+)$", r"output_hc_\1.weight"),
    (r"^model\.layers\.", "blk."),
    (r"attn\.attn_sink$", "attn_sinks.weight"),
    (r"attn\.indexer\.compressor\.", "indexer_compressor_"),
    (r"attn\.compressor\.", "attn_compressor_"),
    (r"attn\.indexer\.wq_b\.", "indexer.attn_q_b."),
    (r"attn\.indexer\.weights_proj\.", "indexer.proj."),
    (r"_compressor_wkv\.", "_compressor_kv."),
    (r"_compressor_wgate\.", "_compressor_gate."),
    (r"attn\.wq_(\w)\.", r"attn_q_\1."),
    (r"attn\.wo_(\w)\.", r"attn_output_\1."),
    (r"attn\.q_norm\.", "attn_q_a_norm."),
    (r"attn\.wkv\.", "attn_kv."),
    (r"attn\.norm\.", "attn_kv_a_norm."),
    (r"ffn\.gate\.bias$", "exp_probs_b.bias"),
    (r"ffn\.gate\.tid2eid$", "ffn_gate_tid2eid.weight"),
    (r"ffn\.gate\.", "ffn_gate_inp."),
    (r"ffn\.(shared_)?experts\.w1\.", r"ffn_gate_\1exps."),
    (r"ffn\.(shared_)?experts\.w2\.", r"ffn_down_\1exps."),
    (r"ffn\.(shared_)?experts\.w3\.", r"ffn_up_\1exps."),
    (r"_shared_exps\.", "_shexp."),
    (r"(\.hc_\w+|_ape)$", r"\1.weight"),
)
_NAMES_OF_K3 = (
    (r"^model\.embed_tokens\.", "token_embd."),
    (r"^lm_head\.", "output."),
    (r"^model\.norm\.", "output_norm."),
    (r"^model\.output_attn_res$", "output_res_score.weight"),
    (r"^model\.layers\.", "blk."),
    (r"\.self_attention_res$", ".attn_res_score.weight"),
    (r"\.mlp_res$", ".ffn_res_score.weight"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"self_attn\.([qkv])_conv1d\.", r"ssm_conv1d_\1."),
    (r"self_attn\.(f_[ab])_proj\.", r"ssm_\1."),
    (r"self_attn\.b_proj\.", "ssm_beta."),
    (r"self_attn\.A_log$", "ssm_a"),
    (r"self_attn\.dt_bias$", "ssm_dt.bias"),
    (r"self_attn\.o_norm\.", "ssm_norm."),
    (r"self_attn\.o_proj\.", "attn_output."),
    (r"self_attn\.kv_a_proj_with_mqa\.", "attn_kv_a_mqa."),
    (r"self_attn\.(q|kv)_a_layernorm\.", r"attn_\1_a_norm."),
    (r"self_attn\.(\w+)_proj\.", r"attn_\1."),
    (r"block_sparse_moe\.gate\.e_score_correction_bias$", "exp_probs_b.bias"),
    (r"block_sparse_moe\.gate\.", "ffn_gate_inp."),
    (r"block_sparse_moe\.routed_expert_(\w+)_proj\.", r"ffn_routed_\1."),
    (r"block_sparse_moe\.routed_expert_norm\.", "ffn_routed_norm."),
    (r"block_sparse_moe\.experts\.w1\.", "ffn_gate_exps."),
    (r"block_sparse_moe\.experts\.w2\.", "ffn_down_exps."),
    (r"block_sparse_moe\.experts\.w3\.", "ffn_up_exps."),
    (r"block_sparse_moe\.shared_experts\.(\w+)_proj\.", r"ffn_\1_shexp."),
    (r"block_sparse_moe\.(\w+)_proj\.", r"ffn_\1."),
)


def write_streams(directory: Path) -> Path:
    """Write the DeepSeek-V4 or the Kimi K3 in `directory`, and return the file."""
    config = json.loads((directory / "config.json").read_text())
    config = config.get("text_config", config)
    is_k3 = config["model_type"] == "kimi_linear"
    path = directory / "model.gguf"
    writer = GGUFWriter(path, "kimi-k3" if is_k3 else "deepseek4")
    writer.add_type("model")
    writer.add_context_length(256)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    (_add_k3 if is_k3 else _add_deepseek4)(writer, config)
    tensors = _merged(load_file(directory / "model.safetensors"))
    for name, weight in _tensors_of_k3(tensors, config) if is_k3 else tensors.items():
        for pattern, replacement in _NAMES_OF_K3 if is_k3 else _NAMES_OF_DEEPSEEK4:
            name = re.sub(pattern, replacement, name)
        values = weight.int() if name.endswith("tid2eid.weight") else weight.float()
        writer.add_tensor(name, values.contiguous().numpy())
    return finish(writer)


def _add_deepseek4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    prefix, rates = "deepseek4", config["compress_rates"]
    rotary, count = config["rope_parameters"], config["num_hidden_layers"]
    writer.add_head_count_kv(1)
    writer.add_key_length(config["head_dim"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(rotary["main"]["rope_theta"])
    writer.add_string(f"{prefix}.rope.scaling.type", "yarn")
    writer.add_rope_scaling_factor(rotary["compress"]["factor"])
    writer.add_rope_scaling_orig_ctx_len(rotary["compress"]["original_max_position_embeddings"])
    ratios = [rates.get(kind, 0) for kind in config["layer_types"]]
    # The last ones are those of layers for multi-token prediction, which the file lacks.
    writer.add_array(f"{prefix}.attention.compress_ratios", [*ratios, 0])
    writer.add_uint32(f"{prefix}.nextn_predict_layers", 1)
    writer.add_array(f"{prefix}.swiglu_clamp_exp", [config["swiglu_limit"]] * count)
    writer.add_uint32(f"{prefix}.hash_layer_count", config["mlp_layer_types"].count("hash_moe"))
    writer.add_float32(f"{prefix}.hyper_connection.epsilon", config["hc_eps"])
    writer.add_float32(
        f"{prefix}.attention.compress_rope_freq_base", rotary["compress"]["rope_theta"]
    )
    for key, name in (
        ("attention.output_lora_rank", "o_lora_rank"),
        ("attention.output_group_count", "o_groups"),
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("hyper_connection.count", "hc_mult"),
        ("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
    ):
        writer.add_uint32(f"{prefix}.{key}", config[name])


def _add_k3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    prefix, own = "kimi-k3", config["linear_attn_config"]
    layers = range(1, config["num_hidden_layers"] + 1)
    writer.add_head_count_kv([int(i in own["full_attn_layers"]) for i in layers])
    writer.add_kv_lora_rank(config["kv_lora_rank"])
    writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    writer.add_key_length_mla(config["qk_head_dim"])
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_used_count(config["num_experts_per_token"])
    writer.add_expert_shared_count(config["num_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    writer.add_ssm_conv_kernel(own["short_conv_kernel_size"])
    writer.add_kda_head_dim(own["head_dim"])
    writer.add_float32(f"{prefix}.kda.gate_lower_bound", own["gate_lower_bound"])
    writer.add_float32(f"{prefix}.activation.situ_beta", config["activation_situ_beta"])
    writer.add_float32(
        f"{prefix}.activation.situ_linear_beta", config["activation_situ_linear_beta"]
    )
    writer.add_uint32(f"{prefix}.attn_res.block_size", config["attn_res_block_size"])
    writer.add_uint32(f"{prefix}.expert_latent_length", config["routed_expert_hidden_size"])


def _merged(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts of each layer."""
    merged = {name: weight for name, weight in tensors.items() if ".experts." not in name}
    for name in sorted(tensors.keys() - merged.keys()):
        if match := re.fullmatch(r"(.*\.experts\.)0(\..*)", name):
            count = sum(bool(re.fullmatch(rf"{match[1]}\d+{match[2]}", each)) for each in tensors)
            parts = [tensors[f"{match[1]}{i}{match[2]}"] for i in range(count)]
            merged[f"{match[1][:-1]}{match[2]}"] = torch.stack(parts)
    return merged


def _tensors_of_k3(
    tensors: dict[str, Tensor], config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the text, with the products and parts that the converter stores."""
    heads, attending = (
        config["num_attention_heads"],
        config["linear_attn_config"]["full_attn_layers"],
    )
    for name, weight in tensors.items():
        if not name.startswith("language_model."):
            continue
        name = name.removeprefix("language_model.")
        if name.endswith("_res_norm.weight"):
            projection = tensors[f"language_model.{name}".replace("_norm.", "_proj.")]
            yield name.removesuffix("_norm.weight"), weight * projection.flatten()
        elif name.endswith("_res_proj.weight"):
            continue
        elif name.endswith("A_log"):
            yield name, -weight.flatten().exp()
        elif name.endswith("conv1d.weight"):
            yield name, weight.view(1, weight.shape[0], 1, -1)
        elif name.endswith("kv_b_proj.weight"):
            parts = weight.unflatten(0, (heads, -1)).split(
                (config["qk_nope_head_dim"], config["v_head_dim"]), 1
            )
            yield name.replace("kv_b", "k_b"), parts[0].transpose(1, 2)
            yield name.replace("kv_b", "v_b"), parts[1]
        elif name.endswith("self_attn.g_proj.weight"):
            kind = "attn_gate" if int(name.split(".")[2]) + 1 in attending else "ssm_g"
            yield name.replace("self_attn.g_proj", kind), weight
        else:
            yield name, weight
