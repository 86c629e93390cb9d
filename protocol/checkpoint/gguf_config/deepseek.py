"""Translate the metadata of DeepSeek's mixtures of experts, and of others with their latent attention."""

from __future__ import annotations

from typing import Any, Final

from .declared import declared
from .fields import ModelFields, Translate
from .parts import expert_fields, latent_attention, layer_counts, rope_scaling, yarn_weight

SIGMOID: Final = 2
"""The value of `expert_gating_func` if scores are sigmoids of the router's logits."""


def _deepseek(fields: ModelFields) -> dict[str, Any]:
    """Return the fields of latent attention with experts, without the kind of the router."""
    scaling = rope_scaling(fields)
    if scaling is not None and (weight := yarn_weight(fields, 0.1)):
        scaling |= {"mscale": weight, "mscale_all_dim": weight}
    return (
        expert_fields(fields)
        | latent_attention(fields)
        | layer_counts(fields)
        | {"rope_scaling": scaling}
    )


_DEEPSEEK3: Final = declared("deepseek_v3", "DeepseekV3ForCausalLM", _deepseek)


def _no_window(fields: ModelFields) -> dict[str, Any]:
    """Refuse files of models whose windows do not move over the prompt (Unlimited-OCR)."""
    fields.require("attention.sliding_window", 0)
    return {}


def _deepseek2(fields: ModelFields) -> dict[str, Any]:
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
    """Return the fields of sparse latent attention, in which only some layers have an indexer."""
    layers = range(layer_counts(fields)["num_hidden_layers"])
    indexed = [fields.has_tensor(f"blk.{i}.indexer.attn_k.weight") for i in layers]
    return {
        "index_n_heads": fields.integer("attention.indexer.head_count"),
        "index_head_dim": fields.integer("attention.indexer.key_length"),
        "index_topk": fields.integer("attention.indexer.top_k"),
        "indexer_types": ["full" if has_indexer else "shared" for has_indexer in indexed],
    }


DEEPSEEK: Final[dict[str, Translate]] = {
    "deepseek": declared("deepseek", "DeepseekForCausalLM", expert_fields),
    "deepseek2": _deepseek2,
    "deepseek2-ocr": declared("deepseek", "DeepseekForCausalLM", expert_fields, _no_window),
    "deepseek32": declared("deepseek_v32", "DeepseekV32ForCausalLM", _deepseek2, _indexers),
    "glm-dsa": declared("glm_moe_dsa", "GlmMoeDsaForCausalLM", _deepseek2, _indexers),
    "mistral4": declared(
        "mistral4", "Mistral4ForCausalLM", _deepseek2, rope_scaling=_mistral4_scaling
    ),
}
