"""A Qwen3-MoE whose experts have adjugate experts in common (GroveMoE)."""

from __future__ import annotations

import torch
import transformers
from support.families.published.form import Published
from torch import Tensor, nn

NUM_EXPERTS, _GROUP, _SCALE = 6, 3, 0.4


class _Expert(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(48, size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(size, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return hidden


class _Grove(nn.Module):
    """Experts of which every token chooses two, each with the adjugate expert of its group of three."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(48, NUM_EXPERTS, bias=False)
        self.expert_bias = nn.Parameter(torch.zeros(NUM_EXPERTS))
        self.experts = nn.ModuleList(_Expert(24) for _ in range(NUM_EXPERTS))
        self.chunk_experts = nn.ModuleList(_Expert(16) for _ in range(NUM_EXPERTS // _GROUP))
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        weights = weights / weights.sum(-1, keepdim=True)
        small = [expert(x) for expert in self.chunk_experts]
        outputs = [expert(x) + _SCALE * small[i // _GROUP] for i, expert in enumerate(self.experts)]
        return torch.einsum("btde,bte->btd", torch.stack(outputs, -1), weights)


def _as_grove(reference: transformers.PreTrainedModel) -> None:
    for layer in reference.model.layers:
        layer.mlp = _Grove()


GROVE = Published(
    "qwen3-moe-all",
    {},
    {
        "model_type": "grove_moe",
        "parallel_expert_intermediate_size": 16,
        "num_experts_per_group": _GROUP,
        "expert_group_scale": _SCALE,
    },
    prepare=_as_grove,
)
