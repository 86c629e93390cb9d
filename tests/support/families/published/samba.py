"""Phi-4-mini-Flash, made of a StableLM: Mamba layers and differential attention, and units that gate memories."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from support.families.published import changes
from support.families.published.form import Published
from torch import Tensor, nn
from torch.nn import functional as F

_NUM_HEADS, _NUM_KV_HEADS, _HEAD_DIM = 8, 4, 6
_NUM_LAYERS, _WINDOW = 10, 9
_CHANNELS, _STATE, _RANK, _NUM_TAPS = 96, 8, 5, 4
_FIRST_SHARED = _NUM_LAYERS // 2 + 2


class Difference(nn.Module):
    """The normed difference of what two heads attend to."""

    def __init__(self, size: int = _HEAD_DIM) -> None:
        super().__init__()
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.empty(size)) for _ in range(4)
        )
        self.subln = nn.RMSNorm(2 * size, eps=1e-5)

    def forward(self, first: Tensor, second: Tensor, index: int) -> Any:
        share = 0.8 - 0.6 * math.exp(-0.3 * index)
        factor = torch.exp(self.lambda_q1 @ self.lambda_k1) + share
        factor = factor - torch.exp(self.lambda_q2 @ self.lambda_k2)
        return self.subln(first - factor * second) * (1 - share)


class _Attention(nn.Module):
    def __init__(self, index: int, hidden_size: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.index, self.shared = index, shared
        heads = _NUM_HEADS + (0 if index >= _FIRST_SHARED else 2 * _NUM_KV_HEADS)
        self.Wqkv = nn.Linear(hidden_size, heads * _HEAD_DIM)
        self.out_proj = nn.Linear(_NUM_HEADS * _HEAD_DIM, hidden_size)
        self.inner_cross_attn = Difference()

    def forward(self, hidden_states: Tensor, **_others: Any) -> Any:
        heads = self.Wqkv(hidden_states[0]).unflatten(-1, (-1, _HEAD_DIM)).transpose(0, 1)
        query, *own = heads.split(
            (_NUM_HEADS, _NUM_KV_HEADS, _NUM_KV_HEADS)[: 3 if len(heads) > _NUM_HEADS else 1]
        )
        if own:
            self.shared["keys"] = own
        key, value = self.shared["keys"]
        positions = torch.arange(query.shape[1])
        distance = positions[:, None] - positions
        hidden = distance < 0
        if self.index < _NUM_LAYERS // 2:
            hidden = hidden | (distance >= _WINDOW)
        values = torch.cat((value[::2], value[1::2]), -1)

        def attended(first: int) -> Any:
            count = _NUM_HEADS // _NUM_KV_HEADS
            keys = key[first::2].repeat_interleave(count, 0)
            scores = query[first::2] @ keys.transpose(1, 2) * _HEAD_DIM**-0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            return weights @ values.repeat_interleave(count, 0)

        difference = self.inner_cross_attn(attended(0), attended(1), self.index)
        return self.out_proj(difference.transpose(0, 1).flatten(1))[None], None


class _Mamba(nn.Module):
    """A Mamba layer, computed token by token."""

    def __init__(self, hidden_size: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.shared = shared
        self.in_proj = nn.Linear(hidden_size, 2 * _CHANNELS, bias=False)
        self.conv1d = nn.Conv1d(_CHANNELS, _CHANNELS, _NUM_TAPS, groups=_CHANNELS)
        self.x_proj = nn.Linear(_CHANNELS, _RANK + 2 * _STATE, bias=False)
        self.dt_proj = nn.Linear(_RANK, _CHANNELS)
        self.A_log = nn.Parameter(torch.empty(_CHANNELS, _STATE))
        self.D = nn.Parameter(torch.empty(_CHANNELS))
        self.out_proj = nn.Linear(_CHANNELS, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **_others: Any) -> Any:
        x, gate = self.in_proj(hidden_states[0]).chunk(2, -1)
        x = F.silu(self.conv1d(F.pad(x.T, (_NUM_TAPS - 1, 0))[None])[0].T)
        rank, inputs, reads = self.x_proj(x).split((_RANK, _STATE, _STATE), -1)
        step = F.softplus(self.dt_proj(rank))
        state, outputs = torch.zeros(_CHANNELS, _STATE), []
        for t in range(len(x)):
            decay = torch.exp(-step[t, :, None] * self.A_log.exp())
            state = state * decay + (step[t] * x[t])[:, None] * inputs[t]
            outputs.append(state @ reads[t] + self.D * x[t])
        self.shared["memory"] = torch.stack(outputs)
        return self.out_proj(self.shared["memory"] * F.silu(gate))[None], None


class _MemoryGate(nn.Module):
    def __init__(self, hidden_size: int, shared: dict[str, Any]) -> None:
        super().__init__()
        self.shared = shared
        self.in_proj = nn.Linear(hidden_size, _CHANNELS, bias=False)
        self.out_proj = nn.Linear(_CHANNELS, hidden_size, bias=False)

    def forward(self, hidden_states: Tensor, **_others: Any) -> Any:
        gate = F.silu(self.in_proj(hidden_states[0]))
        return self.out_proj(self.shared["memory"] * gate)[None], None


def _as_samba(reference: transformers.PreTrainedModel) -> None:
    size, shared = reference.config.hidden_size, dict[str, Any]()
    for index, layer in enumerate(reference.model.layers):
        if index % 2:
            layer.self_attn = _Attention(index, size, shared)
        elif index < _FIRST_SHARED:
            layer.self_attn = _Mamba(size, shared)
        else:
            layer.self_attn = _MemoryGate(size, shared)
        for name, parameter in layer.self_attn.named_parameters():
            is_factor = name.endswith(("subln.weight", "bias", "A_log", "D"))
            nn.init.normal_(parameter, *((0.6, 0.3) if is_factor else (0, 0.2)))


def _with_fused_gates(tensors: changes.Tensors) -> changes.Tensors:
    names = [name for name in tensors if ".mlp.gate_proj." in name]
    fused = {
        name.replace("gate_proj", "fc1"): torch.cat(
            (tensors[name], tensors.pop(name.replace("gate", "up")))
        )
        for name in names
    }
    return {name: x for name, x in tensors.items() if name not in names} | fused


PHI4_FLASH = Published(
    "stablelm",
    {
        "num_hidden_layers": _NUM_LAYERS,
        "num_attention_heads": _NUM_HEADS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "hidden_size": _NUM_HEADS * _HEAD_DIM,
        "tie_word_embeddings": True,
    },
    {
        "model_type": "phi4flash",
        "sliding_window": _WINDOW,
        "mb_per_layer": 2,
        "mamba_d_state": _STATE,
        "mamba_d_conv": _NUM_TAPS,
        "mamba_expand": 2,
        "mamba_dt_rank": _RANK,
        "partial_rotary_factor": None,
    },
    (
        (r"\.self_attn\.", ".attn."),
        (r"^model\.norm\.", "model.final_layernorm."),
        (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    ),
    _with_fused_gates,
    prepare=_as_samba,
)
