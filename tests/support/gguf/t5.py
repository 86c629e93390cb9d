"""Write a T5 or a umT5, or the encoder of one, as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from support.gguf.finish import finish


def write_t5(path: Path, model: Any) -> Path:
    """Write `model` to `path` without a tokenizer, and return the path."""
    config = model.config
    is_encoder = type(model).__name__.endswith("EncoderModel")
    writer = GGUFWriter(path, "t5encoder" if is_encoder else "t5")
    writer.add_context_length(config.n_positions if hasattr(config, "n_positions") else 512)
    writer.add_embedding_length(config.d_model)
    writer.add_feed_forward_length(config.d_ff)
    writer.add_block_count(config.num_layers)
    if not is_encoder:
        writer.add_decoder_block_count(config.num_decoder_layers)
        writer.add_decoder_start_token_id(config.pad_token_id)
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.d_kv)
    writer.add_value_length(config.d_kv)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_relative_attn_buckets_count(config.relative_attention_num_buckets)
    names = get_tensor_name_map(
        MODEL_ARCH.T5ENCODER if is_encoder else MODEL_ARCH.T5,
        max(config.num_layers, config.num_decoder_layers),
    )
    embedding = model.get_input_embeddings().weight
    for name, tensor in model.state_dict().items():
        is_repeated = name == "lm_head.weight" and torch.equal(tensor, embedding)
        if is_repeated or name.endswith("embed_tokens.weight"):
            continue
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.float().numpy())
    return finish(writer)
