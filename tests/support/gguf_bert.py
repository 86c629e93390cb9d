"""Write a BERT model as the GGUF file that llama.cpp's converter would make of it."""

from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, GGUFWriter, PoolingType, TokenType, get_tensor_name_map

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_bert(path: Path, model: Any, tokenizer: Any, pooling: PoolingType) -> Path:
    """Write `model` to `path` and return it."""
    config = model.config
    writer = GGUFWriter(path, "bert")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(config.layer_norm_eps)
    writer.add_causal_attention(False)
    writer.add_pooling_type(pooling)
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
    names = get_tensor_name_map(MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if not name.startswith("pooler") and not name.endswith("_ids"):
            gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(gguf_name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
