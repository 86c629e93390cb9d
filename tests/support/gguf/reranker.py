"""Write a decoder that answers yes or no as the GGUF file that llama.cpp's converter would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, PoolingType
from support.gguf.finish import finish
from support.gguf.tokenizer import add_tokenizer
from support.gguf.writer import add_hyperparameters, add_rope, gguf_name


def write_reranker(
    path: Path, model: Any, tokenizer: Any, yes: int, no: int, template: str
) -> Path:
    """Write a Qwen3 to `path` and return it. The output projection keeps only the rows of two tokens."""
    config = model.config
    writer = GGUFWriter(path, "qwen3")
    add_hyperparameters(writer, config, "qwen3")
    add_rope(writer, config)
    tokenizer.chat_template = None
    add_tokenizer(writer, tokenizer, config.vocab_size, "qwen2")
    writer.add_chat_template([{"name": "rerank", "template": template}])
    writer.add_pooling_type(PoolingType.RANK)
    writer.add_classifier_output_labels(["yes", "no"])
    head = model.lm_head.weight.detach().float()
    writer.add_tensor("cls.output.weight", torch.stack([head[yes], head[no]]).numpy())
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            writer.add_tensor(gguf_name(name, "qwen3"), tensor.float().numpy())
    return finish(writer)
