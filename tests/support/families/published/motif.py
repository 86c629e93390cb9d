"""Motif, made of a Llama: differential attention, some of whose heads share what is subtracted, and PolyNorm."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from support.families.published.samba import Difference
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


class _Attention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        heads, self.size, hidden_size = (
            config.num_attention_heads,
            config.head_dim,
            config.hidden_size,
        )
        self.num_second = getattr(config, "num_noise_heads", heads // 2)
        self.num_sharing = heads // self.num_second - 1
        pairs, self.index = self.num_sharing * self.num_second, index
        for name, count in (
            ("q", heads),
            ("k", config.num_key_value_heads),
            ("v", config.num_key_value_heads),
        ):
            setattr(self, f"{name}_proj", nn.Linear(hidden_size, count * self.size, bias=False))
        self.o_proj = nn.Linear(2 * pairs * self.size, hidden_size, bias=False)
        self.difference = Difference(self.size)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **_others: Any) -> Any:
        query, key, value = (
            project(hidden_states).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = (x[0] for x in apply_rotary_pos_emb(query, key, *position_embeddings))
        groups = query.unflatten(0, (self.num_second, -1))
        first, second = (
            groups[:, :-1].flatten(0, 1),
            groups[:, -1].repeat_interleave(self.num_sharing, 0),
        )
        values = torch.cat((value[0, ::2], value[0, 1::2]), -1)
        count = len(first) // len(values)
        hidden = torch.ones(query.shape[1], query.shape[1]).triu(1).bool()

        def attended(queries: Tensor, keys: Tensor) -> Any:
            scores = queries @ keys.repeat_interleave(count, 0).mT * self.size**-0.5
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            return weights @ values.repeat_interleave(count, 0)

        both = attended(first, key[::2]), attended(second, key[1::2])
        output = self.difference(*both, self.index - 1)
        return self.o_proj(output.transpose(0, 1).flatten(1))[None], None


class _PolyNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        powers = torch.stack([x**3, x**2, x])
        normed = powers / (powers.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return torch.einsum("p,p...->...", self.weight, normed) + self.bias


def _as_motif(reference: transformers.PreTrainedModel) -> None:
    for index, layer in enumerate(reference.model.layers):
        layer.self_attn, layer.mlp.act_fn = _Attention(reference.config, index), _PolyNorm()
        for part in (layer.self_attn, layer.mlp.act_fn):
            for name, parameter in part.named_parameters():
                is_factor = "subln" in name or part is layer.mlp.act_fn
                nn.init.normal_(parameter, *((0.6, 0.3) if is_factor else (0, 0.2)))


MOTIF = Published(
    "llama2",
    {"num_key_value_heads": 2, "head_dim": 8},
    {"model_type": "motif", "hidden_act": "poly_norm", "use_bias": False},
    ((r"\.self_attn\.difference\.", ".self_attn."),),
    prepare=_as_motif,
)
