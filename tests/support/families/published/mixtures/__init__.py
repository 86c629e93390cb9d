"""Mixtures of experts that transformers has no class for."""

from __future__ import annotations

import functools

import torch
import transformers
from support.families.published import changes
from support.families.published.form import Published
from support.families.published.mixtures.arctic import ARCTIC
from support.families.published.mixtures.grok import GROK
from support.families.published.mixtures.grove import GROVE
from support.families.published.mixtures.iquest import IQUEST_Q1
from support.families.published.mixtures.ling import LING_2_5, as_ling_2_5, without_gates
from support.families.published.mixtures.longcat import LONGCAT_NGRAM
from support.families.published.mixtures.maple import MAPLE
from support.families.published.mixtures.pangu_pro import PANGU_PRO_V2
from support.families.published.mixtures.puzzle import PUZZLE
from support.families.published.mixtures.smallthinker import SMALLTHINKER
from support.families.published.mixtures.step3 import STEP3
from support.families.published.mixtures.step5 import STEP5
from torch import nn


class _HeadNorms(nn.Module):
    """Norms of heads, each of which has its own weights."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads * 16).normal_(0.8, 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, x.shape[-1:], eps=1e-6) * self.weight.view(-1, 16)


def _as_k2_horizon(reference: transformers.PreTrainedModel) -> None:
    changes.with_grouped_norms(reference)
    for layer in reference.model.layers:
        layer.self_attn.q_norm, layer.self_attn.k_norm = _HeadNorms(6), _HeadNorms(2)


def _with_own_matrices(tensors: changes.Tensors) -> changes.Tensors:
    """Store every matrix apart."""
    stored = changes.with_ling_matrices(tensors)
    own = {name: weight for name, weight in tensors.items() if "self_attn" in name}
    return {name: weight for name, weight in stored.items() if "qkv_proj" not in name} | own


def _with_own_keys(reference: transformers.PreTrainedModel) -> None:
    """Let the tokens of a prompt choose experts by their own logits, as single tokens do."""

    def reorder(_module: nn.Module, _args: object, logits: torch.Tensor) -> torch.Tensor:
        return logits.unflatten(-1, (2, -1)).permute(2, 0, 1, 3).reshape(logits.shape)

    for layer in reference.model.layers:
        layer.mlp.router_gate.register_forward_hook(reorder)


_PLACES = torch.tensor([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])
"""The places of a head's elements in the files of a K2-Horizon. The first eight are rotated."""


def with_k2_heads(tensors: changes.Tensors, *, is_stored: bool = True) -> changes.Tensors:
    """Change the order of a head's elements to that of a K2-Horizon's files, or from it if it `is_stored`."""
    changed = {}
    for name, weight in tensors.items():
        if ".q_" in name or ".k_" in name:
            heads = weight.unflatten(0, (-1, 16))
            own = heads.clone()
            if is_stored:
                own = heads[:, _PLACES]
            else:
                own[:, _PLACES] = heads
            weight = own.flatten(0, 1)
        changed[name] = weight
    return changed


