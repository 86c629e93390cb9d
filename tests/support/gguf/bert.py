"""Write encoders as the GGUF files that llama.cpp's converter would make of them."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, PoolingType, TokenType, get_tensor_name_map
from support.gguf.finish import finish
from support.gguf.gemma import MODULES

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_bert(path: Path, model: Any, tokenizer: Any, pooling: PoolingType) -> Path:
    """Write `model` to `path` and return it, without a tokenizer if that is None."""
    config = model.config
    is_nomic = config.model_type == "nomic_bert"
    writer = GGUFWriter(path, "nomic-bert" if is_nomic else "bert")
    if is_nomic:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    # The positions before the first are those of padding.
    offset = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0
    writer.add_context_length(config.max_position_embeddings - offset)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
    if pooling is PoolingType.RANK:
        writer.add_classifier_output_labels(list(config.id2label.values()))
    if tokenizer is not None:
        _add_tokenizer(writer, config, tokenizer)
    names = get_tensor_name_map(
        MODEL_ARCH.NOMIC_BERT if is_nomic else MODEL_ARCH.BERT, config.num_hidden_layers
    )
    for name, tensor in _nomic_tensors(model) if is_nomic else model.state_dict().items():
        name = re.sub(r"^(roberta|bert)\.", "", name)
        if not name.startswith("pooler") and not name.endswith("_ids"):
            if "position_embeddings" in name:
                tensor = tensor[offset:]
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(gguf_name, tensor.float().numpy())
    return finish(writer)


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


_ROTARY_MODULES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
    "head.dense": "cls",
    "head.norm": "cls.norm",
    "classifier": "cls.output",
}


def write_rotary_encoder(path: Path, model: Any, architecture: str) -> Path:
    """Write a Jina v3 ("jina-bert-v3") or a ModernBERT ("modern-bert") without a tokenizer, and return its path."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    rope = config.rope_parameters
    if architecture == "modern-bert":
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.local_attention)
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_causal_attention(False)
    writer.add_pooling_type(PoolingType.MEAN)
    if hasattr(model, "classifier"):
        kind = PoolingType[config.classifier_pooling.upper()]
        writer.add_uint32(f"{architecture}.classifier.pooling_type", kind)
    state = {name.removeprefix("model."): x for name, x in model.state_dict().items()}
    for name, tensor in state.items():
        module, kind = name.rsplit(".", 1)
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        prefix, module = (f"blk.{layer[1]}.", layer[2]) if layer else ("", module)
        if module == "self_attn.q_proj":
            parts = [state[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            writer.add_tensor(f"{prefix}attn_qkv.{kind}", torch.cat(parts).float().numpy())
        elif module in _ROTARY_MODULES:
            writer.add_tensor(f"{prefix}{_ROTARY_MODULES[module]}.{kind}", tensor.float().numpy())
    return finish(writer)


def write_embedding_gemma(path: Path, model: Any, dense: Sequence[torch.nn.Linear]) -> Path:
    """Write a bidirectional Gemma 3 and two dense layers without a tokenizer, and return its path."""
    config = model.config
    writer = GGUFWriter(path, "gemma-embedding")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    # transformers halves the number in the file and adds 1, in order to count the token itself.
    writer.add_sliding_window(2 * (config.sliding_window - 1))
    writer.add_sliding_window_pattern([kind[0] == "s" for kind in config.layer_types])
    writer.add_pooling_type(PoolingType.MEAN)
    modules = {**MODULES, "embed_tokens": "token_embd", "norm": "output_norm"}
    modules |= {"pre_feedforward_layernorm": "ffn_norm"}
    for name, tensor in model.state_dict().items():
        module, kind = name.rsplit(".", 1)
        layer = re.fullmatch(r"layers\.(\d+)\.(.*)", module)
        gguf_name = modules[layer[2] if layer else module]
        values = tensor + 1 if name.endswith("norm.weight") else tensor
        prefix = f"blk.{layer[1]}." if layer else ""
        writer.add_tensor(f"{prefix}{gguf_name}.{kind}", values.float().numpy())
    for number, each in enumerate(dense, 2):
        writer.add_tensor(f"dense_{number}.weight", each.weight.detach().numpy())
    return finish(writer)
