"""Translate the metadata of DeepSeek's mixtures of experts, and of others with their latent attention."""

from __future__ import annotations

from typing import Any, Final

from .declared import declared, integer, positive
from .fields import ModelFields, Translate
from .parts import (
    expert_fields,
    gate_limit,
    indexers,
    latent_attention,
    layer_counts,
    layer_types,
    rope_scaling,
    yarn_weight,
)

SIGMOID: Final = 2
"""The value of `expert_gating_func` if scores are sigmoids of the router's logits."""


def _latent(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of latent attention and of the layers."""
    scaling = rope_scaling(fields)
    if scaling is not None and (weight := yarn_weight(fields, 0.1)):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return latent_attention(fields) | layer_counts(fields) | {"rope_scaling": scaling}


def _deepseek(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of latent attention with experts, without the kind of the router."""
    return expert_fields(fields) | _latent(fields)


_YOUTU: Final = declared("youtu", "YoutuForCausalLM", _latent)
_DEEPSEEK3: Final = declared("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek)


def _no_window(fields: ModelFields) -> dict[str, Any]:
    """Refuse files of models whose windows do not move over the prompt (Unlimited-OCR)."""
    fields.require("attention.sliding_window", 0)
    return {}


def _deepseek2(fields: ModelFields) -> dict[str, Any]:
    if not fields.integer("expert_count", 0, minimum=0):
        return _YOUTU(fields)
    last = layer_counts(fields)["num_hidden_layers"] - 1
    # Older files do not say which function turns the router's logits into scores.
    has_correction = fields.has_tensor(f"blk.{last}.exp_probs_b.bias")
    if fields.integer("expert_gating_func", 2 if has_correction else 1) == SIGMOID:
        return _DEEPSEEK3(fields)
    config = declared("deepseek_v2", "DeepseekV2ForCausalLM", _deepseek)(fields)
    return config | {"topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy"}


def _mistral4_scaling(fields: ModelFields) -> dict[str, Any] | None:
    scaling: dict[str, Any] | None = _deepseek(fields)["rope_scaling"]
    beta = fields.optional_positive("attention.temperature_scale")
    if scaling is not None and beta is not None:
        scaling["llama_4_scaling_beta"] = beta
    return scaling


def _indexers(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of indexers, which only some layers have. The file does not list these layers."""
    layers = range(layer_counts(fields)["num_hidden_layers"])
    indexed = [fields.has_tensor(f"blk.{i}.indexer.attn_k.weight") for i in layers]
    kinds = ["full" if has_indexer else "shared" for has_indexer in indexed]
    return indexers(fields) | {"indexer_types": kinds}


def _local_latent(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of layers with windows, whose latent attention has other sizes (dots3-note)."""
    count = layer_counts(fields)["num_hidden_layers"]
    kinds = layer_types(fields, default_period=1)[:count]
    heads = dict(zip(kinds, fields.of_layers("attention.head_count"), strict=False))
    rotary_dim = fields.integer("rope.dimension_count")
    head_dim = fields.integer("attention.key_length_mla_swa", minimum=rotary_dim + 1)
    return {
        "num_attention_heads": heads.get("full_attention", fields.num_heads),
        "layer_types": kinds,
        "swa_num_attention_heads": heads.get("sliding_attention", fields.num_heads),
        "swa_q_lora_rank": fields.integer("attention.q_lora_rank"),
        "swa_kv_lora_rank": fields.integer("attention.kv_lora_rank_swa"),
        "swa_head_dim": head_dim,
        "swa_qk_nope_head_dim": head_dim - rotary_dim,
        "swa_qk_rope_head_dim": rotary_dim,
        "swa_v_head_dim": fields.integer("attention.value_length_mla_swa"),
        "swa_rope_theta": fields.positive(
            "rope.freq_base_swa", fields.positive("rope.freq_base", 10_000.0)
        ),
    }


DEEPSEEK: Final[dict[str, Translate]] = {
    "deepseek": declared("deepseek", "DeepseekForCausalLM", expert_fields),
    "deepseek2": _deepseek2,
    "deepseek2-ocr": declared("deepseek", "DeepseekForCausalLM", expert_fields, _no_window),
    "deepseek32": declared("deepseek_v32", "DeepseekV32ForCausalLM", _deepseek2, _indexers),
    "dots3note": declared(
        "dots3_note_text",
        "Dots3NoteForCausalLM",
        _DEEPSEEK3,
        _local_latent,
        sliding_window=integer("attention.sliding_window"),
        index_n_heads=integer("attention.indexer.head_count"),
        index_head_dim=integer("attention.indexer.key_length"),
        index_topk=integer("attention.indexer.top_k"),
        shared_experts_intermediate_size=integer("expert_feed_forward_length"),
        # The norms of latent vectors contain their factors.
        apply_mla_qkv_lora_rescale=False,
    ),
    "glm-dsa": declared("glm_moe_dsa", "GlmMoeDsaForCausalLM", _deepseek2, _indexers),
    "hy_v4": declared(
        "hy_v4",
        "HYV4ForCausalLM",
        _DEEPSEEK3,
        indexers,
        hc_mult=integer("hyper_connection.count"),
        hc_magnitude=positive("hyper_connection.magnitude"),
        hc_eps=positive("hyper_connection.epsilon"),
        swiglu_limit=gate_limit,
    ),
    "mistral4": declared(
        "mistral4", "Mistral4ForCausalLM", _deepseek2, rope_scaling=_mistral4_scaling
    ),
}
