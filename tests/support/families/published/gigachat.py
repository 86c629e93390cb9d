"""GigaChat 3.5, made of a DeepSeek-V3: gated norms everywhere, gated attention, and delta nets of Qwen3-Next."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

_FACTOR, _SCALE, _EPS = 2.0, 1.5, 1e-6
_KINDS = ["linear_attention", "attention", "linear_attention", "linear_attention"]
_LINEAR = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


class _GatedNorm(nn.Module):
    def __init__(self, size: int, factor: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).normal_(-0.2, 0.3))
        self.gate_up_projection = nn.Linear(size, 16, bias=False)
        self.gate_down_projection = nn.Linear(16, size, bias=False)
        for parameter in (self.gate_up_projection.weight, self.gate_down_projection.weight):
            nn.init.normal_(parameter, 0, 0.15)
        self._factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, x.shape[-1:], eps=_EPS) * (1 + self.weight)
        gate = self.gate_down_projection(nn.functional.silu(self.gate_up_projection(normed)))
        return normed * _FACTOR * gate.sigmoid() * self._factor


class _HeadNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).normal_(-0.2, 0.3))

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x, x.shape[-1:], eps=_EPS)
        return normed * _SCALE * (1 + self.weight) * gate.sigmoid()


def _as_gigachat(reference: transformers.PreTrainedModel) -> None:
    config, model = reference.config, reference.model
    size = config.hidden_size
    own = transformers.Qwen3NextConfig(
        **_LINEAR,
        hidden_size=size,
        rms_norm_eps=_EPS,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
    )
    model.norm = _GatedNorm(size)
    for kind, layer in zip(_KINDS, model.layers, strict=True):
        for name in ("input", "post_attention", "post_self_attn", "post_feedforward"):
            setattr(layer, f"{name}_layernorm", _GatedNorm(size))
        layer.mlp.register_forward_hook(_normed(layer.post_feedforward_layernorm))
        if kind == "linear_attention":
            layer.self_attn = _delta_net(own)
        else:
            _gate(layer.self_attn, config)
        layer.self_attn.register_forward_hook(_normed(layer.post_self_attn_layernorm))


def _normed(norm: nn.Module) -> Any:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return norm(output[0]), *output[1:]
        return norm(output)

    return hook


def _delta_net(config: Any) -> nn.Module:
    module: Any = Qwen3NextGatedDeltaNet(config, 0)
    module.norm = _HeadNorm(config.linear_value_head_dim)
    for name, parameter in module.named_parameters():
        if not name.startswith("norm"):
            nn.init.normal_(parameter, *((0.8, 0.3) if parameter.ndim == 1 else (0, 0.2)))
    forward = module.forward

    def run(hidden_states: torch.Tensor, **_others: Any) -> Any:
        return forward(hidden_states), None

    module.forward = run
    return module


def _gate(attention: nn.Module, config: Any) -> None:
    size, gates = config.hidden_size, []
    attention.q_a_layernorm = _GatedNorm(config.q_lora_rank, (size / config.q_lora_rank) ** 0.5)
    attention.kv_a_layernorm = _GatedNorm(config.kv_lora_rank, (size / config.kv_lora_rank) ** 0.5)
    gate = nn.Linear(size, config.num_attention_heads * config.v_head_dim, bias=False)
    nn.init.normal_(gate.weight, 0, 0.2)
    attention.gate_proj = gate

    def compute(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        gates[:] = [gate(kwargs["hidden_states"]).sigmoid()]

    attention.register_forward_pre_hook(compute, with_kwargs=True)
    attention.o_proj.register_forward_pre_hook(lambda _module, args: (args[0] * gates[0],))


GIGACHAT = Published(
    "deepseek-v3",
    {"num_hidden_layers": len(_KINDS), "attention_bias": False},
    {
        "model_type": "gigachat3_5",
        "layer_types": _KINDS,
        "linear_attention_type": "Qwen3NextGatedDeltaNet",
        "linear_gating_type": "zero_centered_sigmoid",
        "linear_sigmoid_gate_scale": _SCALE,
        "output_gate_type": "sigmoid",
        "norm_type": "ZeroCenteredGatedNorm",
        "layernorm_type": "pre_post",
        "layernorm_gating_weight": _FACTOR,
        "gated_attention": True,
        "use_mla_scaling_factor": True,
    }
    | _LINEAR,
    prepare=_as_gigachat,
)
