"""A Gemma 2 with experts and an MLP beside them (Grok 2)."""

from __future__ import annotations

import math

import torch
import transformers
from support.families.published.changes import Tensors
from support.families.published.form import Published
from torch import Tensor, nn

_NUM_EXPERTS, _CAP, _LOGIT_SCALE = 5, 2.0, 0.4


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(48, 24, bias=False) for _ in range(2))
        self.w2 = nn.Linear(24, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.gelu(self.w1(x), approximate="tanh")
        hidden: Tensor = self.w2(gate * self.w3(x))
        return hidden


class _Beside(nn.Module):
    """An MLP, and experts of which every token chooses two, whose capped logits become probabilities."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp
        self.gate = nn.Linear(48, _NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(_Expert() for _ in range(_NUM_EXPERTS))
        for name, parameter in self.named_parameters():
            if not name.startswith("mlp."):
                nn.init.normal_(parameter, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        scores = (_CAP * torch.tanh(self.gate(x) / _CAP)).softmax(-1)
        best = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, best.indices, best.values)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        total: Tensor = self.mlp(x) + torch.einsum("btde,bte->btd", outputs, weights)
        return total * math.sqrt(1 / 2)


def _as_grok(reference: transformers.PreTrainedModel) -> None:
    for layer in reference.model.layers:
        layer.mlp = _Beside(layer.mlp)
    reference.lm_head.register_forward_hook(lambda _module, _args, logits: logits * _LOGIT_SCALE)


def _with_whole_norms(tensors: Tensors) -> Tensors:
    return {name: x + 1 if "norm" in name else x for name, x in tensors.items()}


GROK = Published(
    "gemma2",
    {
        "head_dim": 8,
        "layer_types": ["full_attention"] * 3,
        "rms_norm_eps": 0.01,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "git",
        "hidden_activation": "gelu",
        "residual_moe": True,
        "num_local_experts": _NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "router_logit_softcapping": _CAP,
        "attn_output_multiplier": 24**-0.5,
        "embedding_multiplier_scale": math.sqrt(48),
        "output_multiplier_scale": _LOGIT_SCALE,
        "query_pre_attn_scalar": None,
    },
    (
        (r"input_layernorm", "pre_attn_norm"),
        (r"post_attention_layernorm", "post_attn_norm"),
        (r"pre_feedforward_layernorm", "pre_moe_norm"),
        (r"post_feedforward_layernorm", "post_moe_norm"),
        (r"\.mlp\.(gate\.|experts)", r".block_sparse_moe.\1"),
        (r"\.mlp\.mlp", ".mlp"),
    ),
    _with_whole_norms,
    prepare=_as_grok,
)
