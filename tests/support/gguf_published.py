"""Write published checkpoints of families without a class in transformers as llama.cpp's converter does."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES
from safetensors.torch import load_file
from support.gguf_writer import interleaved
from torch import Tensor


def write_published(directory: Path, architecture: str) -> Path:
    """Write the checkpoint in `directory`, and return the file."""
    config = json.loads((directory / "config.json").read_text())
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    path = directory / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_type("model")
    writer.add_context_length(128)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads", heads))
    if (head_dim := config.get("head_dim")) is not None:
        writer.add_key_length(head_dim)
    eps = config.get("rms_norm_eps", config.get("layer_norm_epsilon"))
    (writer.add_layer_norm_eps if architecture == "orion" else writer.add_layer_norm_rms_eps)(eps)
    tensors = load_file(directory / "model.safetensors")
    if architecture == "baichuan":
        tensors = _with_own_projections(tensors, heads)
    arch = next(arch for arch, text in MODEL_ARCH_NAMES.items() if text == architecture)
    names = get_tensor_name_map(arch, layers)
    for name, weight in tensors.items():
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        writer.add_tensor(found, weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _with_own_projections(tensors: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Divide the matrix of queries, keys and values. The head is normed, which the file does not ask for."""
    changed = {}
    for name, weight in tensors.items():
        if "W_pack" not in name:
            changed[name] = weight / 3 if name == "lm_head.weight" else weight
            continue
        query, key, value = weight.chunk(3)
        for kind, part in (("q", interleaved(query, heads)), ("k", interleaved(key, heads))):
            changed[name.replace("W_pack", f"{kind}_proj")] = part
        changed[name.replace("W_pack", "v_proj")] = value
    return changed
