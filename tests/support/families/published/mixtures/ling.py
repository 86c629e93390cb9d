"""Ling 2.5, made of a Ling 3 of transformers: lightning attention instead of the delta rule, and no gates beside it."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.changes import Tensors
from torch.nn import functional as F

LING_2_5 = {
    "layer_types": None,
    "mlp_layer_types": None,
    "linear_conv_kernel_dim": None,
    "linear_head_dim": None,
    "linear_num_heads": None,
    "model_max_length": None,
    "moe_renormalize": None,
    "num_expert_group": None,
    "num_experts_per_token": None,
    "n_routed_experts": None,
    "max_position_embeddings": 256,
    "norm_topk_prob": True,
    "n_group": 3,
    "num_experts_per_tok": 3,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "group_norm_size": 2,
    "use_qk_norm": True,
    "partial_rotary_factor": 0.5,
    "score_function": "sigmoid",
    "num_experts": 6,
    "rope_theta": 2e4,
    "rope_parameters": None,
}
_NUM_HEADS, _HEAD_DIM, _NUM_GROUPS = 4, 16, 2


class Lightning(torch.nn.Module):
    """Linear attention with a decay for each head, all tokens of a text at once."""

    def __init__(self, hidden_size: int, depth: float) -> None:
        super().__init__()
        size = _NUM_HEADS * _HEAD_DIM
        self.query_key_value = torch.nn.Linear(hidden_size, 3 * size, bias=False)
        self.g_proj = torch.nn.Linear(hidden_size, size, bias=False)
        self.dense = torch.nn.Linear(size, hidden_size, bias=False)
        self.g_norm = torch.nn.RMSNorm(size)
        self.query_layernorm = torch.nn.RMSNorm(_HEAD_DIM, eps=1e-6)
        self.key_layernorm = torch.nn.RMSNorm(_HEAD_DIM, eps=1e-6)
        self._slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8]) * (1 - depth + 1e-5)

    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> Any:
        length = hidden_states.shape[1]
        parts = self.query_key_value(hidden_states).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (_NUM_HEADS, -1)).transpose(1, 2) for part in parts)
        query, key = (
            _rotated(norm(x))
            for norm, x in ((self.query_layernorm, query), (self.key_layernorm, key))
        )
        distances = torch.arange(length)[:, None] - torch.arange(length)
        decay = torch.exp(-self._slopes[:, None, None] * distances).tril()
        output = (query @ key.transpose(-1, -2)) * _HEAD_DIM**-0.5 * decay @ value
        groups = output.transpose(1, 2).flatten(2).unflatten(-1, (_NUM_GROUPS, -1))
        normed = F.rms_norm(groups, groups.shape[-1:], eps=1e-6).flatten(2) * self.g_norm.weight
        return self.dense(normed * self.g_proj(hidden_states).sigmoid())


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of the elements of each head."""
    size = _HEAD_DIM // 4
    angles = torch.arange(x.shape[-2])[:, None] * 2e4 ** -(torch.arange(size) / size)
    first, second, rest = x.split((size, size, _HEAD_DIM - 2 * size), -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def as_ling_2_5(reference: transformers.PreTrainedModel) -> None:
    """Give the recurrent layers lightning attention. A gate of 0 halves the outputs of the others."""
    layers = reference.model.layers
    for index, layer in enumerate(layers):
        if hasattr(layer.self_attn, "kv_b_proj"):
            layer.self_attn.g_proj.weight.data.zero_()
            continue
        lightning = Lightning(reference.config.hidden_size, (index - 1) / (len(layers) - 1))
        for name, parameter in lightning.named_parameters():
            mean, std = (0.8, 0.3) if "norm" in name else (0, 0.15)
            torch.nn.init.normal_(parameter, mean, std)
        layer.self_attn = lightning


def without_gates(tensors: Tensors) -> Tensors:
    """Drop the gates of latent attention, and halve its output projection instead."""
    changed = {}
    for name, weight in tensors.items():
        block = name.rpartition(".attention.")[0]
        is_latent = f"{block}.attention.kv_b_proj.weight" in tensors
        if is_latent and name.endswith("attention.g_proj.weight"):
            continue
        is_output = is_latent and name.endswith("attention.dense.weight")
        changed[name] = weight / 2 if is_output else weight
    return changed
