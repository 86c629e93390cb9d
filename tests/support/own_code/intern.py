"""Intern-S1 Pro and Intern-S2 Mobius, made of transformers' models.

The first is a Qwen3-VL-MoE whose rotation and router are replaced, the second a Qwen3.5-MoE whose layers share experts.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

NUM_GROUPS = 2
MAX_LENGTH = 256
"""Two of the eight frequencies of the test's heads have no whole turn in so many positions."""


class _Angles(nn.Module):
    """Computes sums of cosines and of sines for each key/value head, and keeps them for the norms of heads."""

    def __init__(self, inv_freq: Tensor, cos_coef: Tensor, sin_coef: Tensor) -> None:
        super().__init__()
        self.inv_freq = inv_freq[: cos_coef.shape[-1]]
        self.num_ones = len(inv_freq) - len(self.inv_freq)
        self.coefficients = cos_coef, sin_coef
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines of no rotation, because the norms rotate."""
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq
        self.kept = []
        for values, coefficients in zip(
            (angles.cos(), angles.sin()), self.coefficients, strict=True
        ):
            sums = torch.stack([values @ matrix for matrix in coefficients], 1)
            self.kept.append(F.pad(sums, (0, self.num_ones), value=1.0).repeat(1, 1, 2))
        size = 2 * (len(self.inv_freq) + self.num_ones)
        return torch.ones(1, x.shape[1], size), torch.zeros(1, x.shape[1], size)


class _RotatedNorm(nn.Module):
    """Norms heads, then rotates each by the angles of its key/value head."""

    def __init__(self, norm: nn.Module, angles: _Angles) -> None:
        super().__init__()
        self.norm = norm
        self.angles = angles

    def forward(self, x: Tensor) -> Tensor:
        """Return the heads [1, T, H, K]."""
        heads = self.norm(x)
        num_repeats = heads.shape[2] // self.angles.kept[0].shape[1]
        cos, sin = (each.repeat_interleave(num_repeats, 1) for each in self.angles.kept)
        first, second = heads.chunk(2, -1)
        rotated: Tensor = heads * cos + torch.cat((-second, first), -1) * sin
        return rotated


class _GroupedRouter(nn.Module):
    """Chooses equally many experts of each group."""

    def __init__(self, gate: Any) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the logits, and the weights and numbers of the chosen experts."""
        logits = F.linear(x, self.gate.weight)
        scores = logits.softmax(-1)
        size, number = scores.shape[1] // NUM_GROUPS, self.gate.top_k // NUM_GROUPS
        chosen = [
            first + scores[:, first : first + size].topk(number).indices
            for first in range(0, scores.shape[1], size)
        ]
        indices = torch.cat(chosen, 1)
        weights = scores.gather(1, indices)
        return logits, weights / weights.sum(1, keepdim=True), indices


def become_interns1_pro(directory: Path, model: Any) -> None:
    """Turn a saved Qwen3-VL-MoE without DeepStack, and its files, into an Intern-S1 Pro."""
    text, config = model.model.language_model, json.loads((directory / "config.json").read_text())
    own = config["text_config"]
    inv_freq: Tensor = text.rotary_emb.inv_freq
    size = int((inv_freq > 2 * math.pi / MAX_LENGTH).sum())
    assert 0 < size < len(inv_freq)
    shape = (own["num_key_value_heads"], size, size)
    coefficients = {name: 0.3 * torch.randn(shape) + torch.eye(size) for name in ("cos", "sin")}
    angles = _Angles(inv_freq, coefficients["cos"], coefficients["sin"])
    text.rotary_emb = angles
    for layer in text.layers:
        attention = layer.self_attn
        attention.q_norm = _RotatedNorm(attention.q_norm, angles)
        attention.k_norm = _RotatedNorm(attention.k_norm, angles)
        layer.mlp.gate = _GroupedRouter(layer.mlp.gate)
    file = directory / "model.safetensors"
    prefix = "model.language_model.rotary_emb."
    buffers = {f"{prefix}{name}_coef": matrices for name, matrices in coefficients.items()}
    save_file(load_file(file) | buffers, file)
    own.pop("rope_parameters", None)
    own |= {
        "model_type": "interns1_pro_text",
        "max_position_embeddings": MAX_LENGTH,
        "norm_topk_prob": True,
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "default",
            "fope_init_factor": 0.5,
            "fope_sep_head": True,
            "num_inv_freq": None,
        },
        "router_n_groups": NUM_GROUPS,
    }
    del config["vision_config"]["deepstack_visual_indexes"]
    config["architectures"] = ["InternS1ProForConditionalGeneration"]
    config["model_type"] = "interns1_pro"
    (directory / "config.json").write_text(json.dumps(config))


NUM_BANKS = 3


def become_interns2_mobius(directory: Path, model: Any) -> None:
    """Turn a saved Qwen3.5-MoE, and its files, into an Intern-S2 Mobius. Its first and last layers share experts."""
    layers = model.model.language_model.layers
    assert len(layers) == NUM_BANKS + 1
    stored = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        match = re.fullmatch(r"(.*)\.layers\.(\d+)\.mlp\.((gate|experts)\..*)", name)
        if match is None:
            stored[name] = tensor
        elif int(match[2]) < NUM_BANKS:
            stored[f"{match[1]}.meta_mlp.{match[2]}.{match[3]}"] = tensor
    for i, layer in enumerate(layers):
        bank = layers[i % NUM_BANKS].mlp
        layer.mlp.gate, layer.mlp.experts = bank.gate, bank.experts
        mixer = getattr(layer, "linear_attn", None) or layer.self_attn
        for name, block in (("attn", mixer), ("ffn", layer.mlp)):
            scale = 0.3 * torch.randn(1, 1, layer.hidden_size)
            stored[f"model.language_model.layers.{i}.{name}_layer_scale"] = scale
            block.register_forward_hook(_Scaling(scale))
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {
        "model_type": "interns2_mobius_text",
        "num_blocks": NUM_BANKS,
        "layer_scale": True,
    }
    config["architectures"] = ["InternS2MobiusForConditionalGeneration"]
    config["model_type"] = "interns2_mobius"
    (directory / "config.json").write_text(json.dumps(config))


class _Scaling:
    """Multiplies the output of a block by 1 plus a number for each element."""

    def __init__(self, scale: Tensor) -> None:
        self.factor = 1 + scale

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return output[0] * self.factor, *output[1:]
        return output * self.factor
