"""Write a transformers Gemma 3n or 4 as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGMLQuantizationType, GGUFWriter
from support.gguf.finish import finish
from support.gguf.quantizers import add_tensor
from support.gguf.tokenizer import add_tokenizer

ARCHITECTURES = {"gemma3n_text": "gemma3n", "gemma4_text": "gemma4"}
MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "router.proj": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "altup.correction_coefs": "altup_correct_coef",
    "altup.prediction_coefs": "altup_predict_coef",
    "altup.modality_router": "altup_router",
    "altup.router_norm": "altup_router_norm",
    "laurel.linear_left": "laurel_l",
    "laurel.linear_right": "laurel_r",
    "laurel.post_laurel_norm": "laurel_post_norm",
}
PARAMETERS = {
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
}


def write_gemma(
    path: Path,
    model: transformers.PreTrainedModel,
    tokenizer: transformers.PreTrainedTokenizerFast | None = None,
    table_type: GGMLQuantizationType | None = None,
) -> Path:
    """Write `model` to `path` as F32, with a per-layer table of type `table_type` if it is given, and return it."""
    config = model.config
    writer = GGUFWriter(path, ARCHITECTURES[config.model_type])
    writer.add_type("model")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    if config.final_logit_softcapping is not None:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    if config.model_type == "gemma3n_text":
        add_gemma3n(writer, config)
    else:
        add_gemma4(writer, config, slides)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, config.vocab_size, "gpt-2")
    for name, weight in tensors_of(model):
        values = weight.detach().float().contiguous().numpy()
        is_table = name == "per_layer_token_embd.weight"
        add_tensor(writer, name, values, table_type if is_table else None)
    return finish(writer)


def add_gemma3n(writer: GGUFWriter, config: Any) -> None:
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_altup_num_inputs(config.altup_num_inputs)
    writer.add_altup_active_idx(config.altup_active_idx)
    sparsities = torch.tensor(config.activation_sparsity_pattern)
    writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(sparsities).tolist())


def add_gemma4(writer: GGUFWriter, config: Any, slides: list[bool]) -> None:
    layers = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    of_global, of_local = layers[slides.index(False)], layers[slides.index(True)]
    heads = [layer.num_key_value_heads for layer in layers]
    writer.add_head_count_kv(heads if len(set(heads)) > 1 else heads[0])
    writer.add_key_length(of_global.head_dim)
    writer.add_value_length(of_global.head_dim)
    writer.add_key_length_swa(of_local.head_dim)
    writer.add_value_length_swa(of_local.head_dim)
    size, num_shared = config.intermediate_size, config.num_kv_shared_layers
    if config.use_double_wide_mlp:
        num_own = len(layers) - num_shared
        writer.add_feed_forward_length([size] * num_own + [2 * size] * num_shared)
    else:
        writer.add_feed_forward_length(size)
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    num_pairs = of_global.head_dim // 2
    num_rotated = int(num_pairs * rope["full_attention"]["partial_rotary_factor"])
    divisors = torch.tensor([1.0] * num_rotated + [1e30] * (num_pairs - num_rotated))
    writer.add_tensor("rope_freqs.weight", divisors.numpy())


def tensors_of(model: transformers.PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's tensors by GGUF's names, with the projections of all streams as one."""
    weights = model.state_dict()
    stacks = {"altup_projections": "altup_proj", "altup_unembed_projections": "altup_unembd_proj"}
    for module, stack in stacks.items():
        if parts := [weights.pop(name) for name in list(weights) if f".{module}." in name]:
            yield f"{stack}.weight", torch.stack(parts)
    for name, weight in weights.items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield gguf_name(name), weight


def gguf_name(name: str) -> str:
    match = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name)
    assert match is not None
    layer, rest = match.groups()
    found = PARAMETERS.get(rest) or f"{MODULES[rest.removesuffix('.weight')]}.weight"
    return found if layer is None else f"blk.{layer}.{found}"
