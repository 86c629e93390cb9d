"""Families with Llama's norms and with sliding windows in some layers."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope, read_rope_of_layer_type
from ...layers.spec import ModelSpec
from ...layers.specs.norm_names import NormNames
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    read_limits,
    sliding_layers,
    windowed_layers,
    with_limits,
)
from .experts import (
    GRANITE_NAMES,
    SHARED_EXPERT_NAMES,
    deepseek_experts,
    granite_experts,
    has_listed_experts,
    has_sparse_step,
    read_experts,
    unused_layers,
    with_experts,
)
from .llama import granite, llama


def _cwm(fields: ConfigFields) -> ModelSpec:
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 1_000_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    if fields.get("rope_scaling") is None:
        fields = fields.with_defaults(rope_parameters=llama3)
    fields = fields.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, sliding_window=8192
    )
    rope = read_rope(fields, head_dim(fields), theta=1_000_000.0)
    return llama(fields, layers=windowed_layers(fields, lambda i: i % 4 != 0, rope, rope))


def _granite_windows(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(sliding_window=128)
    window = fields.integer("sliding_window")
    slides = sliding_layers(fields, lambda i: i % 4 != 0)
    rope = read_rope(fields, head_dim(fields))
    thetas = fields.per_layer("layer_rope_theta", len(slides)) or [rope.theta] * len(slides)
    for theta in thetas:
        if theta is not None and (type(theta) not in (int, float) or theta < 0):
            raise fields.error(f"layer_rope_theta has {theta!r}, which is not a valid rotary base")
    layers = tuple(
        # A base of 0 means no rotation.
        LayerSpec(replace(rope, theta=float(theta)) if theta else None, window if sliding else None)
        for theta, sliding in zip(thetas, slides, strict=True)
    )
    return replace(granite(fields), layers=layers, has_sinks=True)


def _granite_dense_windows(fields: ConfigFields) -> ModelSpec:
    return _granite_windows(
        fields.with_defaults(num_key_value_heads=4, rms_norm_eps=1e-5, tie_word_embeddings=True)
    )


def _granite_moe_windows(fields: ConfigFields) -> ModelSpec:
    names = (
        *GRANITE_NAMES,
        (r"\.block_sparse_moe\.router\.", ".mlp.gate."),
        (r"\.block_sparse_moe\.", ".mlp."),
    )
    return with_experts(_granite_windows(fields), granite_experts(fields), tensor_names=names)


def _mellum(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=4, sliding_window=1024)
    local, full = (
        read_rope_of_layer_type(fields, kind, head_dim(fields), theta=theta)
        for kind, theta in (("sliding_attention", 10_000.0), ("full_attention", 500_000.0))
    )
    layers = windowed_layers(fields, lambda _: False, local, full)
    experts = read_experts(
        fields, (64, 8, 896), renormalizes=fields.boolean("norm_topk_prob", True)
    )
    return with_experts(
        llama(fields, layers=layers, qk_norm="head"),
        experts,
        has_listed_experts(fields, lambda _: True),
        tensor_names=unused_layers(fields),
    )


def _maple(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Maple, whose layers without a window do not rotate keys."""
    fields = fields.with_defaults(
        head_dim=128, num_key_value_heads=4, sliding_window=512, partial_rotary_factor=0.5
    )
    fields.require("norm_topk_prob", True)
    rope = read_rope(fields, head_dim(fields), partial=True)
    is_rotated = not fields.boolean("nope_on_global_attention", True)
    layers = windowed_layers(fields, lambda i: i % 4 != 3, rope, rope if is_rotated else None)
    experts = read_experts(fields, (256, 8, 512), renormalizes=True)
    spec = with_experts(
        llama(fields, layers=layers, qk_norm="head"),
        experts,
        attention_output_bias=fields.boolean("use_bias", False),
        tensor_names=((r"(^|\.)word_embeddings\.", r"\1embed_tokens."),),
    )
    # Published configs have no limit, which is a constant of the published code.
    count = len(layers)
    limits = [
        None if limit is None else replace(limit, is_activated=False)
        for limit in read_limits(fields.with_defaults(swiglu_limits=[7.0] * count), "swiglu_limits")
    ]
    return with_limits(spec, limits, [None] * count)


