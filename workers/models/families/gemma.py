"""The Gemma families."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.model_dimensions import DEFAULTS_OF_GEMMA3
from ....protocol.checkpoint.recurrent_config import DEFAULT_LENGTH
from ...device.dtypes import rounded
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.spec import ModelSpec
from ...layers.specs.altup import AltUpSpec, PerLayerInputsSpec
from ...layers.specs.experts import ExpertsSpec
from ...layers.specs.norm_names import NormNames
from ...layers.window import Chunk
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    layer_settings,
    sliding_layers,
    windowed_layers,
)
from .hybrid import recurrent_layer
from .llama import llama

_NORMS = NormNames(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)
_GRIFFIN_NAMES = (
    (r"\.temporal_pre_norm\.", ".input_layernorm."),
    (r"\.channel_pre_norm\.", ".post_attention_layernorm."),
    (r"\.mlp_block\.", ".mlp."),
    (r"\.temporal_block\.([qkvo]_proj)\.", r".self_attn.\1."),
    (r"\.temporal_block\.linear_([xy])\.", r".mixer.in_proj_\1."),
    (r"\.temporal_block\.linear_out\.", ".mixer.out_proj."),
    (r"\.temporal_block\.conv_1d\.", ".mixer.conv1d."),
    (r"\.temporal_block\.rg_lru\.", ".mixer."),
    (r"(^|\.)final_norm\.", r"\1norm."),
)
_GEMMA_DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _gemma(fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any) -> ModelSpec:
    return base_spec(
        fields,
        layers,
        attention_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        norm_weight_offset=1.0,
        norms=_NORMS,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        **attention_biases(fields),
        **differences,
    )


def _gemma1(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True, head_dim=256)
    activation = fields.text("hidden_act", "gelu_pytorch_tanh")
    # Published configs name the exact GELU, but the models were trained with the tanh approximation. Transformers 4
    # used that for them; version 5 computes what the config says.
    if activation == "gelu" and not fields.text("transformers_version", "4").startswith("5"):
        activation = "gelu_pytorch_tanh"
    fields = fields.with_values({"hidden_act": activation, "hidden_activation": None})
    return llama(
        fields, norm_weight_offset=1.0, embedding_scale=fields.integer("hidden_size") ** 0.5
    )


def gemma2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Gemma 2."""
    fields = fields.with_defaults(
        **_GEMMA_DEFAULTS, attn_logit_softcapping=50.0, final_logit_softcapping=30.0
    )
    rope = read_rope(fields, head_dim(fields))
    layers = windowed_layers(fields, lambda i: i % 2 == 0, rope, rope)
    softcap = fields.optional_positive("attn_logit_softcapping")
    return _gemma(fields, layers, attention_softcap=softcap)


def _vault_gemma(fields: ConfigFields) -> ModelSpec:
    return replace(gemma2(fields), norms=NormNames(mlp_input="pre_feedforward_layernorm"))


def _gemma3(fields: ConfigFields) -> ModelSpec:
    # The configs on the hub omit fields whose values are the defaults of their class.
    fields = fields.with_defaults(**_GEMMA_DEFAULTS, **DEFAULTS_OF_GEMMA3)
    local_rope = read_rope_of_layer_type(
        fields,
        "sliding_attention",
        head_dim(fields),
        theta_field="rope_local_base_freq",
        theta=10_000.0,
    )
    global_rope = read_rope_of_layer_type(
        fields, "full_attention", head_dim(fields), theta=1_000_000.0
    )
    period = fields.integer("sliding_window_pattern", 6)
    slides = sliding_layers(fields, lambda i: (i + 1) % period != 0)
    window = fields.optional_integer("sliding_window")
    is_encoder = fields.get("use_bidirectional_attention") is True
    if is_encoder and window is not None:
        # The window extends as far after a token as before it.
        window = window // 2 + 1
    local = LayerSpec(local_rope, window)
    layers = tuple(local if sliding else LayerSpec(global_rope) for sliding in slides)
    # Some configs have an attn_logit_softcapping, which the models do not use.
    return _gemma(fields, layers, qk_norm="head", is_causal=not is_encoder)


