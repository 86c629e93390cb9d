"""A Llama as Talkie, whose norms have no weights, and whose layers end with the addition of the embedding."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

EPS = 2.0**-23


class _Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=EPS)


class _Factors(nn.Module):
    """Factors under the name that the published model gives them."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.empty(size).normal_(0.8, 0.3)))

    def forward(self, x: Tensor) -> Tensor:
        factors: Tensor = getattr(self, self.name)
        return x * factors.view(-1, 1, 1) if len(factors) > 1 else x * factors


def _attend(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
) -> tuple[Tensor, None]:
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    queries, keys, values = (
        project(hidden_states).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
        for project in projections
    )
    cosines, sines = position_embeddings
    queries, keys = apply_rotary_pos_emb(queries, keys, cosines, -sines)
    norm = _Unit()
    queries = attention.head_gain(norm(queries))
    mixed = F.scaled_dot_product_attention(queries, norm(keys), values, is_causal=True)
    return attention.o_proj(mixed.transpose(1, 2).flatten(-2)), None


def _compute(layer: Any, embedding: list[Tensor], x: Tensor, **others: Any) -> Tensor:
    attended, _ = layer.self_attn(layer.input_layernorm(x), **others)
    x = x + layer.attn_gain(attended)
    x = x + layer.mlp_gain(layer.mlp(layer.post_attention_layernorm(x)))
    result: Tensor = x + layer.embed_skip(embedding[0])
    return result


def _as_talkie(reference: transformers.PreTrainedModel) -> None:
    torch.manual_seed(5)
    embedding: list[Tensor] = []

    def norm(_module: nn.Module, _args: Any, rows: Tensor) -> Tensor:
        embedding[:] = [_Unit()(rows)]
        return embedding[0]

    reference.model.embed_tokens.register_forward_hook(norm)
    for layer in reference.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = _Unit(), _Unit()
        for name in ("attn_gain", "mlp_gain", "embed_skip"):
            setattr(layer, name, _Factors("a_g", 1))
        layer.self_attn.head_gain = _Factors("head_g", reference.config.num_attention_heads)
        layer.self_attn.forward = functools.partial(_attend, layer.self_attn)
        layer.forward = functools.partial(_compute, layer, embedding)
    reference.model.norm = _Unit()
    reference.lm_head_gain = gain = _Factors("w_g", 1)
    reference.lm_head.register_forward_hook(lambda _module, _args, logits: gain(logits))


TALKIE = Published(
    "llama2",
    {"num_key_value_heads": 6},
    {"model_type": "talkie", "rms_norm_eps": None, "num_key_value_heads": None},
    (
        (r"model\.embed_tokens", "model.embed"),
        (r"model\.layers", "model.blocks"),
        (r"self_attn\.q_proj", "attn.attn_query"),
        (r"self_attn\.k_proj", "attn.attn_key"),
        (r"self_attn\.v_proj", "attn.attn_value"),
        (r"self_attn\.o_proj", "attn.attn_resid"),
        (r"self_attn\.head_gain", "attn.head_gain"),
        (r"gate_proj", "mlp_gate"),
        (r"up_proj", "mlp_linear"),
        (r"down_proj", "mlp_resid"),
    ),
    prepare=_as_talkie,
)
