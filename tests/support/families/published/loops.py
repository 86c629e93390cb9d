"""A Llama whose layers are computed three times, and attend to the keys of the first pass, too (IQuest-Coder Loop)."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import torch
import transformers
from support.families.published.form import Published
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

_WINDOW, _PASSES = 7, 3


def _forward(reference: transformers.PreTrainedModel, tokens: Tensor) -> SimpleNamespace:
    model = reference.model
    x = model.embed_tokens(tokens)
    positions = torch.arange(tokens.shape[1])
    rotation = model.rotary_emb(x, positions[None])
    causal = positions[:, None] >= positions
    near = causal & (positions[:, None] - positions < _WINDOW)
    first = {}
    for loop in range(_PASSES):
        for i, layer in enumerate(model.layers):
            attention, h = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                product(h).unflatten(-1, (-1, 8)).transpose(1, 2)
                for product in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            q, k = apply_rotary_pos_emb(q, k, *rotation)
            attend = functools.partial(F.scaled_dot_product_attention, q, enable_gqa=True)
            if loop == 0:
                first[i] = k, v
                y = attend(k, v, attn_mask=causal)
            else:
                gate = model.gate_projections[i]
                share = torch.einsum("bhtk,hk->bht", q, gate.weight) + gate.bias[:, None]
                share = share.sigmoid()[..., None]
                y = attend(*first[i], attn_mask=causal) * share
                y = y + attend(k, v, attn_mask=near) * (1 - share)
            x = x + attention.o_proj(y.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    return SimpleNamespace(logits=reference.lm_head(model.norm(x)))


def _as_loop(reference: transformers.PreTrainedModel) -> None:
    gates = nn.ModuleList(nn.Linear(8, 6) for _ in reference.model.layers)
    for parameter in gates.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    reference.model.gate_projections = gates
    reference.forward = functools.partial(_forward, reference)


IQUEST_LOOP = Published(
    "llama2",
    {"tie_word_embeddings": False},
    {"model_type": "iquestloopcoder", "loop_num": _PASSES, "loop_window_size": _WINDOW},
    prepare=_as_loop,
)
