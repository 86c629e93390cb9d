"""Families like Llama, but with layer norms instead of RMS norms."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.rope import RopeSpec
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec, GateLimit
from ...layers.specs.norm_names import NormNames
from ...layers.window import BlockPattern
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    sliding_layers,
    uniform_layers,
    windowed_layers,
)
from .experts import first_dense, has_listed_experts, read_experts, with_experts
from .gpt import MEGATRON_NAMES, gpt_spec

_DBRX_NAMES = (
    (r"(^|\.)wte\.", r"\1embed_tokens."),
    (r"(^|\.)blocks\.(\d+)\.", r"\1layers.\2."),
    (r"(^|\.)norm_f\.", r"\1norm."),
    (r"\.norm_attn_norm\.norm_1\.", ".input_layernorm."),
    (r"\.norm_attn_norm\.norm_2\.", ".post_attention_layernorm."),
    (r"\.norm_attn_norm\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
    (r"\.norm_attn_norm\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.ffn\.router\.layer\.", ".mlp.gate."),
    (r"\.ffn\.experts\.", ".mlp.experts."),
)
_CTRL_NAMES = (
    (r"(^|\.)w\.", r"\1embed_tokens."),
    (r"(^|\.)h\.(\d+)\.", r"\1layers.\2."),
    (r"\.layernorm1\.", ".input_layernorm."),
    (r"\.layernorm2\.", ".post_attention_layernorm."),
    (r"(^|\.)layernorm\.", r"\1norm."),
    (r"\.multi_head_attention\.W([qkv])\.", r".self_attn.\1_proj."),
    (r"\.multi_head_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.ffn\.0\.", ".mlp.up_proj."),
    (r"\.ffn\.2\.", ".mlp.down_proj."),
)
_QK_NORM_NAMES = ((r"\.([qk])_layernorm\.(norms\.)?", r".\1_norm."),)


def _cohere_spec(
    fields: ConfigFields, layers: tuple[LayerSpec, ...], **differences: Any
) -> ModelSpec:
    values = {"rope_order": "interleaved", **attention_biases(fields), **differences}
    return base_spec(
        fields,
        layers,
        norm_kind="layer",
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        logits_divisor=1 / fields.positive("logit_scale", 0.0625),
        **values,
    )


def _cohere(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True, rms_norm_eps=1e-5, rope_theta=500_000.0)
    rope = read_rope(fields, head_dim(fields))
    return _cohere_spec(
        fields,
        uniform_layers(fields, rope),
        qk_norm="each head" if fields.boolean("use_qk_norm", False) else None,
    )


def _cohere2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(tie_word_embeddings=True, rms_norm_eps=1e-5, sliding_window=4096)
    rope = read_rope(fields, head_dim(fields))
    period = fields.integer("sliding_window_pattern", 4)
    layers = windowed_layers(fields, lambda i: bool((i + 1) % period), rope, None)
    return _cohere_spec(fields, layers)


_COMPASS_AXES = [24, 20, 20]


def _compass(fields: ConfigFields) -> ModelSpec:
    """Return the spec of North Micro Vision. Each type of its layers has its own rotary embedding, or none."""
    fields = fields.with_defaults(
        tie_word_embeddings=True,
        vocab_size=256_000,
        hidden_size=8192,
        intermediate_size=22_528,
        num_hidden_layers=40,
        num_attention_heads=64,
        max_position_embeddings=8192,
        sliding_window=4096,
    )
    # Here, null means that logits are not scaled.
    scale = fields.optional_positive("logit_scale") or 1.0
    eps = fields.positive("layer_norm_eps", 1e-5)
    fields = fields.with_values({"logit_scale": scale, "rms_norm_eps": eps})
    size = head_dim(fields)
    all_parameters = fields.first_section("rope_parameters").config
    ropes: dict[bool, RopeSpec | None] = {}
    slides = sliding_layers(fields, lambda i: False)
    for sliding in set(slides):
        kind = "sliding_attention" if sliding else "full_attention"
        is_nested = {"sliding_attention", "full_attention"} & all_parameters.keys()
        parameters = all_parameters.get(kind) if is_nested else all_parameters
        if is_nested and parameters is None:
            ropes[sliding] = None
            continue
        of_kind = {"mrope_section": _COMPASS_AXES, **(parameters or {}), "mrope_interleaved": True}
        ropes[sliding] = read_rope(fields.with_values({"rope_parameters": of_kind}), size)
    window = fields.integer("sliding_window")
    layers = tuple(LayerSpec(ropes[slid], window if slid else None) for slid in slides)
    return _cohere_spec(fields, layers, rope_order="half")


def _compass_images(fields: ConfigFields) -> ModelSpec:
    return _compass(fields.with_defaults(tie_word_embeddings=False))


def _cohere2_moe(fields: ConfigFields) -> ModelSpec:
    num_layers = fields.layer_count("num_hidden_layers")
    num_dense = fields.integer("first_k_dense_replace", 0, minimum=0)
    fields = fields.with_defaults(head_dim=128)
    periods = [
        fields.integer(name, default)
        for name, default in (
            ("prefix_dense_sliding_window_pattern", 1),
            ("sliding_window_pattern", 4),
        )
    ]
    has_experts = has_listed_experts(fields, first_dense(fields, 0))
    slides = sliding_layers(
        fields,
        lambda i: bool((i + 1) % periods[0] if i < num_dense else (i - num_dense + 1) % periods[1]),
    )
    fields = fields.with_values(
        {"layer_types": ["sliding_attention" if x else "full_attention" for x in slides]}
    )
    is_rms = fields.get("rms_norm_eps") is not None
    eps = fields.positive("rms_norm_eps" if is_rms else "layer_norm_eps", 1e-5)
    spec = _cohere2(fields)
    # Dense layers rotate although they have no window, if their pattern gives none of them a window.
    rope = read_rope(fields, head_dim(fields))
    layers = tuple(
        replace(layer, rope=rope) if periods[0] == 1 and not has_experts(i) else layer
        for i, layer in enumerate(spec.layers)
    )
    num_shared = fields.integer("num_shared_experts", 0, minimum=0)
    is_average = (
        num_shared and fields.text("shared_expert_combination_strategy", "average") == "average"
    )
    if is_average and not all(map(has_experts, range(num_layers))):
        raise fields.error(
            "averaging the outputs of shared experts is not supported for models that also have dense layers; "
            "use another model"
        )
    scoring = fields.text("expert_selection_fn", "softmax")
    if scoring not in ("softmax", "sigmoid"):
        raise fields.error(
            f"expert_selection_fn {scoring!r} is not supported; use softmax or sigmoid"
        )
    size = fields.integer("intermediate_size")
    experts = read_experts(
        fields,
        (8, 2),
        intermediate_size="intermediate_size",
        scoring=scoring,
        renormalizes=scoring == "softmax" or fields.boolean("norm_topk_prob", True),
        shared_intermediate_size=size * num_shared,
    )
    return with_experts(
        replace(
            spec,
            layers=layers,
            norm_kind="rms" if is_rms else "layer",
            norm_eps=eps,
            intermediate_size=fields.optional_integer("prefix_dense_intermediate_size") or size,
            # Both families halve the sum of routed and shared experts, which leaves attention unchanged.
            residual_multiplier=0.5 if is_average else 1.0,
            attention_multiplier=2.0 if is_average else 1.0,
        ),
        experts,
        has_experts,
    )


def _jais2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(hidden_act="relu2", intermediate_size=26_624, attention_bias=True)
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields))),
        mlp_bias=fields.boolean("mlp_bias", True),
        **attention_biases(fields),
    )


def _nemotron(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="relu2", intermediate_size=24_576, partial_rotary_factor=0.5
    )
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        norm_weight_offset=1.0,
        mlp_bias=fields.boolean("mlp_bias", False),
        **attention_biases(fields),
    )


def _olmo(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"rms_norm_eps": 1e-5})
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields))),
        norm_kind="layer",
        has_norm_weights=False,
        qkv_clip=fields.optional_positive("clip_qkv"),
        **attention_biases(fields),
    )


def _phi(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        hidden_act="gelu_new", intermediate_size=8192, partial_rotary_factor=0.5
    )
    has_qk_norm = fields.boolean("qk_layernorm", False)
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        is_parallel=True,
        norms=NormNames(mlp_input=None),
        qk_norm="head" if has_qk_norm else None,
        qk_norm_bias=True,
        head_bias=True,
        tensor_names=(
            (r"(^|\.)final_layernorm\.", r"\1norm."),
            (r"\.dense\.", ".o_proj."),
            (r"\.mlp\.fc1\.", ".mlp.up_proj."),
            (r"\.mlp\.fc2\.", ".mlp.down_proj."),
            *_QK_NORM_NAMES,
        ),
    )


def _stablelm(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5, partial_rotary_factor=0.25)
    is_parallel = fields.boolean("use_parallel_residual", False)
    return base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True)),
        norm_kind="layer",
        norm_bias=True,
        is_parallel=is_parallel,
        norms=NormNames(mlp_input=None if is_parallel else "post_attention_layernorm"),
        qkv_bias=fields.boolean("use_qkv_bias", False),
        qk_norm="each head" if fields.boolean("qk_layernorm", False) else None,
        tensor_names=_QK_NORM_NAMES,
    )


def _dbrx(fields: ConfigFields) -> ModelSpec:
    attention, mlp = fields.first_section("attn_config"), fields.first_section("ffn_config")
    power = mlp.get("moe_normalize_expert_weights", 1.0)
    if power != 1.0:
        raise mlp.wrong("moe_normalize_expert_weights", "1", power)
    values = {
        "num_key_value_heads": attention.integer("kv_n_heads", 1),
        "intermediate_size": mlp.integer("ffn_hidden_size", 3584),
        "hidden_act": mlp.first_section("ffn_act_fn").text("name", "silu"),
        "head_dim": None,
        "rms_norm_eps": 1e-5,
    }
    fields = fields.with_values(values)
    theta = attention.positive("rope_theta", 10_000.0, above=1)
    experts = ExpertsSpec(
        mlp.integer("moe_num_experts", 4),
        mlp.integer("moe_top_k", 1, maximum=mlp.integer("moe_num_experts", 4)),
        fields.integer("intermediate_size"),
    )
    spec = base_spec(
        fields,
        uniform_layers(fields, read_rope(fields, head_dim(fields), theta=theta)),
        norm_kind="layer",
        qkv_clip=attention.optional_positive("clip_qkv"),
        tensor_names=_DBRX_NAMES,
    )
    return with_experts(spec, experts)


def _starcoder2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=2,
        intermediate_size=12_288,
        hidden_act="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )
    rope, window = read_rope(fields, head_dim(fields)), fields.optional_integer("sliding_window")
    return gpt_spec(
        fields,
        has_groups=True,
        layers=uniform_layers(fields, rope, window),
        has_biases=fields.boolean("use_bias", True),
        tensor_names=((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")),
    )


def _ctrl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of CTRL (arXiv 1909.05858), whose positions are sines and cosines."""
    size = fields.integer("dff", 8192)
    # Only the final norm has the epsilon of the config.
    final_norm_eps = fields.positive("layer_norm_epsilon", 1e-6)
    fields = fields.with_values({"intermediate_size": size, "hidden_act": "relu"}).with_defaults(
        tie_word_embeddings=True, max_position_embeddings=256
    )
    return gpt_spec(
        fields,
        embedding_scale=math.sqrt(fields.integer("hidden_size")),
        num_positions=fields.integer("max_position_embeddings"),
        sinusoids="by size",
        head_bias=True,
        norm_eps=1e-6,
        final_norm_eps=final_norm_eps,
        tensor_names=_CTRL_NAMES,
    )


