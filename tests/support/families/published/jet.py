"""Jet-Nemotron, made of a Qwen2: a delta rule for one token after the other, and taps of each token for its values."""

from __future__ import annotations

import re
from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import nn
from torch.nn import functional as F

_NUM_HEADS, _KEY_DIM, _VALUE_DIM, _NUM_TAPS, _EPS = 4, 8, 12, 4, 1e-5
_KINDS = ["jet", "attn", "jet", "swa"]


class _Taps(nn.Module):
    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, size // 8, bias=False)
        self.w2 = nn.Linear(size // 8, size * _NUM_TAPS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        taps: torch.Tensor = self.w2(F.silu(self.w1(x)))
        return taps.unflatten(-1, (-1, _NUM_TAPS))


class _JetBlock(nn.Module):
    """The recurrent layer, computed token by token."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        keys, values = _NUM_HEADS * _KEY_DIM, _NUM_HEADS * _VALUE_DIM
        sizes = {"q": keys, "k": keys, "v": values, "a": _NUM_HEADS, "b": _NUM_HEADS, "g": values}
        for name, size in sizes.items():
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, size, bias=False))
        self.o_proj = nn.Linear(values, hidden_size, bias=False)
        self.A_log, self.dt_bias = (nn.Parameter(torch.empty(_NUM_HEADS)) for _ in range(2))
        self.o_norm = nn.RMSNorm(_VALUE_DIM, eps=_EPS)
        self.dynamic_conv1d = nn.ModuleDict({"kernel_generator": _Taps(hidden_size, values)})

    def forward(self, hidden_states: torch.Tensor, **_others: Any) -> Any:
        x = hidden_states[0]
        query, key = (
            F.normalize(F.silu(project(x)).unflatten(-1, (_NUM_HEADS, -1)), dim=-1, eps=1e-3)
            for project in (self.q_proj, self.k_proj)
        )
        padded = F.pad(self.v_proj(x), (0, 0, _NUM_TAPS - 1, 0))
        taps = self.dynamic_conv1d["kernel_generator"](x)
        value = F.silu((padded.unfold(0, _NUM_TAPS, 1) * taps).sum(-1))
        value = value.unflatten(-1, (_NUM_HEADS, -1))
        decay = torch.exp(-self.A_log.exp() * F.softplus(self.a_proj(x) + self.dt_bias))
        strength = self.b_proj(x).sigmoid()
        state = torch.zeros(_NUM_HEADS, _KEY_DIM, _VALUE_DIM)
        outputs = []
        for t in range(len(x)):
            state = state * decay[t, :, None, None]
            error = value[t] - torch.einsum("hkv,hk->hv", state, key[t])
            correction = strength[t, :, None] * error
            state = state + key[t, :, :, None] * correction[:, None]
            outputs.append(torch.einsum("hkv,hk->hv", state, query[t]) * _KEY_DIM**-0.5)
        gate = F.silu(self.g_proj(x)).unflatten(-1, (_NUM_HEADS, -1))
        return self.o_proj((self.o_norm(torch.stack(outputs)) * gate).flatten(1))[None], None


def _as_jet(reference: transformers.PreTrainedModel) -> None:
    for kind, layer in zip(_KINDS, reference.model.layers, strict=True):
        if kind != "jet":
            continue
        layer.self_attn = _JetBlock(reference.config.hidden_size)
        for name, parameter in layer.self_attn.named_parameters():
            is_factor = re.search(r"norm|bias|A_log", name)
            nn.init.normal_(parameter, *((0.8, 0.3) if is_factor else (0, 0.2)))


JET = Published(
    "qwen2",
    {
        "num_hidden_layers": len(_KINDS),
        # A window of ten tokens and the token itself.
        "sliding_window": 11,
        "use_sliding_window": True,
        "layer_types": ["full_attention"] * 3 + ["sliding_attention"],
        "tie_word_embeddings": True,
    },
    {
        "model_type": "jet_nemotron",
        "layer_types": _KINDS,
        "sliding_window": None,
        "efficient_attention_config": {
            "swa": {"window_size": 10},
            "jet": {
                "mode": "chunk",
                "expand_v": _VALUE_DIM / _KEY_DIM,
                "num_heads": _NUM_HEADS,
                "head_dim": _KEY_DIM,
                "norm_eps": "1e-5",
                "conv_size": _NUM_TAPS,
                "dconv_generator_reduction": 8,
                "dconv_implementation": "triton",
            },
        },
    },
    prepare=_as_jet,
)
