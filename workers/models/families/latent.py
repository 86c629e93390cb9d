"""Families with multi-head latent attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec, GateLimit
from ...layers.specs.hyper import HyperConnectionsSpec
from ...layers.specs.latent import IndexerSpec, LatentSpec
from ...layers.specs.norm_gate import NormGateSpec
from ...layers.specs.norm_names import NormNames
from .common import Family, attention_biases, base_spec, uniform_layers, with_limits
from .experts import (
    deepseek_experts,
    first_dense,
    has_listed_experts,
    read_experts,
    unused_layers,
    with_experts,
)
from .llama import interleaved_axes, llama4_scaling

_PANGU_FIELDS = {
    "q_lora_rank": "attention_q_lora_dim",
    "kv_lora_rank": "attention_kv_lora_dim",
    "qk_nope_head_dim": "attention_qk_dim",
    "qk_rope_head_dim": "attention_qk_rope_dim",
    "v_head_dim": "attention_v_dim",
    "n_routed_experts": "num_routed_experts",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "num_dense_layers",
}
"""The names that the first configs of openPangu Ultra have for fields of DeepSeek-V3."""


def latent_spec(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of a model with latent attention, changed by `differences`; by default all layers are equal."""
    layers = differences.pop("layers", None)
    rotates = layers is None or any(layer.rope for layer in layers)
    latent = LatentSpec(
        fields.optional_integer("q_lora_rank"),
        fields.integer("kv_lora_rank"),
        fields.integer("qk_nope_head_dim"),
        fields.integer("qk_rope_head_dim", minimum=int(rotates)),
        fields.integer("v_head_dim"),
    )
    if layers is None:
        layers = uniform_layers(fields, read_rope(fields, latent.rotary_dim))
    return base_spec(
        fields,
        layers,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.kv_rank + latent.rotary_dim,
        attention_scale=(latent.plain_dim + latent.rotary_dim) ** -0.5 * _scale_for_length(fields),
        **attention_biases(fields),
        **differences,
    )


