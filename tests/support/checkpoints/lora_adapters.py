"""Random LoRA adapters in PEFT's format, and models with them merged."""

from __future__ import annotations

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from support.gguf.finish import finish
from support.gguf.writer import converted, gguf_name


def write_adapter(
    directory: Path,
    model: transformers.PreTrainedModel,
    seed: int,
    modules: str = r".*_proj",
    *,
    whole: str = "",
    **config: Any,
) -> transformers.PreTrainedModel:
    """Write an adapter, and return the model with it merged.

    It changes all linear modules and embeddings whose name matches `modules`, and replaces those that match `whole`. A
    change of the embedding leaves an output projection that is tied to it alone.
    """
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    for name, module in merged.named_modules():
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            continue
        key = f"base_model.model.{name}"
        weight = torch.nn.Parameter(module.weight.data.clone())
        if whole and re.fullmatch(whole, name):
            for part, stored in module.named_parameters():
                tensors[f"{key}.{part}"] = stored.data + random(*stored.shape)
                setattr(module, part, torch.nn.Parameter(tensors[f"{key}.{part}"].clone()))
        if not re.fullmatch(modules, name):
            continue
        rank = _of(config, "rank_pattern", name, config["r"])
        alpha = _of(config, "alpha_pattern", name, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        rows, columns = weight.shape
        down, up = random(rank, columns), random(rows, rank)
        weight.data += scale * up @ down
        if isinstance(module, torch.nn.Embedding):
            tensors[f"{key}.lora_embedding_A"] = up.T.contiguous()
            tensors[f"{key}.lora_embedding_B"] = down.T.contiguous()
            tensors[f"{key}.base_layer.weight"] = module.weight.data.clone()
        else:
            tensors[f"{key}.lora_A.weight"] = down
            tensors[f"{key}.lora_B.weight"] = up
            if config.get("lora_bias"):
                tensors[f"{key}.lora_B.bias"] = bias = random(rows)
                stored = 0 if module.bias is None else module.bias.data
                module.bias = torch.nn.Parameter(stored + scale * bias)
        module.weight = weight
    save_file(tensors, directory / "adapter_model.safetensors")
    return merged


def write_gguf_adapter(path: Path, source: Path, config: Any) -> Path:
    """Write the adapter in `source`, of a Llama or Qwen3, as llama.cpp's converter would, and return its path."""
    settings = json.loads((source / "adapter_config.json").read_text())
    writer = GGUFWriter(path, config.model_type)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", settings["lora_alpha"])
    for name, tensor in load_file(source / "adapter_model.safetensors").items():
        module, _, kind = name.removeprefix("base_model.model.").partition(".lora_")
        if not kind:
            continue
        kind = kind.removeprefix("embedding_")[0].lower()
        values = tensor.T if module.endswith("embed_tokens") and kind == "a" else tensor
        if kind == "b":
            values = converted(f"{module}.weight", values, config, config.model_type)
        stored = gguf_name(f"{module}.weight", config.model_type)
        writer.add_tensor(f"{stored}.lora_{kind}", values.float().contiguous().numpy())
    return finish(writer)


def greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates, with the whole sequence computed for each."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def _of(config: dict[str, Any], patterns: str, name: str, default: int) -> int:
    """Return the value of the first pattern that ends the name."""
    found = (v for p, v in config.get(patterns, {}).items() if re.fullmatch(rf"(.*\.)?{p}", name))
    return next(found, default)
