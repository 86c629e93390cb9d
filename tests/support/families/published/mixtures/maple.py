"""A GLM-4.5 whose layers have windows or no rotation, and experts with clamped gates (Maple)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from support.families.published.mixtures.smallthinker import WINDOW, with_window, without_rotation
from torch import Tensor, nn
from torch.nn import functional as F

_NUM_EXPERTS, _KINDS = 5, ("sliding_attention", "full_attention", "sliding_attention")


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(48, 24, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(24, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=7.0), self.up_proj(x).clamp(-7.0, 7.0)
        hidden: Tensor = self.down_proj(F.silu(gate) * up)
        return hidden


class _Mixture(nn.Module):
    """Experts of which every token chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, _NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(_Expert() for _ in range(_NUM_EXPERTS))
        for parameter in self.parameters():
            # Many products are outside of the limits.
            nn.init.normal_(parameter, 0, 1.0)
        nn.init.normal_(self.gate.weight, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1)
        best = probabilities.topk(2, -1)
        weights = torch.zeros_like(probabilities).scatter(-1, best.indices, best.values)
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.einsum("btde,bte->btd", outputs, weights)


def _as_maple(reference: transformers.PreTrainedModel) -> None:
    layers: Any = reference.model.layers
    for kind, layer in zip(_KINDS, layers, strict=True):
        layer.mlp = _Mixture()
        hook = with_window if kind == "sliding_attention" else without_rotation
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


MAPLE = Published(
    "glm4-moe",
    {"attention_bias": False, "use_qk_norm": True},
    {
        "model_type": "maple",
        "hidden_act": "silu",
        "num_experts": _NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "nope_on_global_attention": True,
        "sliding_window": WINDOW,
        "layer_types": list(_KINDS),
    },
    ((r"embed_tokens", "word_embeddings"),),
    prepare=_as_maple,
)