def _scale_for_length(fields: ConfigFields) -> float:
    """Return the additional factor on attention scores for models whose context was extended by YaRN."""
    rope = fields.first_section("rope_scaling", "rope_parameters")
    weight = rope.number("mscale_all_dim", 0.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not weight or kind == "default":
        return 1.0
    factor = rope.positive("factor")
    return 1.0 if factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2


def deepseek_v2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of DeepSeek-V2."""
    fields = fields.with_defaults(q_lora_rank=1536)
    is_grouped = fields.text("topk_method", "greedy") == "group_limited_greedy"
    size = fields.integer("moe_intermediate_size", 1407)
    experts = read_experts(
        fields,
        (64, None, size),
        # Transformers ignores the field in this family.
        renormalizes=fields.get("transformers_version") is None
        and fields.boolean("norm_topk_prob", False),
        scale=fields.positive("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1) if is_grouped else 1,
        num_groups_per_token=fields.integer("topk_group", 1) if is_grouped else 1,
        shared_intermediate_size=size * fields.integer("n_shared_experts", 2, minimum=0),
    )
    spec = latent_spec(fields, rope_order="interleaved", mlp_bias=fields.boolean("mlp_bias", False))
    return with_experts(spec, experts, first_dense(fields, 0))


def deepseek_v3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of DeepSeek-V3."""
    fields = fields.with_defaults(
        q_lora_rank=1536,
        n_routed_experts=256,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )
    return _with_sigmoid_experts(fields, first_dense(fields, 3))


def _with_sigmoid_experts(fields: ConfigFields, has_experts: Callable[[int], bool]) -> ModelSpec:
    """Return the spec of DeepSeek-V3, with experts in the layers that `has_experts` accepts."""
    is_interleaved = fields.boolean("rope_interleave", True)
    spec = latent_spec(fields, rope_order="interleaved" if is_interleaved else "half")
    return with_experts(
        spec, deepseek_experts(fields), has_experts, tensor_names=unused_layers(fields)
    )


def _glm4_moe_lite(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        n_routed_experts=64,
        n_shared_experts=1,
        num_experts_per_tok=4,
        routed_scaling_factor=1.8,
        moe_intermediate_size=1536,
    )
    return _with_sigmoid_experts(fields, has_listed_experts(fields, first_dense(fields, 1)))


def _sparse_latent(fields: ConfigFields) -> ModelSpec:
    """Return the spec of DeepSeek-V3.2 or GLM-5.

    GLM-5's indexers rotate pairs of neighboring elements, and some of its layers have no indexer.
    """
    kind = fields.text("model_type")
    is_glm = kind == "glm_moe_dsa"
    fields = fields.with_defaults(
        rms_norm_eps=1e-5 if is_glm else 1e-6,
        n_group=8 if kind == "deepseek_v32" else 1,
        topk_group=4 if kind == "deepseek_v32" else 1,
        n_shared_experts=1,
        routed_scaling_factor=2.5,
    )
    has_experts = has_listed_experts(fields, first_dense(fields, 3))
    spec = _with_sigmoid_experts(fields, has_experts)
    latent = spec.latent
    assert latent is not None, "these families have latent attention"
    if latent.query_rank is None:
        raise fields.error("q_lora_rank is missing, but index queries are computed from its vector")
    indexer = IndexerSpec(
        fields.integer("index_n_heads", 32 if is_glm else 64),
        fields.integer("index_head_dim", 128),
        fields.integer("index_topk", 2048),
        "interleaved" if is_glm else "half",
    )
    if indexer.head_dim < latent.rotary_dim:
        raise fields.error(
            f"index_head_dim {indexer.head_dim} must be at least qk_rope_head_dim {latent.rotary_dim}"
        )
    return replace(
        spec,
        latent=replace(latent, indexer=indexer),
        head_dim=spec.head_dim + indexer.head_dim,
        layers=with_indexers(fields, spec.layers),
    )


def _hy4(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Hy4. Its weights are for rotations of neighboring elements, unlike those of transformers."""
    # Routed experts always use SiLU, other layers this function.
    fields.require("hidden_act", "silu")
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        first_k_dense_replace=1,
        n_routed_experts=256,
        index_n_heads=16,
        routed_scaling_factor=2.827,
        index_topk_freq=4,
    )
    spec = _sparse_latent(fields)
    latent, limit = spec.latent, fields.number("swiglu_limit", 10.0)
    assert latent is not None and latent.indexer is not None
    indexer = replace(
        latent.indexer,
        rotates_last=True,
        norm_eps=spec.norm_eps,
        rope_order="interleaved" if fields.boolean("indexer_rope_interleave", True) else "half",
    )
    gate_limit = GateLimit(limit) if limit > 0 else None
    return replace(
        with_limits(spec, [gate_limit] * count, [None] * count),
        latent=replace(latent, indexer=indexer, norm_eps=spec.norm_eps),
        has_sinks=True,
        gates_attention=True,
        has_gate_projection=True,
        hyper_connections=HyperConnectionsSpec(
            fields.integer("hc_mult", 4),
            fields.number("hc_magnitude", 2.0),
            fields.number("hc_eps", 1e-6),
        ),
        tensor_names=(
            *spec.tensor_names,
            (r"\.hc_pre\.hc_(head|attn|mlp)(_layer)?\.hc_(head_)?", r".\1_hc."),
            (r"\.hc_head\.(hc_pre\.)?hc_(head_)?", ".head_hc."),
            (r"\.ffn_hc\.", ".mlp_hc."),
            (r"\.learnable_sink_param$", ".sinks"),
            (r"\.linear_gate\.", ".gate_proj."),
            (r"^(model\.)?mtp_layers\..*", ""),
        ),
    )


def _hy4_vl(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of Hy4-VL."""
    return _hy4(interleaved_axes(fields.with_defaults(index_n_heads=32), (12, 10, 10)))


def _axk2(fields: ConfigFields) -> ModelSpec:
    interval, first = fields.integer("moe_layer_freq", 1), first_dense(fields, 1)
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_values({"indexer_types": ["full"] * count, "rope_interleave": True})
    if fields.get("mlp_layer_types") is None:
        kinds = ["sparse" if first(i) and i % interval == 0 else "dense" for i in range(count)]
        fields = fields.with_values({"mlp_layer_types": kinds})
    spec = _sparse_latent(fields.with_defaults(index_n_heads=16))
    assert spec.latent is not None
    # Only norms before experts have gates, and they have another name here.
    gated = replace(spec.norms, mlp_input="post_attention_gatednorm")
    layers = tuple(
        replace(layer, norms=gated) if layer.experts is not None else layer for layer in spec.layers
    )
    module = r"\.(input_layer|post_attention_gated)norm\."
    return replace(
        spec,
        layers=layers,
        latent=replace(spec.latent, joins_query_vectors=True),
        gates_attention=True,
        norm_gate=NormGateSpec(
            ("input_layernorm", "post_attention_gatednorm"), fields.integer("gated_norm_rank", 16)
        ),
        tensor_names=(
            *spec.tensor_names,
            (r"\.post_attention_layernorm\.(\w+\.\w)", r".post_attention_gatednorm.\1"),
            (rf"{module}norm\.", r".\1norm."),
            (rf"{module}(W_down|mlp\.fc1)\.", r".\1norm.gate.down."),
            (rf"{module}(W_up|mlp\.fc2)\.", r".\1norm.gate.up."),
            (r"\.q_gate_proj\.", ".q_b_proj."),
        ),
    )


def with_indexers(fields: ConfigFields, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers with indexers. Layers whose type is "full" choose keys; the others reuse that choice.

    Only layers with attention have a type that matters.
    """
    kinds = fields.per_layer("indexer_types", len(layers))
    if kinds is None and (pattern := fields.get("index_topk_pattern")) is not None:
        letters = {"F": "full", "S": "shared"}
        kinds = [letters.get(kind, kind) for kind in pattern]
    if kinds is None:
        period, offset = (
            fields.integer("index_topk_freq", 1),
            fields.integer("index_skip_topk_offset", 2, minimum=0),
        )
        kinds = [
            "shared" if max(i - offset + 1, 0) % period else "full" for i in range(len(layers))
        ]
    first = next(i for i, layer in enumerate(layers) if layer.attends)
    is_known = len(kinds) == len(layers) and {"full", "shared"}.issuperset(kinds)
    if not is_known or kinds[first] != "full":
        raise fields.error(
            f"indexer_types must be full or shared for each of {len(layers)} layers and full for layer {first}, the "
            f"first with attention, got {kinds!r}"
        )
    return tuple(
        replace(layer, chooses_keys=layer.attends and kind == "full")
        for layer, kind in zip(layers, kinds, strict=True)
    )


def _axk1(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        q_lora_rank=1536,
        n_routed_experts=192,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
    )
    interval, first = fields.integer("moe_layer_freq", 1), first_dense(fields, 1)
    has_experts = has_listed_experts(fields, lambda i: first(i) and i % interval == 0)
    spec = _with_sigmoid_experts(fields, has_experts)
    norms = replace(spec.norms, mlp_output="post_mlp_layernorm")
    layers = tuple(
        replace(layer, norms=norms) if layer.experts is not None else layer for layer in spec.layers
    )
    names = ((r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),)
    return replace(spec, layers=layers, tensor_names=(*names, *spec.tensor_names))


def _pangu_ultra(fields: ConfigFields) -> ModelSpec:
    # Sinks are in another attention than the latent one.
    fields.require("param_sink_number", 0)
    others = {name: fields.get(other) for name, other in _PANGU_FIELDS.items()}
    fields = fields.with_defaults(**others, rms_norm_eps=1e-5, rope_theta=25_600_000.0)
    spec = _with_sigmoid_experts(
        fields.with_values({"rope_interleave": True}), first_dense(fields, 3)
    )
    norms = spec.norms
    if fields.boolean("sandwich_norm", False):
        norms = NormNames(
            attention_output="post_attention_layernorm",
            mlp_input="pre_mlp_layernorm",
            mlp_output="post_mlp_layernorm",
        )
    has_biases = fields.boolean("router_enable_expert_bias", False)

    def changed(experts: ExpertsSpec) -> ExpertsSpec:
        return replace(
            experts, has_correction_bias=has_biases, num_groups=1, num_groups_per_token=1
        )

    layers = tuple(
        replace(layer, norms=norms, experts=layer.experts and changed(layer.experts))
        for layer in spec.layers
    )
    bias = r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"
    return replace(spec, norms=norms, layers=layers, tensor_names=(*spec.tensor_names, bias))


def _mistral4(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        q_lora_rank=1024,
        n_shared_experts=1,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
        if fields.get("rope_scaling") is None
        else None,
    )
    fields = fields.with_defaults(moe_intermediate_size=2048)
    experts = mistral_experts(fields, renormalizes=fields.boolean("norm_topk_prob", True))
    is_interleaved = fields.boolean("rope_interleave", True)
    rope = read_rope(fields, fields.integer("qk_rope_head_dim"))
    spec = latent_spec(
        fields,
        layers=uniform_layers(fields, rope, query_scaling=llama4_scaling(fields)),
        rope_order="interleaved" if is_interleaved else "half",
    )
    return with_experts(spec, experts, first_dense(fields, 0), tensor_names=unused_layers(fields))


def mistral_experts(fields: ConfigFields, *, renormalizes: bool) -> ExpertsSpec:
    """Return the experts of Mistral's models with latent attention."""
    size = fields.integer("moe_intermediate_size")
    return read_experts(
        fields,
        (128, 4),
        renormalizes=renormalizes,
        scale=fields.positive("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        num_groups_per_token=fields.integer("topk_group", 1),
        group_score="best two",
        shared_intermediate_size=size * fields.integer("n_shared_experts", minimum=0),
    )


def _sarvam_mla(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(n_shared_experts=1, routed_scaling_factor=2.5)
    return _with_sigmoid_experts(fields, first_dense(fields, 1))


def _youtu(fields: ConfigFields) -> ModelSpec:
    is_interleaved = fields.boolean("rope_interleave", True)
    return latent_spec(
        fields.with_defaults(tie_word_embeddings=True, q_lora_rank=1536),
        mlp_bias=fields.boolean("mlp_bias", False),
        rope_order="interleaved" if is_interleaved else "half",
    )


def _minicpm3(fields: ConfigFields) -> ModelSpec:
    hidden_size = fields.integer("hidden_size")
    fields = fields.with_defaults(
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        q_lora_rank=768,
        scale_depth=1.4,
        dim_model_base=256,
    )
    size = fields.integer("v_head_dim", hidden_size // fields.integer("num_attention_heads"))
    fields = fields.with_values({"v_head_dim": size})
    num_layers = fields.layer_count("num_hidden_layers")
    depth = fields.positive("scale_depth", num_layers**0.5)
    return latent_spec(
        fields,
        mlp_bias=fields.boolean("mlp_bias", False),
        embedding_scale=fields.positive("scale_emb", 12.0),
        residual_multiplier=depth / num_layers**0.5,
        logits_divisor=hidden_size / fields.integer("dim_model_base", hidden_size),
    )


def longcat(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a LongCat-Flash. Each of its layers has two attentions and MLPs, and is two layers here."""
    count = fields.layer_count("num_layers")
    hidden_size = fields.integer("hidden_size")
    size = fields.integer("expert_ffn_hidden_size", 2048)
    fields = fields.with_values(
        {
            "num_hidden_layers": 2 * count,
            "moe_intermediate_size": size,
            "intermediate_size": fields.integer("ffn_hidden_size", 12_288),
        }
    ).with_defaults(rms_norm_eps=1e-5, q_lora_rank=1536)
    experts = read_experts(
        fields,
        (512, 12),
        renormalizes=False,
        scale=fields.positive("routed_scaling_factor", 6.0),
        has_correction_bias=True,
        num_identities=fields.integer("zero_expert_num", 256, minimum=0),
        is_shortcut=True,
    )
    modules = "self_attn|mlps|input_layernorm|post_attention_layernorm"
    # The mark "@" keeps later rules from renaming what these have renamed.
    experts_names = tuple(
        (rf"\.layers\.{i}\.mlp\.", f".layers.@{2 * i}.shortcut.") for i in range(count)
    )
    names = tuple(
        (rf"\.layers\.{i}\.({modules})\.{j}\.", rf".layers.@{2 * i + j}.\1.")
        for i in range(count)
        for j in range(2)
    )
    rope = read_rope(fields, fields.integer("qk_rope_head_dim", 64), theta=10_000_000.0)
    spec = latent_spec(
        fields,
        layers=uniform_layers(fields, rope),
        rope_order="interleaved",
        tensor_names=(
            *experts_names,
            *names,
            (r"\.layers\.@", ".layers."),
            (r"\.mlps\.", ".mlp."),
            (r"\.shortcut\.router\.classifier\.bias$", ""),
            (r"\.shortcut\.router\.(classifier\.)?", ".shortcut.gate."),
            (r"^(model\.)?mtp\..*", ""),
        ),
    )
    latent = spec.latent
    assert latent is not None and latent.query_rank is not None
    return with_experts(
        spec,
        experts,
        lambda i: i % 2 == 0,
        latent=replace(latent, multiplier=(hidden_size / latent.kv_rank) ** 0.5),
        # The same factor for queries.
        attention_scale=spec.attention_scale * (hidden_size / latent.query_rank) ** 0.5,
    )


FAMILIES = (
    Family("AXK1ForCausalLM", "axk1", _axk1),
    Family("AXK2ForCausalLM", "axk2", _axk2),
    Family("DeepseekV2ForCausalLM", "deepseek_v2", deepseek_v2),
    Family("DeepseekV3ForCausalLM", "deepseek_v3", deepseek_v3),
    Family("DeepseekV32ForCausalLM", "deepseek_v32", _sparse_latent),
    Family("GlmMoeDsaForCausalLM", "glm_moe_dsa", _sparse_latent),
    Family("Glm4MoeLiteForCausalLM", "glm4_moe_lite", _glm4_moe_lite),
    Family("HYV4ForCausalLM", "hy_v4", _hy4),
    Family("HYV4VLForConditionalGeneration", "hy_v4_vl", _hy4_vl),
    Family("LongcatFlashForCausalLM", "longcat_flash", longcat),
    Family("MiniCPM3ForCausalLM", "minicpm3", _minicpm3),
    Family("Mistral4ForCausalLM", "mistral4", _mistral4),
    Family("PanguUltraMoEForCausalLM", "pangu_ultra_moe", _pangu_ultra),
    Family("SarvamMLAForCausalLM", "sarvam_mla", _sarvam_mla),
    Family("YoutuForCausalLM", "youtu", _youtu),
    Family("YoutuVLForConditionalGeneration", "youtu_vl", _youtu),
)