def _rnj1(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Rnj-1 with chunks: a Gemma 3 with `chunked_attention` instead of windows."""
    fields = fields.with_defaults(**_GEMMA_DEFAULTS, **DEFAULTS_OF_GEMMA3)
    count, size = fields.layer_count("num_hidden_layers"), head_dim(fields)
    kinds = fields.per_layer("layer_types", count) or ["full_attention"] * count
    parameters = fields.first_section("rope_parameters")

    def layer(kind: str) -> LayerSpec:
        theta = 1e4 if kind == "sliding_attention" else 1e6
        rope = (
            read_rope_of_layer_type(fields, kind, size, theta_field="rope_theta", theta=theta)
            if parameters.get(kind) is not None
            else read_rope(fields, size, theta=theta)
        )
        if kind != "chunked_attention":
            return LayerSpec(rope)
        # The field counts both chunks to which a token attends.
        num_tokens = fields.integer("sliding_window", minimum=2)
        return LayerSpec(rope, Chunk(num_tokens // 2, sees_previous=True))

    known = ("chunked_attention", "full_attention", "sliding_attention")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise fields.wrong("layer_types", f"a list of {', '.join(known)}", unknown[0])
    return _gemma(fields, tuple(layer(kind) for kind in kinds), qk_norm="head")


_GEMMA4_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
}
_GEMMA4_UNIFIED_DEFAULTS = _GEMMA4_DEFAULTS | {
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_EMBEDDING_GEMMA2_DEFAULTS = _GEMMA4_UNIFIED_DEFAULTS | {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
}
_GEMMA3N_DEFAULTS = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "intermediate_size": 16_384,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
    "final_logit_softcapping": 30.0,
    "num_kv_shared_layers": 15,
    "tie_word_embeddings": True,
}


def _gemma_with_shared_layers(
    fields: ConfigFields, layers: list[LayerSpec], **differences: Any
) -> ModelSpec:
    """Return the spec of Gemma 3n or 4, whose last layers read the keys and values of an earlier layer of their kind.

    That is the last layer of the kind with its own keys and values. Checkpoints may contain unused keys and values
    for the later ones.
    """
    num_own = len(layers) - fields.integer("num_kv_shared_layers", 0, minimum=0)
    if num_own < 1:
        raise fields.error(f"num_kv_shared_layers must be less than the {len(layers)} layers")
    for i, layer in enumerate(layers[num_own:], num_own):
        sources = [j for j in range(num_own) if layers[j].window == layer.window]
        if not sources:
            raise fields.error(
                f"layer {i} shares keys and values, but none of the first {num_own} layers is of its type"
            )
        layers[i] = replace(layer, kv_source=sources[-1])
    shared = "|".join(str(i) for i in range(num_own, len(layers)))
    unused = rf".*layers\.(?:{shared})\.self_attn\.[kv]_(?:proj|norm)\..*"
    names = differences.pop("tensor_names", ())
    return base_spec(
        fields,
        tuple(layers),
        attention_scale=1.0,
        qk_norm="head",
        has_value_norm=True,
        final_softcap=fields.optional_positive("final_logit_softcapping"),
        norms=_NORMS,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
        tensor_names=(*names, (unused, "")) if shared else names,
        **attention_biases(fields),
        **differences,
    )


def _per_layer_inputs(fields: ConfigFields) -> PerLayerInputsSpec | None:
    size = fields.integer("hidden_size_per_layer_input", 256, minimum=0)
    if not size:
        return None
    return PerLayerInputsSpec(size, fields.integer("vocab_size_per_layer_input", 262_144))


def _gemma4_layer_inputs(fields: ConfigFields) -> PerLayerInputsSpec | None:
    found = _per_layer_inputs(fields)
    if found is None:
        return None
    return replace(found, placed_token_id=fields.integer("pad_token_id", 0, minimum=0))


def _gemma3n(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(**_GEMMA3N_DEFAULTS)
    num_layers = fields.layer_count("num_hidden_layers")
    local_rope, global_rope = (
        read_rope_of_layer_type(fields, kind, head_dim(fields), theta_field=field, theta=theta)
        for kind, field, theta in (
            ("sliding_attention", "rope_local_base_freq", 10_000.0),
            ("full_attention", "rope_theta", 1_000_000.0),
        )
    )
    window = fields.integer("sliding_window")
    num_sparse = 10 if num_layers > 10 else 0
    sparsities = fields.per_layer("activation_sparsity_pattern", num_layers)
    if sparsities is None:
        sparsities = [0.95] * num_sparse + [0.0] * (num_layers - num_sparse)
    for sparsity in sparsities:
        if not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
            raise fields.error(
                f"activation_sparsity_pattern has {sparsity!r}, which is not between 0 and 1"
            )
    sizes = fields.get("intermediate_size")
    if isinstance(sizes, list | tuple):
        sizes = fields.per_layer("intermediate_size", num_layers) or []
        by_layer = [ConfigFields({"intermediate_size": size}, fields.path) for size in sizes]
        sizes = [each.integer("intermediate_size") for each in by_layer]
        fields = fields.with_values({"intermediate_size": max(sizes)})
    else:
        sizes = [fields.integer("intermediate_size")] * num_layers
    layers = [
        LayerSpec(
            local_rope if slides else global_rope,
            window if slides else None,
            intermediate_size=size,
            activation_sparsity=float(sparsity),
        )
        for slides, size, sparsity in zip(
            sliding_layers(fields, lambda i: (i + 1) % 5 != 0), sizes, sparsities, strict=True
        )
    ]
    num_streams = fields.integer("altup_num_inputs", 4, minimum=2)
    altup = AltUpSpec(
        num_streams,
        fields.integer("altup_active_idx", 0, minimum=0, maximum=num_streams - 1),
        fields.boolean("altup_correct_scale", True),
        fields.integer("laurel_rank", 64),
    )
    per_layer_inputs = _per_layer_inputs(fields)
    if per_layer_inputs is None:
        raise fields.error("hidden_size_per_layer_input must be a positive integer, got 0")
    return _gemma_with_shared_layers(fields, layers, per_layer_inputs=per_layer_inputs, altup=altup)


def gemma4(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Gemma 4."""
    fields = fields.with_defaults(**_GEMMA4_DEFAULTS)
    num_layers = fields.layer_count("num_hidden_layers")
    slides = sliding_layers(fields, lambda i: (i + 1) % 6 != 0)
    # The last layer has full attention, whatever the config says.
    slides[-1] = False
    local_size, num_local = head_dim(fields), fields.integer("num_key_value_heads")
    shares_projection = fields.boolean("attention_k_eq_v", False)
    global_fields = _global_layer_fields(fields, slides, shares_projection)
    global_size = global_fields.integer("head_dim")
    num_global = global_fields.integer("num_key_value_heads")
    local_rope = read_rope_of_layer_type(
        fields, "sliding_attention", local_size, theta_field="rope_local_base_freq", theta=1e4
    )
    if fields.get("rope_parameters") is None:
        # Use the defaults of transformers.
        parameters = {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}
        }
        fields = fields.with_values({"rope_parameters": parameters})
    global_rope = read_rope_of_layer_type(fields, "full_attention", global_size, theta=1e6)
    experts = None
    if fields.boolean("enable_moe_block", False):
        num_experts = fields.integer("num_experts")
        experts = ExpertsSpec(
            num_experts,
            fields.integer("top_k_experts", maximum=num_experts),
            fields.integer("moe_intermediate_size"),
            has_expert_scales=True,
            has_own_norms=True,
        )
    local = LayerSpec(local_rope, fields.integer("sliding_window"), experts=experts)
    global_ = LayerSpec(
        global_rope,
        experts=experts,
        head_dim=global_size,
        num_kv_heads=num_global,
        has_value_projection=not shares_projection,
    )
    if (global_size, num_global) == (local_size, num_local):
        global_ = replace(global_, head_dim=None, num_kv_heads=None)
    layers = [local if each else global_ for each in slides]
    if fields.boolean("use_double_wide_mlp", False):
        num_own = num_layers - fields.integer("num_kv_shared_layers", 0, minimum=0)
        size = 2 * fields.integer("intermediate_size")
        layers[num_own:] = [replace(layer, intermediate_size=size) for layer in layers[num_own:]]
    return _gemma_with_shared_layers(
        fields,
        layers,
        per_layer_inputs=_gemma4_layer_inputs(fields),
        has_layer_scales=True,
        tensor_names=(
            (r"\.router\.proj\.", ".beside.gate."),
            (r"\.router\.scale$", ".beside.router_scale"),
            (r"\.router\.", ".beside.gate."),
            (r"(layers\.\d+)\.experts\.", r"\1.beside.experts."),
        ),
    )


