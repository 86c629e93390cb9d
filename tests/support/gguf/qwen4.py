"""Write what a Qwen4 has beside a Qwen3.5, as llama.cpp's converter does."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGUFValueType, GGUFWriter
from torch import Tensor

MODULES = {
    **{
        rf"{block}_hyper_connection\.{module}": f"hc_{stored}_{part}"
        for block, stored in (("attn", "attn"), ("mlp", "ffn"))
        for module, part in (
            ("hc_norm", "norm"),
            ("input_mix_weight_down", "down"),
            ("input_mix_weight_up", "up"),
            ("block_inject_weight", "inject"),
        )
    },
    r"model\.hyper_connection_mixer\.hc_norm": "output_hc_norm",
    r"model\.hyper_connection_mixer\.input_mix_weight_(up|down)": r"output_hc_\1",
    r"self_attn\.indexer\.([qk])_proj": r"indexer.\1_proj",
    r"self_attn\.indexer\.([qk])_layernorm": r"indexer.\1_norm",
    r"ple\.(key|value)_proj": r"ple_\1",
    r"ple\.norm_(\w+)": r"ple_norm_\1",
    r"ple\.conv1d": "ple_conv1d",
    r"ple\.ple_embedding\.ngram_embedding": "per_layer_token_embd",
}
"""The names of modules by those in transformers."""
_KEYS = {
    "layer_multipliers": "layer_multipliers",
    "ngram_heads_vocab_sizes": "head_vocab_sizes",
    "ngram_heads_offsets": "head_offsets",
}


def add_hyperparameters(writer: GGUFWriter, config: Any) -> None:
    """Add the keys of streams, of the indexer and of n-grams, and the number of layers that draft tokens."""
    ratios = [0 if kind == "linear_attention" else 3 for kind in config.layer_types]
    assert config.indexer_compress_ratio == 3
    writer.add_array(f"{writer.arch}.attention.compress_ratios", [*ratios, 0])
    for key, value in {
        "nextn_predict_layers": 1,
        "hyper_connection.count": config.hc_count,
        "hyper_connection.low_rank": config.hc_lowrank,
        "attention.indexer.head_count": config.indexer_n_heads,
        "attention.indexer.key_length": config.indexer_head_dim,
        "attention.indexer.top_k": config.indexer_budget,
    }.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)
    if not config.ple_layer_ids:
        return
    (number,) = config.ple_layer_ids
    writer.add_array(f"{writer.arch}.ple.layers", [number - 1])
    num_heads = (config.ngram_size - 1) * config.heads_per_ngram
    for key, value in {
        "ple.ngram_size": config.ngram_size,
        "ple.heads_per_ngram": config.heads_per_ngram,
        "ple.conv_kernel": config.ple_conv_kernel_size,
        "ple.eos_token_id": config.eos_token_id,
        "embedding_length_per_layer_input": config.ple_embed_dim // num_heads,
    }.items():
        writer.add_uint32(f"{writer.arch}.{key}", value)


def add_constants(writer: GGUFWriter, name: str, values: Tensor) -> None:
    """Add the constants of hashes, int64 [N], of a module with this name."""
    key = f"{writer.arch}.ple.{_KEYS[name.split('.')[-2]]}"
    writer.add_key_value(key, values.tolist(), GGUFValueType.ARRAY, GGUFValueType.UINT64)


def add_draft_layer(writer: GGUFWriter, config: Any) -> None:
    """Add two of the tensors of the layer that drafts tokens."""
    size = config.hidden_size
    prefix = f"blk.{config.num_hidden_layers}"
    writer.add_tensor(f"{prefix}.attn_k.weight", np.ones((32, size), np.float32))
    writer.add_tensor(f"{prefix}.nextn.eh_proj.weight", np.ones((size, 2 * size), np.float32))
