"""A reference for Alice AI: the Qwen3-Next of transformers with Kimi delta attention and attention residuals."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from support.families.published.attention_residuals import GROUP_SIZE, Residuals
from torch import Tensor, nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

ALICE_CONFIG = {
    "model_type": "alice_ai",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "block_attn_res_block_size": GROUP_SIZE,
    "kda_allow_negative_eigenvalues": False,
    "router_score_function": "sigmoid",
    "router_bias_correction": True,
}
ALICE_NAMES = (
    (r"\.forget_gate\.", "."),
    (r"\.A_log$", ".a_log_bias"),
    (r"(attn|mlp)_res_norm\.weight$", r"\1_res_norm_weight"),
    (r"^model\.final_res_proj\.", "model.attnres_final.res_proj."),
    (r"^model\.final_res_norm\.weight$", "model.attnres_final.res_norm_weight"),
)


def as_alice_ai(reference: transformers.PreTrainedModel) -> None:
    """Make a Qwen3-Next compute what Alice AI does."""
    torch.manual_seed(1)
    model, config = reference.model, reference.config
    names = ("hidden_size", "hidden_act", "rms_norm_eps", "layer_types", "linear_conv_kernel_dim")
    sizes = {name: getattr(config, name) for name in names}
    delta = SimpleNamespace(linear_num_heads=4, linear_head_dim=8, **sizes)
    residuals = Residuals(config)
    for index, layer in enumerate(model.layers):
        if layer.block_type == "linear_attention":
            layer.linear_attn = kimi_linear.KimiLinearDeltaAttention(delta, index)
            for parameter in layer.linear_attn.parameters():
                nn.init.normal_(parameter, 0.1, 0.15)
        attention = getattr(layer, "linear_attn", None) or layer.self_attn
        residuals.replace_forward(layer, attention, index, "attn")
        gate = layer.mlp.gate
        gate.e_score_correction_bias = nn.Parameter(torch.randn(config.num_experts))
        gate.forward = partial(_route, gate)
    residuals.install(model, "final")


def _route(gate: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden_states @ gate.weight.T
    scores = logits.sigmoid()
    chosen = (scores + gate.e_score_correction_bias).topk(gate.top_k, -1).indices
    weights = scores.gather(-1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def with_own_convolutions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Divide the convolutions. The first block reads the embedding, so it has no query."""
    changed = {name: x for name, x in tensors.items() if "layers.0.attn_res_" not in name}
    for name in [name for name in changed if name.endswith("linear_attn.conv1d.weight")]:
        for kind, part in zip("qkv", changed.pop(name).chunk(3), strict=True):
            changed[name.replace("conv1d", f"{kind}_conv1d")] = part
    return changed