def _gemma4_unified(fields: ConfigFields) -> ModelSpec:
    return gemma4(fields.with_defaults(**_GEMMA4_UNIFIED_DEFAULTS))


def _embedding_gemma2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an EmbeddingGemma 2: an encoder, whose layers' inputs have no table."""
    fields = fields.with_defaults(**_EMBEDDING_GEMMA2_DEFAULTS)
    inputs = PerLayerInputsSpec(fields.integer("hidden_size_per_layer_input"), 0)
    # The window extends as far after a token as before it.
    window = fields.integer("sliding_window") + 1
    text = fields.with_values({"sliding_window": window, "hidden_size_per_layer_input": 0})
    spec = gemma4(text)
    return replace(
        spec,
        per_layer_inputs=inputs,
        is_causal=False,
        tensor_names=(
            # The pooler reads this matrix.
            (r".*\bembedding_projection\..*", ""),
            (r"\.ple_block\.", "."),
            (r"\bple\.", ""),
            *spec.tensor_names,
        ),
    )


def _global_layer_fields(
    fields: ConfigFields, slides: list[bool], shares_projection: bool
) -> ConfigFields:
    """Return the head size and the number of key/value heads of the full-attention layers.

    Older configs have separate fields for them, newer ones a section per layer.
    """
    num_kv_heads = fields.integer("num_key_value_heads")
    if fields.section("per_layer_config") is None:
        if shares_projection:
            num_kv_heads = fields.integer("num_global_key_value_heads", num_kv_heads)
        size = fields.integer("global_head_dim", 512)
        return fields.with_values({"head_dim": size, "num_key_value_heads": num_kv_heads})
    same = {"head_dim": head_dim(fields), "num_key_value_heads": num_kv_heads}
    found = layer_settings(fields, same, len(slides))
    global_values = [values for values, is_local in zip(found, slides, strict=True) if not is_local]
    local_values = [values for values, is_local in zip(found, slides, strict=True) if is_local]
    if any(values != same for values in local_values) or any(
        values != global_values[0] for values in global_values
    ):
        raise fields.error("per_layer_config must be equal for all layers of a type")
    if unknown := global_values[0].keys() - same.keys():
        raise fields.error(
            f"per_layer_config.{min(unknown)} is not supported; use a model without it"
        )
    return fields.with_values(global_values[0])


