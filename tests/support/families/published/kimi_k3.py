"""A reference for Kimi K3: the Kimi Linear of transformers with the parts that Kimi K3 adds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from support.families.published.attention_residuals import (
    GROUP_SIZE,
    Residuals,
    new_linear,
    new_norm,
)
from torch import Tensor, nn
from transformers.models.kimi_linear import modeling_kimi_linear as kimi_linear

LATENT_SIZE = 20
GATE_CAP, UP_CAP = 0.7, 1.3
LOWEST_LOG_DECAY = -5.0
K3_CONFIG = {
    "hidden_act": "situ",
    "activation_situ_beta": GATE_CAP,
    "activation_situ_linear_beta": UP_CAP,
    "attn_res_block_size": GROUP_SIZE,
    "mla_use_output_gate": True,
    "routed_expert_hidden_size": LATENT_SIZE,
    "latent_moe_use_norm": True,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": LOWEST_LOG_DECAY,
        "full_attn_layers": [2, 5],
        "kda_layers": [1, 3, 4],
    },
}


def as_kimi_k3(reference: transformers.PreTrainedModel, *, has_residuals: bool = True) -> None:
    """Make a Kimi Linear compute what Kimi K3 does, or only what each of its layers does."""
    torch.manual_seed(1)
    model, config, residuals = reference.model, reference.config, Residuals(reference.config)
    size, linear = config.hidden_size, new_linear

    for index, layer in enumerate(model.layers):
        if has_residuals:
            residuals.replace_forward(layer, layer.self_attn, index, "self_attention")
        _add_gates(layer.self_attn, config, linear)
        mlps = [layer.mlp]
        if isinstance(layer.mlp, kimi_linear.KimiLinearMoE):
            moe = layer.mlp
            narrow = copy.copy(config)
            narrow.hidden_size = LATENT_SIZE
            moe.experts = kimi_linear.KimiLinearExperts(narrow)
            for parameter in moe.experts.parameters():
                nn.init.normal_(parameter, 0, 0.15)
            moe.routed_expert_down_proj = linear(size, LATENT_SIZE)
            moe.routed_expert_up_proj = linear(LATENT_SIZE, size)
            moe.routed_expert_norm = new_norm(LATENT_SIZE, config.rms_norm_eps)
            moe.forward = partial(_latent_experts, moe)
            mlps = [moe.shared_experts]
        for mlp in mlps:
            mlp.forward = partial(_mlp, mlp)
    if has_residuals:
        residuals.install(model, "output_attn")


def _add_gates(attention: nn.Module, config: Any, linear: Callable[[int, int], nn.Linear]) -> None:
    size = config.hidden_size
    if isinstance(attention, kimi_linear.KimiLinearAttention):
        attention.g_proj = linear(size, config.num_attention_heads * config.v_head_dim)
        gates: list[Tensor] = []

        def compute(module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            gates[:] = [module.g_proj(kwargs["hidden_states"]).sigmoid()]

        attention.register_forward_pre_hook(compute, with_kwargs=True)
        attention.o_proj.register_forward_pre_hook(lambda _module, args: (args[0] * gates[0],))
        return
    attention.g_a_proj = nn.Identity()
    attention.g_b_proj = linear(size, attention.qkv_dim)
    attention.forget_gate.forward = partial(_bounded_decays, attention.forget_gate)


def _bounded_decays(gate: Any, hidden_states: Tensor) -> Tensor:
    steps = gate.f_b_proj(gate.f_a_proj(hidden_states)) + gate.dt_bias
    heads = steps.unflatten(-1, (gate.num_heads, -1))
    return LOWEST_LOG_DECAY * torch.sigmoid(gate.A_log.exp() * heads)


def _situ(gate: Tensor, up: Tensor) -> Tensor:
    capped = GATE_CAP * torch.tanh(gate / GATE_CAP) * torch.sigmoid(gate)
    return capped * UP_CAP * torch.tanh(up / UP_CAP)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    output: Tensor = mlp.down_proj(_situ(mlp.gate_proj(x), mlp.up_proj(x)))
    return output


def _latent_experts(moe: Any, x: Tensor) -> Tensor:
    _, weights, indices = moe.gate(x)
    narrow = moe.routed_expert_down_proj(x).flatten(0, 1)
    total = torch.zeros_like(narrow)
    for token, (row, chosen) in enumerate(zip(weights, indices, strict=True)):
        for weight, expert in zip(row, chosen, strict=True):
            gate, up = (moe.experts.gate_up_proj[expert] @ narrow[token]).chunk(2)
            total[token] += weight * (moe.experts.down_proj[expert] @ _situ(gate, up))
    routed = moe.routed_expert_up_proj(moe.routed_expert_norm(total)).view_as(x)
    output: Tensor = routed + moe.shared_experts(x)
    return output


def with_towers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add tensors of the vision tower, which is not read."""
    names = ("vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight")
    return tensors | {name: torch.zeros(3, 4) for name in names}
