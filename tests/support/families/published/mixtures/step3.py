"""A Granite with experts whose queries have a low rank (Step 3)."""

from __future__ import annotations

import transformers
from support.families.published.changes import Tensors
from support.families.published.form import Published
from torch import nn

_RANK = 20


def _as_step3(reference: transformers.PreTrainedModel) -> None:
    for layer in reference.model.layers:
        queries = nn.Sequential(
            nn.Linear(48, _RANK, bias=False),
            nn.RMSNorm(_RANK, eps=1e-6),
            nn.Linear(_RANK, 48, bias=False),
        )
        for parameter in queries.parameters():
            nn.init.normal_(parameter, 0.3, 0.3)
        layer.self_attn.q_proj = queries


def _with_own_gates(tensors: Tensors) -> Tensors:
    changed = {}
    for name, weight in tensors.items():
        if "input_linear" not in name:
            changed[name.replace("output_linear", "down_proj")] = weight
            continue
        for part, rows in zip(("gate_proj", "up_proj"), weight.chunk(2, -2), strict=True):
            changed[name.replace("input_linear", part)] = rows
    return changed


STEP3 = Published(
    "granite-moe-shared",
    {
        "num_key_value_heads": 1,
        "intermediate_size": 80,
        "shared_intermediate_size": 80,
        "attention_multiplier": 8**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "step3_text",
        "num_attention_groups": 1,
        "share_q_dim": _RANK,
        "share_expert_dim": 80,
        "moe_intermediate_size": 80,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "norm_expert_weight": True,
        "moe_layers_enum": "0,1,2",
        "num_local_experts": None,
        "num_experts_per_tok": None,
    },
    (
        (r"q_proj\.0", "q_proj"),
        (r"q_proj\.1", "inter_norm"),
        (r"q_proj\.2", "wq"),
        (r"block_sparse_moe\.router\.layer", "moe.gate"),
        (r"block_sparse_moe", "moe"),
        (r"shared_mlp", "share_expert"),
    ),
    _with_own_gates,
    prepare=_as_step3,
)
