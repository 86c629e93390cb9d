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
from safetensors.torch import save_file


def write_adapter(
    directory: Path,
    model: transformers.PreTrainedModel,
    seed: int,
    modules: str = r".*_proj",
    **config: Any,
) -> transformers.PreTrainedModel:
    """Write an adapter of all linear modules whose name matches, and return the model with it merged."""
    directory.mkdir(parents=True)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if not isinstance(module, torch.nn.Linear) or not re.fullmatch(modules, name):
            continue
        rank = _of(config, "rank_pattern", name, config["r"])
        alpha = _of(config, "alpha_pattern", name, config["lora_alpha"])
        down = torch.randn(rank, module.in_features, generator=generator) * 0.2
        up = torch.randn(module.out_features, rank, generator=generator) * 0.2
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        module.weight.data += scale * up @ down
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    save_file(tensors, directory / "adapter_model.safetensors")
    return merged


def _of(config: dict[str, Any], patterns: str, name: str, default: int) -> int:
    """Return the value of the first pattern that ends the name."""
    found = (v for p, v in config.get(patterns, {}).items() if re.fullmatch(rf"(.*\.)?{p}", name))
    return next(found, default)
