"""A Laguna as Step 5, whose layers without a window attend to some blocks of keys."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from support.families.published.changes import Tensors
from support.families.published.form import Published
from torch import Tensor, nn
from transformers.models.laguna.modeling_laguna import apply_rotary_pos_emb

_HEADS, _SIZE, _ROTARY, _BLOCK, _CHOSEN = 4, 20, 8, 4, 3


class _Indexer(nn.Module):
    """Returns for each key/value head which keys a token attends to."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, self.num_groups = config.hidden_size, config.num_key_value_heads
        self.q = nn.Linear(size, _HEADS * _SIZE, bias=False)
        self.k = nn.Linear(size, _SIZE, bias=False)
        self.z = nn.Linear(size, _SIZE, bias=False)
        self.w = nn.Linear(size, _HEADS, bias=False)
        self.q_norm = nn.RMSNorm(_SIZE, eps=config.rms_norm_eps)
        self.k_norm = nn.LayerNorm(_SIZE, eps=config.rms_norm_eps)
        for name, parameter in self.named_parameters():
            nn.init.normal_(parameter, *((0.8, 0.3) if "norm" in name else (0, 0.15)))
        self.ssmax_s = nn.Parameter(torch.ones(config.num_attention_heads))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        frequencies = 1e4 ** (-torch.arange(0, _ROTARY, 2) / _ROTARY)
        angles = (torch.arange(length)[:, None] * frequencies).repeat(1, 2)[None]
        queries = self.q_norm(self.q(x).unflatten(2, (_HEADS, -1))).transpose(1, 2)
        keys = self.k_norm(self.k(x)).unsqueeze(1)
        queries, keys = apply_rotary_pos_emb(queries, keys, angles.cos(), angles.sin())
        num_blocks = length // _BLOCK
        keys, logits = (
            each[: num_blocks * _BLOCK].unflatten(0, (num_blocks, _BLOCK))
            for each in (keys[0, 0], self.z(x)[0])
        )
        means = (keys * logits.softmax(1)).sum(1)
        scores = (queries[0] @ means.T).relu() * self.w(x)[0].T[..., None]
        scores = scores.unflatten(0, (self.num_groups, -1)).sum(1)
        sees = torch.zeros(self.num_groups, length, length, dtype=torch.bool)
        for group in range(self.num_groups):
            for token in range(length):
                own = token // _BLOCK
                order = scores[group, token, :own].argsort(descending=True, stable=True)
                for block in [own, *order[:_CHOSEN].tolist()]:
                    sees[group, token, block * _BLOCK : (block + 1) * _BLOCK] = True
        return sees.tril()


def _as_step5(reference: transformers.PreTrainedModel) -> None:
    for layer in reference.model.layers:
        attention = layer.self_attn
        # The softplus of this is the sigmoid.
        attention.g_proj.register_forward_hook(lambda _m, _args, x: x.sigmoid().expm1().log())
        if not attention.is_local_attention:
            attention.sparse_indexer = _Indexer(reference.config)
            attention.register_forward_pre_hook(_with_mask, with_kwargs=True)


def _with_mask(attention: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    sees = attention.sparse_indexer(kwargs["hidden_states"])
    mask = torch.zeros(sees.shape).masked_fill(~sees, -math.inf)
    repeats = attention.num_heads // len(sees)
    return args, kwargs | {"attention_mask": mask.repeat_interleave(repeats, 0)[None]}


def _changed(tensors: Tensors) -> Tensors:
    """Center the weights of norms around zero, and stack the matrices of experts."""
    changed: Tensors = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, weight in tensors.items():
        if "norm" in name and "indexer.k_norm" not in name:
            weight = weight - 1
        before, _, rest = name.partition(".mlp.experts.")
        if rest and rest[0].isdigit():
            number, _, matrix = rest.partition(".")
            stacks.setdefault(f"{before}.moe.{matrix}", {})[int(number)] = weight
        else:
            changed[name] = weight
    for name, experts in stacks.items():
        changed[name] = torch.stack([experts[i] for i in range(len(experts))])
    return changed


_KINDS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
STEP5 = Published(
    "laguna",
    {
        "num_hidden_layers": 4,
        "layer_types": _KINDS,
        "num_attention_heads_per_layer": [6, 8, 6, 6],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "moe_router_logit_softcapping": 0.0,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": factor}
            for kind, factor in (("full_attention", 0.5), ("sliding_attention", 1.0))
        },
    },
    {
        "model_type": "step5",
        "num_attention_groups": 2,
        "num_key_value_heads": None,
        "num_attention_heads_per_layer": None,
        "mlp_layer_types": None,
        "attention_other_setting": {
            "attention_type": "sliding_attention",
            "num_attention_heads": 8,
            "num_attention_groups": 2,
            "head_dim": 16,
        },
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 6,
        "moe_top_k": 2,
        "num_experts": None,
        "num_experts_per_tok": None,
        "share_expert_dim": 40,
        "shared_expert_intermediate_size": None,
        "moe_router_scaling_factor": 1.8,
        "moe_routed_scaling_factor": None,
        "use_moe_router_bias": True,
        "use_head_wise_attn_gate": True,
        "rope_parameters": None,
        "rope_theta": 1e4,
        "partial_rotary_factors": [0.5, 1.0, 0.5, 0.5],
        "sparse_config": {
            "enabled": True,
            "proxy_dim": _SIZE,
            "sparse_indexer_rope_dim": _ROTARY,
            "sparse_indexer_num_heads": _HEADS,
            "index_tp_size": 2,
            "topk": _CHOSEN,
            "region_block_size": _BLOCK,
        },
    },
    (
        (r"sparse_indexer\.ssmax_s", "ssmax_s"),
        (r"sparse_indexer\.", "sparse_indexer_"),
        (r"mlp\.gate\.e_score_correction_bias", "moe.router_bias"),
        (r"mlp\.experts\.e_score_correction_bias", "moe.router_bias"),
        (r"mlp\.gate\.", "moe.gate."),
        (r"mlp\.shared_experts?\.", "share_expert."),
    ),
    _changed,
    prepare=_as_step5,
)