def _flint(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        head_dim=128, num_key_value_heads=4, sliding_window=513, mlp_only_layers=[0, 1]
    )
    last = fields.layer_count("num_hidden_layers") - 1
    rope = read_rope(fields, head_dim(fields))
    layers = windowed_layers(fields, lambda i: i > 1 and i % 4 != 1 and i != last, rope, None)
    experts = read_experts(
        fields,
        (256, 6, 512),
        scoring="sigmoid",
        renormalizes=fields.boolean("norm_topk_prob", True),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 1024),
    )
    return with_experts(
        llama(fields, layers=layers, qk_norm="head", has_sinks=True),
        experts,
        has_sparse_step(fields),
        tensor_names=(*SHARED_EXPERT_NAMES, (r"\.softmax_offset$", ".sinks")),
    )


def _afmoe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128, rms_norm_eps=1e-5, sliding_window=1024)
    interval = fields.integer("global_attn_every_n_layers", 4)
    rope = read_rope(fields, head_dim(fields))
    layers = windowed_layers(fields, lambda i: (i + 1) % interval != 0, rope, None)
    is_scaled = fields.boolean("mup_enabled", False)
    spec = base_spec(
        fields,
        layers,
        norms=NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_mlp_layernorm",
            mlp_output="post_mlp_layernorm",
        ),
        qk_norm="head",
        gates_attention=True,
        has_gate_projection=True,
        embedding_scale=fields.integer("hidden_size") ** 0.5 if is_scaled else 1.0,
        **attention_biases(fields),
    )
    size = fields.integer("moe_intermediate_size", 1408)
    experts = read_experts(
        fields,
        (64, 6, size),
        scoring="sigmoid",
        scale=fields.positive("route_scale", 1.0),
        has_correction_bias=True,
        shared_intermediate_size=size * fields.integer("num_shared_experts", 2, minimum=0),
    )
    first = fields.integer("num_dense_layers", 1, minimum=0)
    return with_experts(
        spec,
        experts,
        lambda i: i >= first,
        tensor_names=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
        ),
    )


def _mimo_v2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a MiMo-V2. Its layers with a window have more key/value heads, and attention sinks."""
    num_layers = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        head_dim=192,
        num_key_value_heads=4,
        rms_norm_eps=1e-5,
        partial_rotary_factor=0.334,
        attention_value_scale=0.707,
        n_routed_experts=256,
    )
    size, num_kv_heads = head_dim(fields), fields.integer("num_key_value_heads")
    value_dim = fields.integer("v_head_dim", 128, maximum=size)
    full, local = (
        read_rope_of_layer_type(fields, kind, size, theta_field=name, theta=theta, partial=True)
        for kind, name, theta in (
            ("full_attention", "rope_theta", 5_000_000.0),
            ("sliding_attention", "swa_rope_theta", 10_000.0),
        )
    )
    previous = fields.optional_integer("sliding_window_size")
    window = fields.integer("sliding_window", 129) if previous is None else previous + 1
    num_local = fields.integer("swa_num_key_value_heads", 2 * num_kv_heads)
    has_sinks, local_has_sinks = (
        fields.boolean("add_full_attention_sink_bias", False),
        fields.boolean("add_swa_attention_sink_bias", True),
    )
    pattern = fields.per_layer("hybrid_layer_pattern", num_layers)
    slides = sliding_layers(
        fields, lambda i: bool(i and (i + 1) % 6) if pattern is None else bool(pattern[i])
    )
    layers = tuple(
        LayerSpec(local, window, num_kv_heads=num_local, has_sinks=local_has_sinks)
        if sliding
        else LayerSpec(full, has_sinks=has_sinks)
        for sliding in slides
    )
    spec = base_spec(
        fields,
        layers,
        value_dim=None if value_dim == size else value_dim,
        has_sinks=has_sinks or local_has_sinks,
        # The factor on values is applied to the attention's output instead, which is linear in them.
        attention_multiplier=fields.optional_positive("attention_value_scale") or 1.0,
        qkv_bias=fields.boolean("attention_bias", False),
    )
    sparse = fields.per_layer("moe_layer_freq", num_layers)
    experts = deepseek_experts(
        fields.with_values(
            {"n_shared_experts": 0, "routed_scaling_factor": fields.get("routed_scaling_factor", 1)}
        ).with_defaults(moe_intermediate_size=2048)
    )
    return with_experts(
        spec,
        experts,
        has_listed_experts(fields, lambda i: bool(i) if sparse is None else bool(sparse[i])),
        tensor_names=(
            (r"\.attention_sink_bias$", ".sinks"),
            (r"(model\.)?mtp\..*", ""),
            *unused_layers(fields),
        ),
    )


def _mimo_v2_5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the text of a MiMo-V2.5 or V2.6.

    With eight bits, the matrix for queries, keys and values consists of as many parts as a layer without a window has
    key/value heads.
    """
    spec = _mimo_v2(fields.with_values({"sliding_window_size": None}))
    layout = fields.text("attention_projection_layout", "split")
    if layout not in ("split", "fused_qkv"):
        raise fields.wrong("attention_projection_layout", "split or fused_qkv", layout)
    quantization = fields.first_section("quantization_config").get("quant_method")
    if layout == "split" or quantization != "fp8":
        return spec
    num_blocks = spec.num_kv_heads
    for layer in spec.layers:
        own = spec.for_layer(layer)
        if own.num_heads % num_blocks or own.num_kv_heads % num_blocks:
            raise fields.error(
                f"num_attention_heads {own.num_heads} and swa_num_key_value_heads {own.num_kv_heads} must be "
                f"multiples of num_key_value_heads {num_blocks}"
            )
    return replace(spec, num_qkv_blocks=num_blocks)


