"""Inkling and Inkling 2, with four short convolutions in a layer, and biases of attention by query and distance."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.recurrent_config import (
    read_inner_convolutions,
    read_scaled_convolutions,
)
from ....layers.layer_spec import LayerSpec
from ....layers.rope import QueryScaling
from ....layers.shared_block import Restart
from ....layers.spec import ModelSpec
from ....layers.specs.attention_residuals import AttentionResidualsSpec, PassesSpec
from ....layers.specs.experts import SoftCaps
from ....layers.specs.norm_names import NormNames
from ....layers.specs.relative_biases import RelativeBiasSpec
from ....loaders.row_factors import RowFactors
from ..common import Family, base_spec
from ..experts import has_listed_experts, read_experts, with_experts
from ..looped import looped_layers

_NAMES = (
    (r"^(model\.)?mtp\..*", ""),
    (r"^model\.(audio|visual|audio_tower|vision_tower)\..*", ""),
    (r"^model\.llm\.unembed\.", "lm_head."),
    (r"(^|\.)embed\.weight$", r"\1embed_tokens.weight"),
    (r"(^|\.)embed_tokens\.embed_norm\.", r"\1embed_norm."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.(self_)?attn\.", ".self_attn."),
    (r"\.w([qkv])_d[uv]\.", r".\1_proj."),
    (r"\.wo_ud\.", ".o_proj."),
    (r"\.(wr_du|r_proj)\.", ".bias_proj."),
    (r"\.rel_logits_proj\.proj$", ".distance_profiles"),
    (r"_sconv\.(conv1d\.)?", "_conv."),
    (r"\.attn_conv\.", ".attention_conv."),
    (r"\.mlp\.w2_md\.", ".mlp.down_proj."),
    (r"\.mlp\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
)
_NAMES_OF_SECOND = (
    (r"(^|\.)attn_res\.mlp_queries\.(\d+)$", r"\1layers.\2.mlp_res_query"),
    (r"(^|\.)attn_res\.output_query$", r"\1head_res_query"),
    (r"\.q_l2_clip\.scale$", ".q_norm.weight"),
    (r"\.rel_l2_clip\.scale$", ".bias_norm.weight"),
    (r"\.attn_sink_proj\.", ".sink_proj."),
    (r"\.gate_attn\.", ".gate_proj."),
    (r"_sconv\.weight_proj$", "_conv_taps.weight"),
)
_NAMES_OF_LOOP = (
    (r"\bmiddle_cycle_cross_pass_(kv_)?queries$", r"message_\1queries"),
    (r"\.controllers\.(\w+)\.(\w+)_weight$", r".\1_message.\2.weight"),
)


def _inkling(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        num_attention_heads=64, num_key_value_heads=8, head_dim=128, hidden_act="silu"
    )
    if (dense_size := fields.optional_integer("dense_intermediate_size")) is not None:
        size = fields.integer("intermediate_size")
        fields = fields.with_values(
            {"moe_intermediate_size": size, "intermediate_size": dense_size}
        )
    head_dim, local_dim = fields.integer("head_dim"), fields.integer("swa_head_dim", 128)
    scaling = None
    if (floor := fields.optional_integer("log_scaling_n_floor")) is not None:
        scaling = QueryScaling(fields.number("log_scaling_alpha", 0.1), floor, 1, "log")
    full = LayerSpec(
        None,
        query_scaling=scaling,
        recurrent=read_inner_convolutions(fields, is_local=False),
    )
    local = LayerSpec(
        None,
        window=fields.integer("sliding_window_size", fields.integer("sliding_window", 512)),
        num_heads=fields.integer("swa_num_attention_heads", 64),
        num_kv_heads=fields.integer("swa_num_key_value_heads", 16),
        head_dim=local_dim,
        # Queries and keys are normed, so the divisor is not a square root.
        attention_scale=1 / local_dim,
        recurrent=read_inner_convolutions(fields, is_local=True),
    )
    spec = base_spec(
        fields,
        tuple(local if is_local else full for is_local in _are_local(fields, count)),
        attention_scale=1 / head_dim,
        tie_word_embeddings=False,
        qk_norm="head",
        has_embedding_norm=True,
        places_after_norm=True,
        num_unused_embeddings=fields.integer("num_unused_embeddings", 0, minimum=0),
        relative_biases=RelativeBiasSpec(
            fields.integer("d_rel", 16), fields.integer("rel_extent", 1024)
        ),
        logits_divisor=fields.positive("logits_mup_width_multiplier", 24.0),
        row_factors=(RowFactors(r"\.mlp\.down_proj\.weight$", ".mlp.global_scale"),),
    )
    num_experts = fields.integer("n_routed_experts", 256)
    num_shared = fields.integer("n_shared_experts", 2, minimum=0)
    experts = read_experts(
        fields,
        (num_experts, 6, 3072),
        scoring="sigmoid",
        renormalizes=True,
        scale=fields.positive("route_scale", 8.0),
        has_correction_bias=True,
        num_always=num_shared,
        has_stored_scale=True,
    )
    experts = replace(
        experts,
        num_experts=num_experts + num_shared,
        num_experts_per_token=experts.num_experts_per_token + num_shared,
    )
    first = fields.integer("dense_mlp_idx", 0, minimum=0)
    shared = tuple(
        (rf"\.shared_experts\.{i}\.", f".experts.{num_experts + i}.") for i in range(num_shared)
    )
    return with_experts(
        spec,
        experts,
        has_listed_experts(fields, lambda i: i >= first),
        tensor_names=(*_NAMES, *shared),
    )


def _inkling2(fields: ConfigFields) -> ModelSpec:
    count = fields.layer_count("num_hidden_layers")
    fields = fields.with_defaults(
        num_attention_heads=48,
        num_key_value_heads=8,
        head_dim=128,
        hidden_act="silu",
        moe_intermediate_size=2304,
        vocab_size=201_024,
    )
    fields = fields.with_defaults(intermediate_size=fields.integer("moe_intermediate_size"))
    fields.require("scoring_func", "sigmoid")
    local_dim = fields.integer("swa_head_dim", 128)
    full = LayerSpec(
        None,
        query_scaling=QueryScaling(
            fields.number("log_scaling_alpha", 0.1),
            fields.integer("log_scaling_n_floor", 128_000),
            1,
            "log",
        ),
        recurrent=read_scaled_convolutions(fields, is_local=False),
        norms=NormNames(attention_input=None),
        input_norms=("q_input_norm", "k_input_norm", "v_input_norm"),
    )
    local = LayerSpec(
        None,
        window=fields.integer("sliding_window_size", fields.integer("sliding_window", 1024)),
        num_heads=fields.integer("swa_num_attention_heads", 48),
        num_kv_heads=fields.integer("swa_num_key_value_heads", 8),
        head_dim=local_dim,
        attention_scale=local_dim**-0.5,
        recurrent=read_scaled_convolutions(fields, is_local=True),
    )
    spec = base_spec(
        fields,
        tuple(local if is_local else full for is_local in _are_local(fields, count)),
        attention_scale=fields.integer("head_dim") ** -0.5,
        tie_word_embeddings=False,
        qk_norm="bounded",
        head_bound=fields.positive("qk_l2_clip_threshold", 512**0.5),
        has_value_norm=True,
        has_embedding_norm=True,
        places_after_norm=True,
        num_unused_embeddings=fields.integer("num_unused_embeddings", 0, minimum=0),
        relative_biases=RelativeBiasSpec(
            fields.integer("d_rel", 16),
            fields.integer("rel_extent", 1024),
            fields.positive("rel_l2_clip_threshold", 8.0),
        ),
        projects_sinks=True,
        gates_attention=True,
        has_gate_projection=True,
        soft_caps=SoftCaps(
            fields.positive("mlp_gate_softcap", 4.0), fields.positive("mlp_up_softcap", 25.0)
        ),
        final_softcap=fields.positive("final_logit_softcapping", 30.0),
        attention_residuals=AttentionResidualsSpec.for_layers(
            count, fields.integer("n_layers_per_attn_res_block", 6), 1e-6, norms_values=True
        ),
    )
    experts = read_experts(
        fields,
        (384, 8),
        scoring="sigmoid",
        renormalizes=True,
        scale=fields.positive("route_scale", 8.0),
        has_correction_bias=True,
    )
    # The first layer has no query, so the queries of others are numbered from the second one on.
    queries = tuple(
        (rf"(^|\.)attn_res\.attn_queries\.{i}$", rf"\1layers.{i + 1}.attn_res_query")
        for i in range(count - 1)
    )
    return with_experts(spec, experts, tensor_names=(*queries, *_NAMES_OF_SECOND, *_NAMES))


def _inkling2_loop(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an Inkling-2-Mini, some of whose layers are computed several times, with messages."""
    fields = fields.with_defaults(
        num_hidden_layers=24,
        num_attention_heads=24,
        swa_num_attention_heads=24,
        hidden_size=2304,
        moe_intermediate_size=1152,
        n_routed_experts=128,
        log_scaling_n_floor=8192,
    )
    if (loop := fields.section("loop_config")) is not None:
        names = {
            "core_start": "loop_layer_index_start",
            "core_end": "loop_layer_index_end",
            "num_passes": "loop_num_passes",
            "gate_rank": "loop_gate_rank",
        }
        fields = fields.with_values(
            {own: loop.get(stored) for stored, own in names.items() if stored in loop.config}
        )
    spec = _inkling2(fields)
    residuals, count = spec.attention_residuals, len(spec.layers)
    assert residuals is not None, "the family has attention residuals"
    stop = fields.integer("loop_layer_index_end", 18, maximum=count)
    first = fields.integer("loop_layer_index_start", 6, maximum=stop - 1)
    for name, index in (("loop_layer_index_start", first), ("loop_layer_index_end", stop)):
        if index % residuals.group_size:
            needed = f"a multiple of n_layers_per_attn_res_block {residuals.group_size}"
            raise fields.wrong(name, needed, index)
    looped, num_passes = range(first, stop), fields.integer("loop_num_passes", 3)
    layers = (
        replace(layer, norms=NormNames(attention_input=None), input_norms=("input_layernorm",) * 3)
        if i in looped and not layer.input_norms
        else layer
        for i, layer in enumerate(spec.layers)
    )
    passes: list[tuple[range, Restart | None]] = [(range(first), None), (looped, None)]
    passes += [(looped, Restart(norms=False, copies_sums=True))] * (num_passes - 1)
    passes.append((range(stop, count), None))
    skipped = (num_passes - 1) * len(looped)
    rank = fields.integer("loop_gate_rank", 64)
    return replace(
        spec,
        layers=looped_layers(list(layers), passes),
        attention_residuals=replace(
            residuals, passes=PassesSpec(first, len(looped), num_passes, rank)
        ),
        tensor_names=(
            *_NAMES_OF_LOOP,
            *spec.tensor_names,
            *((rf"\blayers\.{i}\.", f"layers.@{i + skipped}.") for i in range(stop, count)),
            (r"\blayers\.@", "layers."),
        ),
    )


def _are_local(fields: ConfigFields, count: int) -> list[bool]:
    kinds = fields.per_layer("layer_types", count)
    if kinds is None:
        ids = fields.get("local_layer_ids")
        if ids is None:
            return [(i + 1) % 6 != 0 for i in range(count)]
        if not isinstance(ids, list):
            raise fields.wrong("local_layer_ids", "a list of layers", ids)
        return [i in ids for i in range(count)]
    for kind in kinds:
        if kind not in ("hybrid", "hybrid_sliding"):
            raise fields.wrong("layer_types", "hybrid or hybrid_sliding for each layer", kind)
    return [kind == "hybrid_sliding" for kind in kinds]


FAMILIES = (
    Family("Inkling2ForCausalLM", "inkling2_text", _inkling2),
    Family("Inkling2ForConditionalGeneration", "inkling2", _inkling2),
    Family("Inkling2LoopForCausalLM", "inkling2_loop_text", _inkling2_loop),
    Family("Inkling2LoopForConditionalGeneration", "inkling2_loop", _inkling2_loop),
    Family("InklingForCausalLM", "inkling_text", _inkling),
    Family("InklingForConditionalGeneration", "inkling_mm_model", _inkling),
)
