"""A Mixtral whose experts read the input of a layer and are added to its MLP (Snowflake Arctic)."""

from __future__ import annotations

from typing import Any

import transformers
from support.families.published.changes import Tensors
from support.families.published.form import Published
from torch import Tensor, nn


class _MLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(48, size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(size, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))
        return hidden


class _WithExperts(nn.Module):
    """A layer with an MLP, whose experts read the layer's input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.residual_layernorm = nn.RMSNorm(48, eps=layer.input_layernorm.variance_epsilon)
        self.beside = _MLP(48)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        y = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        dense = self.beside(self.residual_layernorm(y))
        total: Tensor = y + dense + self.mlp(self.post_attention_layernorm(x))
        return total


def _as_arctic(reference: transformers.PreTrainedModel) -> None:
    layers = reference.model.layers
    for i, layer in enumerate(layers):
        if (i + 1) % reference.config.moe_layer_frequency == 0:
            layers[i] = _WithExperts(layer)
        else:
            layer.mlp = _MLP(80)
    for name, parameter in layers.named_parameters():
        if ".residual_" in name or ".w" in name:
            nn.init.normal_(parameter, 0.8 if "norm" in name else 0, 0.3)


def _with_own_experts(tensors: Tensors) -> Tensors:
    changed = {}
    for name, weight in tensors.items():
        if (end := ".experts.gate_up_proj") in name:
            for i, both in enumerate(weight):
                for part, rows in zip(("w1", "w3"), both.chunk(2), strict=True):
                    changed[name.replace(end, f".experts.{i}.{part}.weight")] = rows
        elif (end := ".experts.down_proj") in name:
            for i, rows in enumerate(weight):
                changed[name.replace(end, f".experts.{i}.w2.weight")] = rows
        else:
            changed[name] = weight
    return changed


ARCTIC = Published(
    "mixtral",
    {
        "num_hidden_layers": 4,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "moe_layer_frequency": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    {"model_type": "arctic", "parallel_attn_mlp_res": True},
    (
        (r"\.beside\.", ".residual_mlp."),
        (r"\.mlp\.w", ".block_sparse_moe.mlp.w"),
        (r"\.mlp\.", ".block_sparse_moe."),
    ),
    _with_own_experts,
    prepare=_as_arctic,
)
