"""Families of bidirectional text encoders whose attention compares tokens with distances, such as DeBERTa."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ....layers.specs.disentangled import DisentangledSpec, InputConvolution
from ..common import base_spec, head_dim, uniform_layers
from .absolute import BERT_NAMES, POST_NORMED
from .heads import AFTER_GELU_POOLER, encoder_families

_DEBERTA_NAMES = (
    (r"^(lm_predictions|mask_predictions)\..*", ""),
    (r"encoder\.rel_embeddings\.", "distance_embeddings."),
    (r"encoder\.LayerNorm\.", "distance_norm."),
    (r"encoder\.conv\.conv\.", "layers.0.input_convolution."),
    (r"encoder\.conv\.LayerNorm\.", "layers.0.convolution_norm."),
    (r"\.attention\.self\.(query|key|value)_proj\.", r".attention.self.\1."),
    (r"\.attention\.self\.pos_key_proj\.", ".self_attn.distance_key_proj."),
    (r"\.attention\.self\.pos_query_proj\.", ".self_attn.distance_query_proj."),
    *BERT_NAMES,
)


_FIRST_NAMES = (
    (r"\.attention\.self\.in_proj\.", ".self_attn.qkv_proj."),
    (r"\.attention\.self\.([qv])_bias$", r".self_attn.\1_bias"),
    (r"\.attention\.self\.pos_proj\.", ".self_attn.distance_key_proj."),
    (r"\.attention\.self\.pos_q_proj\.", ".self_attn.distance_query_proj."),
    *_DEBERTA_NAMES,
)


def _comparisons(fields: ConfigFields) -> set[str]:
    """Return the kinds of products with distances that change scores: "c2p" of queries, "p2c" of keys."""
    found = fields.get("pos_att_type")
    names = found.lower().split("|") if isinstance(found, str) else found or []
    kinds = {name.strip() for name in names if isinstance(name, str)}
    if not isinstance(names, list) or len(kinds) != len(names) or not kinds <= {"c2p", "p2c"}:
        raise fields.wrong("pos_att_type", "'c2p', 'p2c' or both", found)
    return kinds


def _deberta2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a DeBERTa v2 or v3 (arXiv 2006.03654 and 2111.09543)."""
    fields = fields.with_defaults(hidden_act="gelu", rms_norm_eps=1e-7, max_position_embeddings=512)
    fields.require("embedding_size", fields.integer("hidden_size"), ", the hidden size")
    num_positions = fields.integer("max_position_embeddings")
    kinds = _comparisons(fields)
    disentangled = None
    if fields.boolean("relative_attention", False):
        furthest = fields.get("max_relative_positions")
        if furthest is None or furthest == -1:
            furthest = num_positions
        else:
            furthest = fields.integer("max_relative_positions")
        buckets = fields.get("position_buckets")
        has_buckets = buckets is not None and buckets != -1
        disentangled = DisentangledSpec(
            span=fields.integer("position_buckets") if has_buckets else furthest,
            max_distance=furthest,
            has_log_buckets=has_buckets,
            compares_queries="c2p" in kinds,
            compares_keys="p2c" in kinds,
            shares_projections=fields.boolean("share_att_key", False),
            norms_embeddings="layer_norm" in fields.text("norm_rel_ebd", "none").lower(),
        )
    adds_positions = fields.boolean("position_biased_input", True)
    # Published checkpoints may have a table of positions that is not added.
    unused = () if adds_positions else ((r"embeddings\.position_embeddings\..*", ""),)
    changes = POST_NORMED | {
        "attention_scale": (head_dim(fields) * (1 + len(kinds))) ** -0.5,
        "disentangled": disentangled,
        "has_head": False,
        "num_positions": num_positions if adds_positions else 0,
        "num_token_types": fields.integer("type_vocab_size", 0, minimum=0),
        "tensor_names": (*unused, *_DEBERTA_NAMES),
    }
    layers = uniform_layers(fields, None)
    if fields.integer("conv_kernel_size", 0, minimum=0):
        layers = (replace(layers[0], input_convolution=_convolution(fields)), *layers[1:])
    return base_spec(fields, layers, **changes)


def _deberta(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a DeBERTa v1. Neither its keys nor those of distances have biases."""
    fields.require("talking_head", False)
    spec = _deberta2(fields.with_values({"position_buckets": None, "share_att_key": False}))
    names = spec.tensor_names[: -len(_DEBERTA_NAMES)]
    return replace(spec, has_grouped_qkv=True, key_bias=False, tensor_names=(*names, *_FIRST_NAMES))


def _convolution(fields: ConfigFields) -> InputConvolution:
    fields.require("conv_groups", 1)
    num_taps = fields.integer("conv_kernel_size")
    if num_taps % 2 == 0:
        raise fields.wrong("conv_kernel_size", "an odd number", num_taps)
    activation: Any = fields.choice("conv_act", ("gelu", "relu", "tanh"), "tanh")
    return InputConvolution(num_taps, activation)


FAMILIES = (
    *encoder_families("Deberta", "deberta", _deberta, AFTER_GELU_POOLER),
    *encoder_families("DebertaV2", "deberta-v2", _deberta2, AFTER_GELU_POOLER),
)