def _gpt_neox_japanese(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Japanese GPT-NeoX. Only the attention of its last layer has a bias."""
    size = fields.integer("intermediate_multiple_size", 4) * fields.integer("hidden_size")
    fields = fields.with_values({"intermediate_size": size}).with_defaults(
        hidden_act="gelu",
        tie_word_embeddings=True,
        partial_rotary_factor=fields.positive("rotary_pct", 1.0),
        rope_theta=fields.positive("rotary_emb_base", 10_000.0),
    )
    layers = uniform_layers(fields, read_rope(fields, head_dim(fields), partial=True))
    return gpt_spec(
        fields,
        layers=(*layers[:-1], replace(layers[-1], has_output_bias=True)),
        has_biases=False,
        has_grouped_qkv=True,
        tensor_names=((r"\.attention\.dense_bias$", ".self_attn.o_proj.bias"), *MEGATRON_NAMES),
    )


def _phi3_small(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Phi-3-small, most of whose layers attend to blocks of keys that depend on the head."""
    fields.require("hidden_act", "gegelu")
    fields = fields.with_defaults(
        num_key_value_heads=8, tie_word_embeddings=True, max_position_embeddings=8192
    )
    size, num_heads = head_dim(fields), fields.integer("num_attention_heads")
    stride = fields.integer("blocksparse_vert_stride", 8)
    is_same = fields.boolean("blocksparse_homo_head_pattern", False)
    pattern = BlockPattern(
        fields.integer("blocksparse_block_size", 64),
        fields.integer("blocksparse_num_local_blocks", 16),
        stride,
        0 if is_same else max(1, stride // num_heads),
    )
    limit = fields.optional_positive("gegelu_limit")
    layer = LayerSpec(
        read_rope(fields, size, theta=1e6),
        gate_limit=GateLimit(math.inf if limit is None else limit),
    )
    period = fields.optional_integer("dense_attention_every_n_layers")
    layers = tuple(
        layer if period and (i + 1) % period == 0 else replace(layer, block_pattern=pattern)
        for i in range(fields.layer_count("num_hidden_layers"))
    )
    scale = fields.positive("mup_attn_multiplier", 1.0) / size
    return gpt_spec(
        fields.with_values({"hidden_act": "silu"}),
        has_groups=True,
        layers=layers,
        activation="clamped_swiglu",
        has_gate=True,
        alternates_gates=True,
        attention_scale=scale if fields.boolean("mup_use_scaling", True) else size**-0.5,
        embedding_scale=fields.optional_positive("mup_embedding_multiplier") or 1.0,
        logits_divisor=fields.optional_positive("mup_width_multiplier") or 1.0,
        has_grouped_qkv=True,
        tensor_names=(
            (r"(^|\.)final_layernorm\.", r"\1norm."),
            (r"\.query_key_value\.", ".qkv_proj."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.mlp\.up_proj\.", ".mlp.gate_up_proj."),
            (r".*\.inv_freq$", ""),
        ),
    )


FAMILIES = (
    Family("CTRLLMHeadModel", "ctrl", _ctrl),
    Family("GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese", _gpt_neox_japanese),
    Family("CohereCompassForCausalLM", "cohere_compass_text", _compass),
    Family("CohereCompassForConditionalGeneration", "cohere_compass", _compass_images),
    Family("Cohere2ForCausalLM", "cohere2", _cohere2),
    Family("CohereForCausalLM", "cohere", _cohere),
    Family("Cohere2MoeForCausalLM", "cohere2_moe", _cohere2_moe),
    Family("DbrxForCausalLM", "dbrx", _dbrx),
    Family("Jais2ForCausalLM", "jais2", _jais2),
    Family("NemotronForCausalLM", "nemotron", _nemotron),
    Family("OlmoForCausalLM", "olmo", _olmo),
    Family("Phi3SmallForCausalLM", "phi3small", _phi3_small),
    Family("PhiForCausalLM", "phi", _phi),
    Family("StableLmForCausalLM", "stablelm", _stablelm),
    Family("Starcoder2ForCausalLM", "starcoder2", _starcoder2),
)
