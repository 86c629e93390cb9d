"""A gpt-oss whose layers have different windows and numbers of experts (gpt-oss-puzzle)."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from support.families.published.form import Published
from support.families.published.mixtures.smallthinker import WINDOW, with_window
from torch import nn

_LONGER, _COUNTS = 12, (5, 3, 7)


def _as_puzzle(reference: transformers.PreTrainedModel) -> None:
    layers: Any = reference.model.layers
    torch.manual_seed(1)
    for count, layer in zip(_COUNTS, layers, strict=True):
        config = copy.deepcopy(reference.config)
        config.num_local_experts = count
        layer.mlp = type(layer.mlp)(config)
        for parameter in layer.mlp.parameters():
            nn.init.normal_(parameter, 0, 0.15)
    layers[2].self_attn.register_forward_pre_hook(with_window, with_kwargs=True)


PUZZLE = Published(
    "gpt-oss",
    {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": _LONGER,
    },
    {
        "model_type": "gpt_oss_puzzle",
        "layer_types": None,
        "sliding_window": None,
        "num_local_experts": None,
        "block_configs": [
            {"num_local_experts": count, "sliding_window": window}
            for count, window in zip(_COUNTS, (_LONGER, None, WINDOW), strict=True)
        ],
    },
    prepare=_as_puzzle,
)
