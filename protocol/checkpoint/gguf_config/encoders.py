"""Translate the metadata of text encoders, also of those with a decoder."""

from __future__ import annotations

from typing import Any, Final

from ...errors import CheckpointError
from .declared import Rule, declared, has, integer, positive
from .fields import ModelFields, Translate
from .parts import CLS, MEAN, read_pooling


def _encoder(fields: ModelFields) -> dict[str, Any]:
    """Return the fields that all encoders with token types have in common."""
    types = fields.gguf.tensors.get("token_types.weight")
    if types is None or fields.boolean("attention.causal", False):
        raise CheckpointError(
            fields.path, "not an encoder with token types; convert the model again"
        )
    return {
        "rms_norm_eps": fields.positive("attention.layer_norm_epsilon", 1e-12),
        "type_vocab_size": types.shape[0],
        "classifier_pooling": read_pooling(fields, CLS),
    }


def _pooling(default: int) -> Rule:
    return lambda fields: read_pooling(fields, default)


def _jina2(fields: ModelFields) -> dict[str, Any]:
    """Return the name of the published code for a Jina v2 for code, whose layers have three norms."""
    if fields.has_tensor("blk.0.attn_norm_2.weight"):
        return {"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"}
    return {}


def _t5_encoder(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of the encoder of a T5, or of a umT5, whose layers have their own biases."""
    has_own_biases = fields.has_tensor("enc.blk.1.attn_rel_b.weight")
    has_gates = fields.has_tensor("enc.blk.0.ffn_gate.weight")
    return {
        "model_type": "umt5" if has_own_biases else "t5",
        "architectures": ["UMT5EncoderModel" if has_own_biases else "T5EncoderModel"],
        "d_model": fields.integer("embedding_length"),
        "d_kv": fields.head_dim,
        "d_ff": fields.integer("feed_forward_length"),
        "num_layers": fields.num_layers,
        "num_heads": fields.num_heads,
        "n_positions": fields.integer("context_length"),
        "layer_norm_epsilon": fields.positive("attention.layer_norm_rms_epsilon", 1e-6),
        "relative_attention_num_buckets": fields.integer("attention.relative_buckets_count", 32),
        "feed_forward_proj": "gated-gelu" if has_gates else "relu",
    }


def _t5(fields: ModelFields) -> dict[str, Any]:
    found = _t5_encoder(fields)
    is_umt5 = found["model_type"] == "umt5"
    return found | {
        "architectures": [
            "UMT5ForConditionalGeneration" if is_umt5 else "T5ForConditionalGeneration"
        ],
        "num_decoder_layers": fields.integer("decoder_block_count", fields.num_layers),
        "decoder_start_token_id": fields.integer("decoder_start_token_id", 0, minimum=0),
    }


def _nomic(activation: str, theta: float, **differences: Any) -> Translate:
    return declared(
        "nomic_bert",
        "NomicBertModel",
        _encoder,
        hidden_act=activation,
        rotary_emb_base=positive("rope.freq_base", theta),
        qkv_proj_bias=has("blk.0.attn_qkv.bias"),
        mlp_fc1_bias=has("blk.0.ffn_up.bias"),
        **differences,
    )


ENCODERS: Final[dict[str, Translate]] = {
    "bert": declared("bert", "BertModel", _encoder, hidden_act="gelu"),
    "eurobert": declared("eurobert", "EuroBertModel", classifier_pooling=_pooling(MEAN)),
    "jina-bert-v2": declared("jina_bert", "JinaBertModel", _encoder, _jina2, hidden_act="gelu"),
    "jina-bert-v3": declared(
        "jina_embeddings_v3",
        "JinaEmbeddingsV3Model",
        _encoder,
        hidden_act="gelu",
        rope_theta=positive("rope.freq_base", 20_000.0),
    ),
    # A Llama whose tokens attend to all tokens (Llama-Embed-Nemotron).
    "llama-embed": declared(
        "llama", "LlamaModel", is_causal=False, classifier_pooling=_pooling(MEAN)
    ),
    "modern-bert": declared(
        "modernbert",
        "ModernBertModel",
        hidden_activation="gelu",
        rms_norm_eps=positive("attention.layer_norm_epsilon", 1e-5),
        global_rope_theta=positive("rope.freq_base", 160_000.0),
        local_rope_theta=positive("rope.freq_base_swa", 10_000.0),
        local_attention=integer("attention.sliding_window", 128),
        global_attn_every_n_layers=integer("attention.sliding_window_pattern", 3),
        classifier_pooling=_pooling(CLS),
    ),
    "neo-bert": declared(
        "neobert",
        "NeoBERTModel",
        divides_intermediate_size=False,
        classifier_pooling=_pooling(CLS),
    ),
    "nomic-bert": _nomic("silu", 1000.0),
    "nomic-bert-moe": _nomic(
        "gelu",
        10_000.0,
        moe_every_n_layers=integer("moe_every_n_layers"),
        num_experts=integer("expert_count"),
        moe_top_k=integer("expert_used_count"),
        has_sum_bias=False,
    ),
    "t5": _t5,
    "t5encoder": _t5_encoder,
}