def _recurrent_gemma(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a RecurrentGemma (arXiv 2404.07839): recurrent layers, and attention with a window."""
    size, window = head_dim(fields), fields.integer("attention_window_size", 2048)
    fields = fields.with_defaults(
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
        partial_rotary_factor=0.5,
    ).with_values(
        {
            "intermediate_size": fields.integer("intermediate_size") // 2,
            "max_position_embeddings": fields.optional_integer("max_position_embeddings")
            or DEFAULT_LENGTH,
        }
    )
    pattern = fields.get("block_types", ["recurrent", "recurrent", "attention"])
    if not isinstance(pattern, list | tuple) or not pattern:
        raise fields.wrong("block_types", "a list of recurrent and attention", pattern)
    recurrent = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False)
    attending = LayerSpec(read_rope(fields, size, partial=True), window)
    has_biases = fields.boolean("attention_bias", False)
    return base_spec(
        fields,
        tuple(
            recurrent if pattern[i % len(pattern)] == "recurrent" else attending
            for i in range(fields.layer_count("num_hidden_layers"))
        ),
        norm_weight_offset=1.0,
        # transformers rounds it to bfloat16, whatever the model's dtype is.
        embedding_scale=rounded(fields.integer("hidden_size") ** 0.5, torch.bfloat16),
        final_softcap=fields.positive("logits_soft_cap", 30.0),
        qkv_bias=has_biases,
        attention_output_bias=True,
        mlp_bias=True,
        tensor_names=_GRIFFIN_NAMES,
    )


FAMILIES = (
    Family("GemmaForCausalLM", "gemma", _gemma1),
    Family("Gemma2ForCausalLM", "gemma2", gemma2),
    Family("Gemma3ForCausalLM", "gemma3_text", _gemma3),
    Family("Gemma3ForConditionalGeneration", "gemma3", _gemma3),
    Family("Gemma3nForCausalLM", "gemma3n_text", _gemma3n),
    Family("Gemma3nForConditionalGeneration", "gemma3n", _gemma3n),
    Family("Gemma4ForCausalLM", "gemma4_text", gemma4),
    Family("Gemma4ForConditionalGeneration", "gemma4", gemma4),
    Family("Gemma4UnifiedForCausalLM", "gemma4_unified_text", _gemma4_unified),
    Family("Gemma4UnifiedForConditionalGeneration", "gemma4_unified", _gemma4_unified),
    Family("EmbeddingGemma2Model", "embedding_gemma2", _embedding_gemma2),
    Family("Rnj1ForCausalLM", "gemma3_text", _rnj1),
    Family("RecurrentGemmaForCausalLM", "recurrent_gemma", _recurrent_gemma),
    Family("VaultGemmaForCausalLM", "vaultgemma", _vault_gemma),
)