def _laguna(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Laguna. Its layers may have different numbers of query heads."""
    fields = fields.with_defaults(head_dim=128, num_key_value_heads=8, sliding_window=512)
    num_layers, size = fields.layer_count("num_hidden_layers"), head_dim(fields)
    if fields.boolean("moe_apply_router_weight_on_input", False):
        raise fields.error(
            "moe_apply_router_weight_on_input is not supported; use a model without it"
        )
    gating = fields.get("gating", True)
    if gating not in (True, "per-head", "per-element"):
        raise fields.error(f"gating must be per-head or per-element, got {gating!r}")
    # If the config describes the rotations, they are of whole heads unless it says otherwise.
    fraction = 0.5 if fields.section("rope_parameters") is None else 1.0
    full, local = (
        read_rope_of_layer_type(
            fields.with_defaults(partial_rotary_factor=fraction),
            kind,
            size,
            theta=theta,
            partial=True,
        )
        for kind, theta, fraction in (
            ("full_attention", 500_000.0, fraction),
            ("sliding_attention", 10_000.0, 1.0),
        )
    )
    window = fields.integer("sliding_window")
    heads = fields.per_layer("num_attention_heads_per_layer", num_layers) or [None] * num_layers
    layers = []
    for slides, num_heads in zip(sliding_layers(fields, lambda _: False), heads, strict=True):
        if num_heads is not None and (type(num_heads) is not int or num_heads < 1):
            raise fields.wrong(
                "num_attention_heads_per_layer", "a list of positive integers or null", heads
            )
        layers.append(
            LayerSpec(local if slides else full, window if slides else None, num_heads=num_heads)
        )
    spec = llama(
        fields,
        layers=tuple(layers),
        qk_norm="head",
        gates_attention=True,
        has_gate_projection=True,
        has_head_gates=gating != "per-element",
        output_gate="softplus",
    )
    experts = read_experts(
        fields,
        (256, 8, 512),
        scoring="sigmoid",
        scale=fields.positive("moe_routed_scaling_factor", 1.0),
        has_correction_bias=True,
        logit_softcap=fields.number("moe_router_logit_softcapping", 0.0),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", 512),
    )
    return with_experts(
        spec,
        experts,
        has_listed_experts(fields, lambda i: i > 0),
        tensor_names=(
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.mlp\.experts\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
    )


FAMILIES = (
    Family("AfmoeForCausalLM", "afmoe", _afmoe),
    Family("CwmForCausalLM", "cwm", _cwm),
    Family("FlintForCausalLM", "flint", _flint),
    Family("GraniteMoeSWAForCausalLM", "granitemoe_swa", _granite_moe_windows),
    Family("GraniteSWAForCausalLM", "granite_swa", _granite_dense_windows),
    Family("LagunaForCausalLM", "laguna", _laguna),
    Family("MapleForCausalLM", "maple", _maple),
    Family("MellumForCausalLM", "mellum", _mellum),
    Family("MiMoV2FlashForCausalLM", "mimo_v2_flash", _mimo_v2),
    Family("MiMoV2ForCausalLM", "mimo_v2", _mimo_v2_5),
)
