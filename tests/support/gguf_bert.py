"""Write a BERT or NomicBERT model as the GGUF file that llama.cpp's converter would make of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, TokenType, get_tensor_name_map

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_bert(path: Path, model: Any, tokenizer: Any, pooling: PoolingType) -> Path:
    """Write `model` to `path` and return it, without a tokenizer if that is None."""
    config = model.config
    is_nomic = config.model_type == "nomic_bert"
    writer = GGUFWriter(path, "nomic-bert" if is_nomic else "bert")
    if is_nomic:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if tokenizer is not None:
        _add_tokenizer(writer, config, tokenizer)
    names = get_tensor_name_map(
        MODEL_ARCH.NOMIC_BERT if is_nomic else MODEL_ARCH.BERT, config.num_hidden_layers
    )
    for name, tensor in _nomic_tensors(model) if is_nomic else model.state_dict().items():
        if not name.startswith("pooler") and not name.endswith("_ids"):
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(gguf_name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, config: Any, tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(list(range(config.vocab_size)))
    types = [TokenType.CONTROL if token in _SPECIAL else TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_list(
        [
            token if token in _SPECIAL else token[2:] if token.startswith("##") else f"▁{token}"
            for token in tokens
        ]
    )
    writer.add_token_types(types)
    writer.add_token_type_count(config.type_vocab_size)
    for name, token in (
        ("cls", "[CLS]"),
        ("seperator", "[SEP]"),
        ("unknown", "[UNK]"),
        ("padding", "[PAD]"),
    ):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))


def _nomic_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by the names of their authors, with queries, keys and values in one."""
    renamed = {
        "self_attn.o_proj": "attn.out_proj",
        "post_attention_layernorm": "norm1",
        "post_mlp_layernorm": "norm2",
        "mlp.up_proj": "mlp.fc11",
        "mlp.gate_proj": "mlp.fc12",
        "mlp.down_proj": "mlp.fc2",
    }
    state = model.state_dict()
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            yield "encoder." + name.replace("self_attn.q_proj", "attn.Wqkv"), torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            for old, new in renamed.items():
                name = name.replace(old, new)
            name = name.replace("embeddings.LayerNorm", "emb_ln")
            yield ("encoder." + name if name.startswith("layers.") else name), tensor
