"""Translates the metadata of encoders, which embed text."""

from __future__ import annotations

from typing import Any, Final

from ...errors import CheckpointError
from .fields import ModelFields, Translate

_POOLING: Final = {1: "mean", 2: "cls"}
"""The numbers of llama.cpp's kinds of pooling."""


def _encoder(fields: ModelFields) -> dict[str, Any]:
    """Return what all encoders with token types have."""
    types = fields.gguf.tensors.get("token_types.weight")
    if types is None or fields.boolean("attention.causal", False):
        raise CheckpointError(fields.path, "not an encoder with token types; convert it again")
    pooling = fields.integer("pooling_type", 2, minimum=0)
    if pooling not in _POOLING:
        raise fields.wrong("pooling_type", "1 (mean) or 2 (cls)", pooling)
    return {
        "rms_norm_eps": fields.positive("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": types.shape[0],
        "classifier_pooling": _POOLING[pooling],
    }


def _bert(fields: ModelFields) -> dict[str, Any]:
    return _encoder(fields) | {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
    }


def _nomic_bert(fields: ModelFields) -> dict[str, Any]:
    return _encoder(fields) | {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "hidden_act": "silu",
        "rotary_emb_base": fields.positive("rope.freq_base", 1000.0),
        "qkv_proj_bias": fields.has_tensor("blk.0.attn_qkv.bias"),
        "mlp_fc1_bias": fields.has_tensor("blk.0.ffn_up.bias"),
    }


ENCODERS: Final[dict[str, Translate]] = {"bert": _bert, "nomic-bert": _nomic_bert}
