"""IQuest Q1, made of a Qwen3-MoE: keys of sinks, norms that replace the stream, and norms of outputs of attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support.families.published.changes import Tensors
from support.families.published.form import Published
from torch import nn

_SCALE, _WINDOW, _ROTARY_DIM = 0.6, 10, 8
_KINDS = ["full_attention", "full_attention", "sliding_attention", "full_attention"]
_THETAS = {"full_attention": 2e4, "sliding_attention": 1e3}


class _Attention(nn.Module):
    """Attention to a text as a whole, with one more key without a value for each key/value head."""

    def __init__(self, old: Any, kind: str, *, has_rope: bool) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            setattr(self, name, getattr(old, name))
        self.sink_k = nn.Parameter(torch.empty(2, old.head_dim).normal_(0, 0.5))
        self._size, self._kind, self._has_rope = old.head_dim, kind, has_rope

    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> Any:
        x = hidden_states[0]
        q, k, v = (
            project(x).unflatten(-1, (-1, self._size)).transpose(0, 1)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q), self.k_norm(k)
        if self._has_rope:
            q, k = (_rotated(each, _THETAS[self._kind]) for each in (q, k))
        groups = len(q) // len(k)
        k, v, sinks = (each.repeat_interleave(groups, 0) for each in (k, v, self.sink_k))
        positions = torch.arange(len(x))
        distances = positions[:, None] - positions
        is_hidden = distances < 0
        if self._kind == "sliding_attention":
            is_hidden |= distances >= _WINDOW
        scores = (q @ k.transpose(-1, -2)).masked_fill(is_hidden, -torch.inf)
        sink_scores = (q * sinks[:, None]).sum(-1, keepdim=True)
        weights = torch.softmax(torch.cat((sink_scores, scores), -1) * self._size**-0.5, -1)
        output = weights[..., 1:] @ v
        return self.o_proj(output.transpose(0, 1).flatten(1))[None], None


def _rotated(x: torch.Tensor, theta: float) -> torch.Tensor:
    half = _ROTARY_DIM // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** -(torch.arange(half) / half)
    first, second, rest = x.split((half, half, x.shape[-1] - _ROTARY_DIM), -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _forward(layer: Any, is_first: bool, x: torch.Tensor, **others: Any) -> torch.Tensor:
    normed = layer.input_layernorm(x)
    stream = x if is_first else normed
    stream = stream + layer.attn_out_norm(layer.self_attn(normed, **others)[0])
    output = layer.mlp(layer.post_attention_layernorm(stream))
    output = output[0] if isinstance(output, tuple) else output
    return stream + (layer.ffn_out_norm(output) if is_first else output * _SCALE)


def _as_iquest(reference: transformers.PreTrainedModel) -> None:
    size = reference.config.hidden_size
    for index, (kind, layer) in enumerate(zip(_KINDS, reference.model.layers, strict=True)):
        layer.self_attn = _Attention(layer.self_attn, kind, has_rope=index != 3)
        layer.attn_out_norm = nn.RMSNorm(size, eps=1e-6)
        if index == 0:
            layer.ffn_out_norm = nn.RMSNorm(size, eps=1e-6)
        for name, parameter in layer.named_parameters():
            if "out_norm" in name:
                nn.init.normal_(parameter, 0.8, 0.3)
        layer.forward = functools.partial(_forward, layer, index == 0)


def _with_joined_experts(tensors: Tensors) -> Tensors:
    """Store the matrices of all experts of a layer as one tensor, and keys of sinks with one more dimension."""
    stored: Tensors = {}
    for name, weight in tensors.items():
        _, found, tail = name.partition(".experts.")
        if not found or not tail[0].isdecimal():
            stored[name] = weight[None] if "sink_k" in name else weight
    layers = {name.partition(".experts.")[0] for name in tensors if ".experts.0." in name}
    for layer in layers:
        count = sum(name.startswith(f"{layer}.experts.") for name in tensors) // 3
        own = [f"{layer}.experts.{i}." for i in range(count)]
        gates, ups, downs = (
            torch.stack([tensors[f"{each}{kind}_proj.weight"] for each in own])
            for kind in ("gate", "up", "down")
        )
        stored[f"{layer}.experts.fc"] = torch.cat((gates, ups), 1)
        stored[f"{layer}.experts.proj"] = downs
    return stored


IQUEST_Q1 = Published(
    "qwen3-moe-all",
    {
        "num_hidden_layers": len(_KINDS),
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "iquest_q1",
        "intermediate_size": 24,
        "moe_intermediate_size": None,
        "dense_intermediate_size": 80,
        "layer_types": None,
        "rope_parameters": None,
        "rope_theta": _THETAS["full_attention"],
        "swa_rope_theta": _THETAS["sliding_attention"],
        "rotary_dim": _ROTARY_DIM,
        "sliding_window": _WINDOW,
        "use_sliding_window": True,
        "first_layers_types": _KINDS[:1],
        "hybrid_layers_types_block": _KINDS[1:3],
        "num_hybrid_layers_block": 1,
        "last_layers_types": _KINDS[3:],
        "no_rope_layers": [3],
        "enable_sink_attention": True,
        "ffn_out_scale": _SCALE,
    },
    (
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "feed_forward_norm"),
        (r"mlp\.gate\.", "mlp.router."),
    ),
    _with_joined_experts,
    prepare=_as_iquest,
)
