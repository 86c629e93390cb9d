"""Small random RWKV models, computed token by token as in the papers, in the form of flash-linear-attention."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

RWKV7_CONFIG: dict[str, Any] = {
    "architectures": ["RWKV7ForCausalLM"],
    "model_type": "rwkv7",
    "vocab_size": 97,
    "hidden_size": 48,
    "hidden_ratio": 2.5,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_heads": None,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 12,
    "v_low_rank_dim": 4,
    "gate_low_rank_dim": 20,
    "hidden_act": "sqrelu",
    "max_position_embeddings": 256,
    "norm_first": True,
    "norm_bias": True,
    "norm_eps": 1e-5,
    "fuse_norm": True,
    "attn": None,
    "tie_word_embeddings": False,
}


RWKV: dict[str, dict[str, Any]] = {
    "rwkv7": RWKV7_CONFIG,
    "rwkv7-one-head": RWKV7_CONFIG | {"head_dim": None, "num_heads": 1, "num_hidden_layers": 2},
}
"""The configs of models, by a name."""


def save_rwkv(name: str, path: Path, **others: Any) -> Rwkv7Reference:
    """Save a random model, and return one that is equal to it. `others` replace fields of the config."""
    reference = Rwkv7Reference(RWKV[name] | others)
    reference.save(path)
    return reference


class Rwkv7Reference(torch.nn.Module):
    """RWKV-7 (arXiv 2503.14456), one token after the other, in float32."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        c = self.config
        torch.manual_seed(0)
        size, ratio = c.hidden_size, c.hidden_ratio
        self.head_dim = c.head_dim or size // c.num_heads
        self.inner = 32 * math.ceil(int(size * ratio) / 32)
        self.tensors: dict[str, Tensor] = {
            "model.embeddings.weight": _random(c.vocab_size, size),
            "lm_head.weight": _random(c.vocab_size, size),
            **_norm("model.layers.0.pre_norm", size),
            **_norm("model.norm", size),
        }
        for i in range(c.num_hidden_layers):
            layer = f"model.layers.{i}."
            self.tensors |= _norm(f"{layer}attn_norm", size) | _norm(f"{layer}ffn_norm", size)
            self.tensors |= _norm(f"{layer}attn.g_norm", size)
            for name in "rkvo":
                self.tensors[f"{layer}attn.{name}_proj.weight"] = _random(size, size)
            for name in "rwkvag":
                self.tensors[f"{layer}attn.x_{name}"] = torch.rand(1, 1, size)
            for name in ("k_k", "k_a"):
                self.tensors[f"{layer}attn.{name}"] = torch.rand(size) + 0.5
            self.tensors[f"{layer}attn.r_k"] = _random(size // self.head_dim, self.head_dim)
            ranks = {
                "w": c.decay_low_rank_dim,
                "a": c.a_low_rank_dim,
                "v": c.v_low_rank_dim,
                "g": c.gate_low_rank_dim,
            }
            for name, rank in ranks.items():
                lora = f"{layer}attn.{name}_lora.lora."
                if (name, i) == ("v", 0):
                    continue
                self.tensors[f"{lora}0.weight"] = _random(rank, size)
                self.tensors[f"{lora}2.weight"] = _random(size, rank, scale=0.4)
                if name != "g":
                    self.tensors[f"{lora}2.bias"] = torch.randn(size)
            self.tensors[f"{layer}ffn.x_k"] = torch.rand(size)
            self.tensors[f"{layer}ffn.key.weight"] = _random(self.inner, size)
            self.tensors[f"{layer}ffn.value.weight"] = _random(size, self.inner)

    def save(self, path: Path) -> None:
        """Save the model in the form of flash-linear-attention."""
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(vars(self.config)))
        stored = {name: each.contiguous() for name, each in self.tensors.items()}
        save_file(stored, path / "model.safetensors")

    def forward(self, tokens: Tensor) -> SimpleNamespace:
        """Return the logits [1, L, V] of a sequence [1, L]."""
        t = self.tensors
        x = F.embedding(tokens[0], t["model.embeddings.weight"])
        x = self._normed("model.layers.0.pre_norm", x)
        first: Tensor | None = None
        for i in range(self.config.num_hidden_layers):
            layer = f"model.layers.{i}."
            y, first = self._time_mixed(
                f"{layer}attn.", self._normed(f"{layer}attn_norm", x), first
            )
            x = x + y
            h = self._normed(f"{layer}ffn_norm", x)
            mixed = h + (_shifted(h) - h) * t[f"{layer}ffn.x_k"]
            inner = F.relu(mixed @ t[f"{layer}ffn.key.weight"].T).square()
            x = x + inner @ t[f"{layer}ffn.value.weight"].T
        x = self._normed("model.norm", x)
        return SimpleNamespace(logits=(x @ t["lm_head.weight"].T)[None])

    def _normed(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self.tensors[f"{name}.{part}"] for part in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.config.norm_eps)

    def _time_mixed(self, layer: str, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        t, dim = self.tensors, self.head_dim
        difference = _shifted(x) - x
        r, w, k, v, a, g = (x + difference * t[f"{layer}x_{name}"][0] for name in "rwkvag")

        def low_rank(name: str, x: Tensor, function: Any = lambda x: x) -> Tensor:
            lora = f"{layer}{name}_lora.lora."
            y = function(x @ t[f"{lora}0.weight"].T) @ t[f"{lora}2.weight"].T
            return y + t.get(f"{lora}2.bias", torch.zeros(1))

        decay = torch.exp(-math.exp(-0.5) * low_rank("w", w, torch.tanh).sigmoid())
        values = v @ t[f"{layer}v_proj.weight"].T
        if first is None:
            first = values
        else:
            values = torch.lerp(values, first, low_rank("v", v).sigmoid())
        rate = low_rank("a", a).sigmoid()
        gate = low_rank("g", g, torch.sigmoid)
        keys = k @ t[f"{layer}k_proj.weight"].T
        heads = (-1, dim)
        removed = F.normalize((keys * t[f"{layer}k_k"]).unflatten(-1, heads), dim=-1)
        keys = (keys * (1 + (rate - 1) * t[f"{layer}k_a"])).unflatten(-1, heads)
        queries = (r @ t[f"{layer}r_proj.weight"].T).unflatten(-1, heads)
        decay, values, rate = (each.unflatten(-1, heads) for each in (decay, values, rate))
        state = torch.zeros(keys.shape[1], dim, dim)
        outputs = []
        for i in range(len(x)):
            recalled = torch.einsum("hk,hkv->hv", -removed[i], state)
            state = state * decay[i][..., None]
            state = state + (removed[i] * rate[i])[..., None] * recalled[:, None]
            state = state + keys[i][..., None] * values[i][:, None]
            outputs.append(torch.einsum("hk,hkv->hv", queries[i], state))
        y = torch.stack(outputs).flatten(1)
        weight, bias = (t[f"{layer}g_norm.{part}"] for part in ("weight", "bias"))
        eps = dim * self.config.norm_eps
        y = F.group_norm(y, keys.shape[1], weight, bias, eps).unflatten(-1, heads)
        y = y + (queries * keys * t[f"{layer}r_k"]).sum(-1, keepdim=True) * values
        return (y.flatten(1) * gate) @ t[f"{layer}o_proj.weight"].T, first.flatten(1)


def _random(*shape: int, scale: float = 0.15) -> Tensor:
    return torch.randn(*shape) * scale


def _norm(name: str, size: int) -> dict[str, Tensor]:
    return {
        f"{name}.weight": torch.randn(size) * 0.3 + 0.8,
        f"{name}.bias": torch.randn(size) * 0.3,
    }


def _shifted(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, -1))