MIXTURES = {
    "Arctic": ARCTIC,
    # Four layers, of which every second one has latent attention.
    "BailingMoeV2_5": Published(
        "ling3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
        },
        LING_2_5,
        (
            (r"attention\.o_proj", "attention.dense"),
            (r"\.self_attn\.", ".attention."),
        ),
        without_gates,
        prepare=as_ling_2_5,
    ),
    "BailingMoeV3": Published("ling3", {}, {"gated_attention_proj_granularity_type": "head_wise"}),
    "Doge": Published(
        "doge",
        {"is_moe": True, "num_experts": 25, "num_experts_per_tok": 4, "mlp_bias": True},
        {},
        prepare=_with_own_keys,
    ),
    "Grok1": GROK,
    "GroveMoe": GROVE,
    "GptOssPuzzle": PUZZLE,
    "IQuestQ1": IQUEST_Q1,
    "LongcatFlashNgram": LONGCAT_NGRAM,
    "K2Horizon": Published(
        "glm4-moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "attention_bias": False,
            "use_qk_norm": True,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 2e4,
                "partial_rotary_factor": 0.5,
            },
        },
        {
            "model_type": "k2_horizon",
            "layernorm_num_groups": 3,
            "query_key_norm": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
            "rope_head_dim": 8,
            "first_k_dense_replace": None,
            "mlp_only_layers": [0],
            "n_routed_experts": None,
            "num_experts": 6,
            "n_shared_experts": None,
            "num_shared_experts": 2,
            "routed_scaling_factor": None,
            "router_scaling_factor": 1.8,
            "router_score_func": "sigmoid",
        },
        ((r"mlp\.gate\.e_score_correction_bias", "mlp.gate.bias"),),
        functools.partial(with_k2_heads, is_stored=False),
        prepare=_as_k2_horizon,
    ),
    "Maple": MAPLE,
    "PanguProMoEV2": PANGU_PRO_V2,
    "MiMoV2": Published(
        "mimo-v2",
        {},
        {"model_type": "mimo_v2", "attention_projection_layout": "fused_qkv"},
        change=changes.with_fused_qkv,
    ),
    "NemotronHPuzzle": Published(
        "nemotron-h-experts",
        {"n_group": 1, "topk_group": 1},
        {
            "model_type": "nemotron_h_puzzle",
            "num_hidden_layers": None,
            "layer_types": None,
            "layers_block_type": None,
            "intermediate_size": None,
            "moe_intermediate_size": None,
            "num_experts_per_tok": None,
            "block_configs": [
                {"block_type": "mamba"},
                {"block_type": "moe", "moe_intermediate_size": 24, "num_experts_per_tok": 3},
                {"block_type": "attention", "sliding_window": None},
                {"block_type": "mlp", "intermediate_size": 80},
                {"block_type": "moe", "moe_intermediate_size": 16, "num_experts_per_tok": 2},
            ],
        },
        ((r"^backbone\.", "model."),),
        prepare=changes.with_experts_of_several_sizes,
    ),
    "PanguUltraMoE": Published(
        "deepseek-v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 2e4},
        },
        {
            "model_type": "pangu_ultra_moe",
            "sandwich_norm": True,
            "router_enable_expert_bias": True,
            "rope_parameters": None,
            "rope_theta": 2e4,
            "num_dense_layers": 1,
            "first_k_dense_replace": None,
            "num_routed_experts": 8,
            "n_routed_experts": None,
            "num_shared_experts": 1,
            "n_shared_experts": None,
            "attention_q_lora_dim": 20,
            "q_lora_rank": None,
            "attention_kv_lora_dim": 24,
            "kv_lora_rank": None,
            "attention_qk_dim": 12,
            "qk_nope_head_dim": None,
            "attention_qk_rope_dim": 8,
            "qk_rope_head_dim": None,
            "attention_v_dim": 10,
            "v_head_dim": None,
        },
        (
            (r"post_attention_layernorm", "pre_mlp_layernorm"),
            (r"output_layernorm", "post_attention_layernorm"),
            (r"gate\.e_score", "e_score"),
        ),
        prepare=changes.with_output_norms,
    ),
    "SmallThinker": SMALLTHINKER,
    "Step3Text": STEP3,
    "Step5": STEP5,
    "Param2MoE": Published(
        "ling2",
        {"n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0},
        {"model_type": "param2moe", "score_function": "sigmoid", "n_group": None},
    ),
    # A Granite without multipliers has the layers of an XVERSE-MoE.
    "XverseMoe": Published(
        "granite-moe-shared",
        {
            "intermediate_size": 40,
            "shared_intermediate_size": 80,
            "attention_multiplier": 8**-0.5,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "tie_word_embeddings": False,
        },
        {
            "model_type": "xverse",
            "num_local_experts": None,
            "num_experts_per_tok": None,
            "shared_intermediate_size": None,
            "num_experts": 4,
            "moe_top_k": 2,
            "num_shared_experts": 2,
            "norm_topk_prob": True,
        },
        (
            (r"block_sparse_moe\.router\.layer", "mlp.router"),
            (r"block_sparse_moe\.", "mlp."),
            (r"shared_mlp\.", "mlp.shared_experts."),
        ),
        _with_own_matrices,
    ),
}
