"""Translate the metadata of models with compressed attention."""

from typing import Any, Final

import numpy as np

from .declared import declared, integer, positive
from .fields import ModelFields, Translate
from .parts import expert_fields, gate_limit, rope_scaling, rotary_dim

_SCORINGS: Final = {1: "softmax", 2: "sigmoid", 4: "sqrtsoftplus"}
"""llama.cpp's numbers for the functions of routers."""


def _layers(fields: ModelFields) -> dict[str, Any]:
    count, num_further = fields.num_layers, fields.integer("nextn_predict_layers", 0, minimum=0)
    # Earlier converters wrote this number, but not the layers.
    if not fields.has_tensor(f"blk.{count - num_further}.nextn.eh_proj.weight"):
        num_further = 0
    count -= num_further
    ratios = fields.get("attention.compress_ratios")
    if not isinstance(ratios, np.ndarray) or ratios.dtype.kind not in "iu" or len(ratios) < count:
        raise fields.wrong("attention.compress_ratios", f"integers for {count} layers", ratios)
    return {
        "num_hidden_layers": count,
        "num_nextn_predict_layers": num_further,
        "compress_ratios": ratios[:count].tolist(),
    }


def _scoring(fields: ModelFields) -> str:
    number = fields.integer("expert_gating_func", 4)
    if number not in _SCORINGS:
        raise fields.wrong("expert_gating_func", " or ".join(map(str, _SCORINGS)), number)
    return _SCORINGS[number]


def _unscaled_rope(fields: ModelFields) -> dict[str, Any]:
    """Return `rope_scaling` for longer contexts that do not change the scores of attention."""
    scaling = rope_scaling(fields) or {}
    return {name: value for name, value in scaling.items() if name != "attention_factor"}


COMPRESSED: Final[dict[str, Translate]] = {
    "deepseek4": declared(
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        expert_fields,
        _layers,
        num_key_value_heads=1,
        q_lora_rank=integer("attention.q_lora_rank"),
        qk_rope_head_dim=rotary_dim,
        o_lora_rank=integer("attention.output_lora_rank"),
        o_groups=integer("attention.output_group_count"),
        compress_rope_theta=positive("attention.compress_rope_freq_base", 160_000.0),
        sliding_window=integer("attention.sliding_window"),
        index_n_heads=integer("attention.indexer.head_count"),
        index_head_dim=integer("attention.indexer.key_length"),
        index_topk=integer("attention.indexer.top_k"),
        hc_mult=integer("hyper_connection.count"),
        hc_sinkhorn_iters=integer("hyper_connection.sinkhorn_iterations"),
        hc_eps=positive("hyper_connection.epsilon"),
        num_hash_layers=integer("hash_layer_count", 0, minimum=0),
        scoring_func=_scoring,
        swiglu_limit=gate_limit,
        rope_scaling=_unscaled_rope,
    ),
}
"""Architecture -> the function that returns its config fields."""
