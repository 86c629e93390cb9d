"""MiniCPM-SALA, made of a Granite: lightning attention in most layers, and gates without rotations in the others."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import nn

_NUM_HEADS, _HEAD_DIM = 4, 16
_KINDS = ["minicpm4", "lightning-attn", "lightning-attn"]


class _Lightning(nn.Module):
    """Linear attention with a decay for each head, all tokens of a text at once."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        size = _NUM_HEADS * _HEAD_DIM
        for name in ("q_proj", "k_proj", "v_proj", "z_proj"):
            setattr(self, name, nn.Linear(hidden_size, size, bias=False))
        self.o_proj = nn.Linear(size, hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(_HEAD_DIM, eps=1e-6)
        self.k_norm = nn.RMSNorm(_HEAD_DIM, eps=1e-6)
        self.o_norm = nn.RMSNorm(size, eps=1e-6)

    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> Any:
        length = hidden_states.shape[1]
        query, key, value = (
            project(hidden_states).unflatten(-1, (_NUM_HEADS, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(self.q_norm(query)), _rotated(self.k_norm(key))
        slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8])
        distances = torch.arange(length)[:, None] - torch.arange(length)
        decay = torch.exp(-slopes[:, None, None] * distances).tril()
        output = (query @ key.transpose(-1, -2)) * _HEAD_DIM**-0.5 * decay @ value
        normed = self.o_norm(output.transpose(1, 2).flatten(2))
        return self.o_proj(normed * self.z_proj(hidden_states).sigmoid()), None


def _rotated(x: torch.Tensor) -> torch.Tensor:
    angles = torch.arange(x.shape[-2])[:, None] * 1e4 ** -(torch.arange(_HEAD_DIM // 2) / 8)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _as_sala(reference: transformers.PreTrainedModel) -> None:
    hidden_size = reference.config.hidden_size
    for index, layer in enumerate(reference.model.layers):
        attention = layer.self_attn
        if _KINDS[index % len(_KINDS)] == "minicpm4":
            attention.o_gate = nn.Linear(hidden_size, attention.o_proj.in_features, bias=False)
            nn.init.normal_(attention.o_gate.weight, 0, 0.15)
            _gate_and_never_rotate(attention)
            continue
        layer.self_attn = _Lightning(hidden_size)
        for name, parameter in layer.self_attn.named_parameters():
            mean, std = (0.8, 0.3) if "norm" in name else (0, 0.15)
            nn.init.normal_(parameter, mean, std)


def _gate_and_never_rotate(attention: nn.Module) -> None:
    gates: list[torch.Tensor] = []

    def prepare(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        gates[:] = [module.o_gate(kwargs["hidden_states"]).sigmoid()]
        cos, sin = kwargs["position_embeddings"]
        unrotated = torch.ones_like(cos), torch.zeros_like(sin)
        return args, kwargs | {"position_embeddings": unrotated}

    attention.register_forward_pre_hook(prepare, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda _module, args: (args[0] * gates[0],))


SALA = Published(
    "granite",
    {
        "num_hidden_layers": 4,
        "residual_multiplier": 1.4 / 4**0.5,
        "logits_scaling": 3.0,
        "attention_multiplier": 8**-0.5,
        "embedding_multiplier": 12.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "tie_word_embeddings": False,
    },
    {
        "model_type": "minicpm_sala",
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "mixer_types": _KINDS,
        "lightning_nh": _NUM_HEADS,
        "lightning_nkv": _NUM_HEADS,
        "lightning_head_dim": _HEAD_DIM,
        "lightning_scale": "1/sqrt(d)",
        "lightning_use_rope": True,
        "use_output_gate": True,
        "use_output_norm": True,
        "qk_norm": True,
        "attn_use_rope": False,
        "attn_use_output_gate": True,
    },
    prepare=_as_sala,
)
