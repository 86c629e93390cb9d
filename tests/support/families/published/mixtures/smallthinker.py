"""A Llama whose layers choose experts by their inputs, and of which most have windows (SmallThinker)."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import Tensor, nn

WINDOW, _NUM_EXPERTS = 9, 5


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(48, 24, bias=False) for _ in range(2))
        self.down = nn.Linear(24, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(self.gate(x).relu() * self.up(x))
        return hidden


class _Mixture(nn.Module):
    """Experts of which every token chooses two."""

    def __init__(self) -> None:
        super().__init__()
        self.primary_router = nn.Linear(48, _NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(_Expert() for _ in range(_NUM_EXPERTS))
        self.router_input = torch.empty(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.3)
        # Sigmoids of large logits would be equal.
        nn.init.normal_(self.primary_router.weight, 0, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.primary_router(self.router_input)
        best = logits.topk(2, -1)
        weights = torch.zeros_like(logits).scatter(-1, best.indices, best.values.sigmoid())
        weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return torch.einsum("btde,bte->btd", outputs, weights)


def without_rotation(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change the arguments of an attention so that nothing is rotated."""
    tables = kwargs["position_embeddings"]
    tables = (torch.ones_like(tables[0]), torch.zeros_like(tables[1]))
    return args, kwargs | {"position_embeddings": tables}


def with_window(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Change the arguments of an attention so that tokens see the last nine tokens."""
    positions = torch.arange(kwargs["hidden_states"].shape[1])
    distances = positions[:, None] - positions
    hidden = (distances < 0) | (distances >= WINDOW)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return args, kwargs | {"attention_mask": mask[None, None]}


def _as_smallthinker(reference: transformers.PreTrainedModel) -> None:
    def keep_input(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer.mlp.router_input = args[0] if args else kwargs["hidden_states"]

    for index, layer in enumerate(reference.model.layers):
        layer.mlp = _Mixture()
        layer.register_forward_pre_hook(keep_input, with_kwargs=True)
        hook = with_window if index % 4 else without_rotation
        layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


SMALLTHINKER = Published(
    "llama2",
    {"num_hidden_layers": 5},
    {
        "model_type": "smallthinker",
        "intermediate_size": None,
        "moe_ffn_hidden_size": 24,
        "moe_num_primary_experts": _NUM_EXPERTS,
        "moe_num_active_primary_experts": 2,
        "moe_primary_router_apply_softmax": False,
        "moe_enable_early_router": True,
        "moe_enable_secondary_experts": False,
        "rope_layout": [0, 1, 1, 1, 0],
        "sliding_window_layout": [0, 1, 1, 1, 0],
        "sliding_window_size": WINDOW,
    },
    ((r"\.mlp\.", ".block_sparse_moe."),),
    prepare=_as_smallthinker,
)
