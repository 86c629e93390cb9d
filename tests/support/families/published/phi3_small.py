"""Phi-3-small, made of a StableLM: each head attends to near blocks of keys and to some others, and GEGELU."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from support.families.published.form import Published
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

_BLOCK_SIZE, _NUM_NEAR, _STRIDE, _LIMIT = 3, 2, 4, 1.5
_EMBEDDING_FACTOR, _LOGITS_DIVISOR, _ATTENTION_FACTOR = 3.0, 0.5, 2.0


class _Attention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.size = config.hidden_size // self.num_heads
        self.is_dense = (index + 1) % 2 == 0
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.size
        self.query_key_value = nn.Linear(config.hidden_size, rows)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: Tensor, position_embeddings: Any, **_others: Any) -> Any:
        repeats = self.num_heads // self.num_kv_heads
        groups = self.query_key_value(hidden_states[0]).unflatten(-1, (-1, repeats + 2, self.size))
        queries, keys, values = groups.split((repeats, 1, 1), 2)
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (queries, keys, values))
        query, key = (
            x[0] for x in apply_rotary_pos_emb(query[None], key[None], *position_embeddings)
        )
        scores = query @ key.repeat_interleave(repeats, 0).mT * (_ATTENTION_FACTOR / self.size)
        weights = scores.masked_fill(self._hidden(query.shape[1]), -torch.inf).softmax(-1)
        outputs = weights @ value.repeat_interleave(repeats, 0)
        return self.dense(outputs.transpose(0, 1).flatten(1))[None], None

    def _hidden(self, length: int) -> Tensor:
        hidden = torch.ones(length, length).triu(1).bool().repeat(self.num_heads, 1, 1)
        if self.is_dense:
            return hidden
        for head in range(self.num_heads):
            for i in range(length):
                for j in range(i + 1):
                    own, other = i // _BLOCK_SIZE, j // _BLOCK_SIZE
                    is_near = own - other < _NUM_NEAR
                    hidden[head, i, j] = not (is_near or (other + head + 1) % _STRIDE == 0)
        return hidden


class _MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Any:
        gate, linear = self.up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        gate, linear = gate.clamp(max=_LIMIT), linear.clamp(-_LIMIT, _LIMIT)
        return self.down_proj(gate * torch.sigmoid(1.702 * gate) * (linear + 1))


def _as_phi3_small(reference: transformers.PreTrainedModel) -> None:
    for index, layer in enumerate(reference.model.layers):
        layer.self_attn, layer.mlp = _Attention(reference.config, index), _MLP(reference.config)
        for module in (layer.self_attn, layer.mlp):
            for parameter in module.parameters():
                nn.init.normal_(parameter, std=0.2)
    reference.model.embed_tokens.register_forward_hook(lambda _, __, y: y * _EMBEDDING_FACTOR)
    reference.lm_head.register_forward_hook(lambda _, __, y: y / _LOGITS_DIVISOR)


PHI3_SMALL = Published(
    "stablelm",
    {"partial_rotary_factor": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
    {
        "architectures": ["Phi3SmallForCausalLM"],
        "model_type": "phi3small",
        "hidden_act": "gegelu",
        "gegelu_limit": _LIMIT,
        "ff_intermediate_size": 80,
        "intermediate_size": None,
        "layer_norm_epsilon": 1e-5,
        "layer_norm_eps": None,
        "rope_parameters": None,
        "rope_embedding_base": 5e4,
        "rope_position_scale": 1.0,
        "blocksparse_block_size": _BLOCK_SIZE,
        "blocksparse_homo_head_pattern": False,
        "blocksparse_num_local_blocks": _NUM_NEAR,
        "blocksparse_vert_stride": _STRIDE,
        "dense_attention_every_n_layers": 2,
        "mup_use_scaling": True,
        "mup_attn_multiplier": _ATTENTION_FACTOR,
        "mup_embedding_multiplier": _EMBEDDING_FACTOR,
        "mup_width_multiplier": _LOGITS_DIVISOR,
    },
    names=((r"^model\.norm\.", "model.final_layernorm."),),
    prepare=_as_phi3_small,
)
