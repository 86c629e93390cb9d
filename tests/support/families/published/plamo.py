"""A Gemma 3 as PLaMo 2, in which most layers are Mamba layers, and as PLaMo 3."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published import changes
from support.families.published.form import Published
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_ROTARY = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 40,
    "rope_theta": 15_000.0,
}
_NAMES = (
    (r"model\.layers\.", "model.layers.layers."),
    (r"self_attn\.", "mixer."),
    (r"input_layernorm", "pre_mixer_norm"),
    (r"post_attention_layernorm", "post_mixer_norm"),
    (r"pre_feedforward_layernorm", "pre_mlp_norm"),
    (r"post_feedforward_layernorm", "post_mlp_norm"),
)
_NUM_HEADS, _SIZE, _STATE, _RANK = 3, 16, 12, 64


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class _HeadNorm(nn.Module):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(num_heads, 16) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return _normed(x, self.weight[:, None])


class _Mamba(nn.Module):
    """A Mamba layer whose heads have one time step and one decay per token."""

    def __init__(self) -> None:
        super().__init__()
        channels, selected = _NUM_HEADS * _SIZE, 2 * _STATE + _RANK
        self.in_proj = nn.Linear(48, 2 * channels, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, 4, groups=channels, bias=False, padding=3)
        self.bcdt_proj = nn.Linear(channels, selected, bias=False)
        self.dt_proj = nn.Linear(_RANK, _NUM_HEADS, bias=False)
        self.out_proj = nn.Linear(channels, 48, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0, 0.3)
        self.dt_bias, self.A_log, self.D = (nn.Parameter(torch.rand(_NUM_HEADS)) for _ in range(3))
        self.dt_norm_weight = nn.Parameter(torch.rand(_RANK) + 0.5)
        self.B_norm_weight, self.C_norm_weight = (
            nn.Parameter(torch.rand(_STATE) + 0.5) for _ in range(2)
        )

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        length = hidden_states.shape[1]
        z, x = self.in_proj(hidden_states).unflatten(-1, (_NUM_HEADS, 2, _SIZE)).unbind(3)
        convolved = self.conv1d(x.flatten(2).transpose(1, 2))[..., :length].transpose(1, 2)
        x = nn.functional.silu(convolved)
        b, c, step = self.bcdt_proj(x).split((_STATE, _STATE, _RANK), -1)
        b, c = _normed(b, self.B_norm_weight), _normed(c, self.C_norm_weight)
        step = self.dt_proj(_normed(step, self.dt_norm_weight))
        step = nn.functional.softplus(step + self.dt_bias)
        x = x.unflatten(-1, (_NUM_HEADS, _SIZE))
        state, outputs = torch.zeros(len(x), _NUM_HEADS, _SIZE, _STATE), []
        for i in range(length):
            decay = (-step[:, i] * self.A_log.exp()).exp()[..., None, None]
            added = step[:, i, :, None, None] * x[:, i, :, :, None] * b[:, i, None, None]
            state = state * decay + added
            outputs.append((state * c[:, i, None, None]).sum(-1) + self.D[:, None] * x[:, i])
        y = torch.stack(outputs, 1) * nn.functional.silu(z)
        return self.out_proj(y.flatten(2)), None


def _as_plamo2(reference: transformers.PreTrainedModel) -> None:
    """Leave embeddings of a Gemma 3 as they are, and put Mamba layers into it."""
    reference.model.embed_tokens.embed_scale.fill_(1.0)
    for index, layer in enumerate(reference.model.layers):
        if index % 2 == 0:
            layer.self_attn = _Mamba()
            continue
        attention = layer.self_attn
        attention.q_norm = _HeadNorm(attention.q_proj.out_features // 16)
        attention.k_norm = _HeadNorm(attention.k_proj.out_features // 16)


def _as_plamo3(reference: transformers.PreTrainedModel) -> None:
    """Leave embeddings of a Gemma 3 as they are, and scale frequencies of full attention without rounded bounds."""
    reference.model.embed_tokens.embed_scale.fill_(1.0)
    config = transformers.LlamaConfig(head_dim=16, rope_parameters=_YARN | {"truncate": False})
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    rotary = reference.model.rotary_emb
    rotary.full_attention_inv_freq, rotary.full_attention_attention_scaling = frequencies, factor


def _with_offsets(tensors: changes.Tensors) -> changes.Tensors:
    """Fuse matrices, and store norms of outputs without their offsets."""
    changed = changes.with_fused_qkv(tensors)
    for name in [name for name in changed if "gate_proj" in name]:
        up = changed.pop(name.replace("gate_proj", "up_proj"))
        changed[name.replace("gate_proj", "gate_up_proj")] = torch.cat((changed.pop(name), up))
    for end, offset in (("attention", 1 / 5), ("feedforward", 5**-1.5)):
        for name in [name for name in changed if f"post_{end}_layernorm" in name]:
            changed[name] = changed[name] + (1 - offset)
    return changed


PLAMO = {
    "Plamo2": Published(
        "gemma3",
        {
            "num_hidden_layers": 5,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"] * 2,
            "sliding_window": 11,
            "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY},
        },
        {
            "model_type": "plamo2",
            "attention_window_size": 10,
            "full_attention_idx": [3],
            "head_dim": None,
            "hidden_size_per_head": 16,
            "hidden_activation": None,
            "query_pre_attn_scalar": None,
            "layer_types": None,
            "sliding_window": None,
            "_sliding_window_pattern": None,
            "rope_parameters": None,
            "rope_theta": 10_000,
            "mamba_d_state": _STATE,
            "mamba_d_conv": 4,
            "mamba_num_heads": _NUM_HEADS,
            "mamba_step": 2,
        },
        ((r"self_attn\.([qk])_norm\.weight", r"mixer.\1_weight"), *_NAMES),
        _with_offsets,
        prepare=_as_plamo2,
    ),
    "Plamo3": Published(
        "gemma3",
        {
            "num_hidden_layers": 5,
            "query_pre_attn_scalar": 16,
            "sliding_window": 10,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
            "layer_types": [
                f"{x}_attention" for x in ("sliding", "full", "sliding", "full", "sliding")
            ],
            "rope_parameters": {"full_attention": _YARN, "sliding_attention": _ROTARY},
        },
        {
            "model_type": "plamo3",
            "hidden_activation": None,
            "query_pre_attn_scalar": None,
            "layer_types": None,
            "sliding_window": None,
            "window_size": 10,
            "sliding_window_pattern": 2,
            "_sliding_window_pattern": None,
            "rope_parameters": None,
            "rope_theta": 15_000,
            "rope_local_theta": 10_000,
            "rope_scaling_factor": 8.0,
            "initial_context_length": 40,
        },
        _NAMES,
        _with_offsets,
        prepare=_as_plamo3,
    ),
}
