"""openPangu Pro MoE V2, made of a GLM-4.5: keys and values of sinks, windows, and norms of outputs."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import nn

_PLAIN, _ROTATED, _VALUES, _NUM_SINKS, _NUM_KV_HEADS = 8, 8, 12, 3, 2
_KEYS = _PLAIN + _ROTATED
_WINDOWS = [10, None, 20]
_THETA, _EPS = 2e4, 1e-6


class _Attention(nn.Module):
    """Attention to a text as a whole, and to a few more keys that every token sees."""

    def __init__(self, hidden_size: int, num_heads: int, window: int | None) -> None:
        super().__init__()
        sizes = {"q": num_heads * _KEYS, "k": _NUM_KV_HEADS * _KEYS, "v": _NUM_KV_HEADS * _VALUES}
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, size))
        self.o_proj = nn.Linear(num_heads * _VALUES, hidden_size, bias=False)
        self.k_layernorm = nn.RMSNorm(_KEYS, eps=_EPS)
        self.param_sink_key = nn.Parameter(torch.empty(_NUM_SINKS, _NUM_KV_HEADS, _KEYS))
        self.param_sink_value = nn.Parameter(torch.empty(_NUM_SINKS, _NUM_KV_HEADS, _VALUES))
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, *((0.8, 0.3) if "norm" in name else (0, 0.2)))
        nn.init.normal_(self.param_sink_value)
        self._window = window

    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> Any:
        x = hidden_states[0]
        q, k, v = (
            project(x).unflatten(-1, (-1, size)).transpose(0, 1)
            for project, size in (
                (self.q_proj, _KEYS),
                (self.k_proj, _KEYS),
                (self.v_proj, _VALUES),
            )
        )
        q, k = _rotated(q), _rotated(self.k_layernorm(k))
        sink_keys = self.k_layernorm(self.param_sink_key).transpose(0, 1)
        k = torch.cat((sink_keys, k), 1)
        v = torch.cat((self.param_sink_value.transpose(0, 1), v), 1)
        k, v = (each.repeat_interleave(len(q) // _NUM_KV_HEADS, 0) for each in (k, v))
        distances = torch.arange(len(x))[:, None] - torch.arange(len(x))
        is_hidden = distances < 0
        if self._window is not None:
            is_hidden |= distances >= self._window
        is_hidden = nn.functional.pad(is_hidden, (_NUM_SINKS, 0))
        scores = (q @ k.transpose(-1, -2)).masked_fill(is_hidden, -torch.inf) * _KEYS**-0.5
        output = torch.softmax(scores, -1) @ v
        return self.o_proj(output.transpose(0, 1).flatten(1))[None], None


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighboring elements, of which the first ones of a head consist."""
    half = _ROTATED // 2
    angles = torch.arange(x.shape[-2])[:, None] * _THETA ** -(torch.arange(half) / half)
    even, odd = x[..., :_ROTATED:2], x[..., 1:_ROTATED:2]
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((pairs, x[..., _ROTATED:]), -1)


def _forward(layer: Any, x: torch.Tensor, **others: Any) -> torch.Tensor:
    attended, _ = layer.self_attn(layer.input_layernorm(x), **others)
    x = x + layer.post_attention_layernorm(attended)
    output: torch.Tensor = x + layer.post_mlp_layernorm(layer.mlp(layer.pre_mlp_layernorm(x)))
    return output


def _as_pangu_pro(reference: transformers.PreTrainedModel) -> None:
    config = reference.config
    for window, layer in zip(_WINDOWS, reference.model.layers, strict=True):
        layer.self_attn = _Attention(config.hidden_size, config.num_attention_heads, window)
        for name in ("pre_mlp", "post_mlp"):
            norm = nn.RMSNorm(config.hidden_size, eps=_EPS)
            nn.init.normal_(norm.weight, 0.8, 0.3)
            setattr(layer, f"{name}_layernorm", norm)
        layer.forward = functools.partial(_forward, layer)


PANGU_PRO_V2 = Published(
    "glm4-moe",
    {
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": _EPS,
        "first_k_dense_replace": 1,
        "num_key_value_heads": _NUM_KV_HEADS,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "PanguProMoE",
        "head_dim": None,
        "rope_parameters": None,
        "rope_theta": _THETA,
        "qk_nope_dim": _PLAIN,
        "qk_rope_dim": _ROTATED,
        "v_channels": _VALUES,
        "qkv_bias": True,
        "attention_bias": False,
        "param_sink_number": _NUM_SINKS,
        "param_sink_with_value": True,
        "interleaved_sliding_window": [10, 0, 20],
        "sandwich_norm": True,
        "router_enable_expert_bias": True,
    },
    ((r"mlp\.gate\.e_score", "mlp.e_score"),),
    prepare=_as_pangu_pro,
)
