"""Families with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.model_dimensions import EXPERT_COUNTS
from ...layers.layer_spec import LayerSpec
from ...layers.read_rope import read_rope
from ...layers.rope import QueryScaling
from ...layers.spec import ModelSpec
from ...layers.specs.experts import ExpertsSpec
from ...layers.window import Chunk
from ...loaders.tensor_names import TensorNames
from .common import (
    Family,
    attention_biases,
    base_spec,
    head_dim,
    read_layer_numbers,
    require_usual_swiglu,
    uniform_layers,
    windowed_layers,
)
from .llama import WITHOUT_TALKER, granite, interleaved_axes, llama, olmo2, qwen_layers, with_axes
from .llama_variants import GLM_AXES, ernie4_5, hunyuan

MIXTRAL_NAMES = (
    (r"\.block_sparse_moe\.e_score", ".mlp.gate.e_score"),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.mlp\.e_score", ".mlp.gate.e_score"),
    (r"(\.experts\.\d+)\.w1\.", r"\1.gate_proj."),
    (r"(\.experts\.\d+)\.w3\.", r"\1.up_proj."),
    (r"(\.experts\.\d+)\.w2\.", r"\1.down_proj."),
)
SHARED_EXPERT_NAMES = ((r"\.shared_expert\.", ".shared_experts."),)
GRANITE_NAMES = (
    (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
    (r"\.block_sparse_moe\.(\d+)\.input_linear\.", r".mlp.experts.\1.gate_up_proj."),
    (r"\.block_sparse_moe\.(\d+)\.output_linear\.", r".mlp.experts.\1.down_proj."),
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
)


_CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk")


def with_experts(
    spec: ModelSpec,
    experts: ExpertsSpec,
    has_experts: Callable[[int], bool] = lambda _: True,
    **differences: Any,
) -> ModelSpec:
    """Return the spec with experts in those layers whose index `has_experts` accepts."""
    layers = tuple(
        replace(layer, experts=experts) if has_experts(i) else layer
        for i, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers, **differences)


def read_experts(
    fields: ConfigFields,
    defaults: tuple[int | None, ...] = (),
    *,
    intermediate_size: str = "moe_intermediate_size",
    **differences: Any,
) -> ExpertsSpec:
    """Return the description of the experts, by the field names of most families.

    Args:
        fields: The model's config.
        defaults: The number of experts, the number that a token chooses, and the size of an expert, if the config does
            not have them.
        intermediate_size: The name of the field with the size of an expert.
        differences: Further fields of the description.

    Raises:
        CheckpointError: A number is missing, or a token would choose more experts than there are.
    """
    num_experts, num_chosen, size = (*defaults, None, None, None)[:3]
    count = fields.integer(_first_of(fields, EXPERT_COUNTS), num_experts)
    num_chosen = fields.integer(_first_of(fields, _CHOSEN), num_chosen, maximum=count)
    return ExpertsSpec(count, num_chosen, fields.integer(intermediate_size, size), **differences)


def _first_of(fields: ConfigFields, names: Sequence[str]) -> str:
    return next((name for name in names if fields.get(name) is not None), names[0])


def first_dense(fields: ConfigFields, default: int) -> Callable[[int], bool]:
    """Return a function that says whether a layer has experts: all layers except the first ones.

    The config has the number of the first ones; `default` is the usual number.
    """
    first = fields.integer("first_k_dense_replace", default, minimum=0)
    return lambda i: i >= first


def has_sparse_step(fields: ConfigFields) -> Callable[[int], bool]:
    """Return a function that says whether a layer has experts, by `decoder_sparse_step` and `mlp_only_layers`."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", [])
    return lambda i: i not in dense and (i + 1) % step == 0


def has_listed_experts(
    fields: ConfigFields, default: Callable[[int], bool]
) -> Callable[[int], bool]:
    """Return a function that says whether a layer has experts, by `mlp_layer_types`; else `default` is used."""
    kinds = fields.per_layer("mlp_layer_types", fields.layer_count("num_hidden_layers"))
    return default if kinds is None else lambda i: kinds[i] == "sparse"


def _mixtral(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    experts = read_experts(fields, (8, 2), intermediate_size="intermediate_size")
    rope = read_rope(fields, head_dim(fields), theta=1_000_000.0)
    layers = uniform_layers(fields, rope, fields.optional_integer("sliding_window"))
    return with_experts(base_spec(fields, layers), experts, tensor_names=MIXTRAL_NAMES)


def _minimax_m2(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(head_dim=128)
    rotary_dim = fields.integer("rotary_dim", head_dim(fields))
    fields = fields.with_defaults(partial_rotary_factor=rotary_dim / head_dim(fields))
    experts = read_experts(
        fields,
        (256, 8),
        intermediate_size="intermediate_size",
        scoring="sigmoid",
        has_correction_bias=True,
    )
    rope = read_rope(fields, head_dim(fields), theta=5_000_000.0, partial=True)
    spec = base_spec(fields, uniform_layers(fields, rope), qk_norm="full")
    return with_experts(spec, experts, tensor_names=MIXTRAL_NAMES)


def _qwen2_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    )
    experts = read_experts(
        fields,
        (60, 4),
        renormalizes=fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=fields.integer("shared_expert_intermediate_size", minimum=0),
        has_shared_gate=True,
    )
    last = fields.integer("max_window_layers", 28, minimum=0)
    layers = qwen_layers(fields, lambda i: i % 2 == 0 and i < last)
    spec = base_spec(fields, layers, qkv_bias=fields.boolean("qkv_bias", True))
    return with_experts(spec, experts, has_sparse_step(fields), tensor_names=SHARED_EXPERT_NAMES)


def qwen3_moe(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Qwen 3 with experts."""
    fields = fields.with_defaults(moe_intermediate_size=768, num_key_value_heads=4)
    experts = read_experts(fields, (128, 8), renormalizes=fields.boolean("norm_topk_prob", False))
    layers = qwen_layers(fields, lambda _: True)
    spec = base_spec(fields, layers, qk_norm="head", **attention_biases(fields))
    return with_experts(spec, experts, has_sparse_step(fields))


def _qwen3_vl_moe(fields: ConfigFields) -> ModelSpec:
    # The weights of the chosen experts always sum to 1, whatever the config says.
    fields = fields.with_values({"norm_topk_prob": True})
    return qwen3_moe(interleaved_axes(fields.with_defaults(num_key_value_heads=16)))


def _qwen3_omni(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"norm_topk_prob": True})
    spec = qwen3_moe(interleaved_axes(fields))
    return replace(spec, tensor_names=WITHOUT_TALKER)


def deepseek(fields: ConfigFields) -> ModelSpec:
    """Return the spec of DeepSeek-MoE, or of a dense DeepSeek LLM with the same configuration class."""
    spec = llama(fields)
    if fields.get(_first_of(fields, EXPERT_COUNTS)) is None:
        return spec
    size = fields.integer("moe_intermediate_size", 1407)
    if (scoring := fields.text("scoring_func", "softmax")) != "softmax":
        raise fields.wrong("scoring_func", "'softmax' for this family", scoring)
    experts = read_experts(
        fields,
        (None, None, size),
        renormalizes=fields.boolean("norm_topk_prob", False),
        shared_intermediate_size=size * fields.integer("n_shared_experts", 0, minimum=0),
    )
    first, interval = first_dense(fields, 0), fields.integer("moe_layer_freq", 1)
    return with_experts(spec, experts, lambda i: first(i) and i % interval == 0)


def _olmoe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    experts = read_experts(
        fields,
        (64, 8),
        intermediate_size="intermediate_size",
        renormalizes=fields.boolean("norm_topk_prob", False),
    )
    clip = fields.optional_positive("clip_qkv")
    return with_experts(llama(fields, qk_norm="full", qkv_clip=clip), experts)


def _flex_olmo(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(rms_norm_eps=1e-6, rope_theta=500_000.0)
    experts = read_experts(
        fields,
        (7, 5),
        intermediate_size="intermediate_size",
        renormalizes=fields.boolean("norm_topk_prob", False),
    )
    return with_experts(olmo2(fields), experts)


def granite_experts(fields: ConfigFields) -> ExpertsSpec:
    """Return the experts of a Granite model. It has shared experts if the config has a size for them."""
    return read_experts(
        fields,
        (8, 2),
        intermediate_size="intermediate_size",
        shared_intermediate_size=fields.integer("shared_intermediate_size", 0, minimum=0),
    )


def _granite_moe(fields: ConfigFields) -> ModelSpec:
    return with_experts(granite(fields), granite_experts(fields), tensor_names=GRANITE_NAMES)


def deepseek_experts(fields: ConfigFields) -> ExpertsSpec:
    """Return the experts of DeepSeek-V3, whose form several families have adopted."""
    size = fields.integer("moe_intermediate_size")
    return read_experts(
        fields,
        (128, 8),
        scoring="sigmoid",
        renormalizes=fields.boolean("norm_topk_prob", True),
        scale=fields.positive("routed_scaling_factor", 1.0),
        num_groups=fields.integer("n_group", 1),
        num_groups_per_token=fields.integer("topk_group", 1),
        group_score="best two",
        has_correction_bias=True,
        shared_intermediate_size=size * fields.integer("n_shared_experts", 0, minimum=0),
    )


def _glm4_moe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(n_shared_experts=1, rms_norm_eps=1e-5)
    rope = read_rope(
        fields.with_defaults(partial_rotary_factor=0.5), head_dim(fields), partial=True
    )
    spec = base_spec(
        fields,
        uniform_layers(fields, rope),
        qkv_bias=fields.boolean("attention_bias", False),
        qk_norm="head" if fields.boolean("use_qk_norm", False) else None,
    )
    return with_experts(
        spec,
        deepseek_experts(fields),
        first_dense(fields, 1),
        tensor_names=unused_layers(fields),
    )


def _glm4_moe_images(fields: ConfigFields) -> ModelSpec:
    fields = with_axes(fields, GLM_AXES)
    return _glm4_moe(fields.with_defaults(attention_bias=True))


def unused_layers(fields: ConfigFields) -> TensorNames:
    """Return a tensor-name translation that drops the layers after the last, which are for multi-token prediction."""
    first = fields.layer_count("num_hidden_layers")
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    count = fields.integer(_first_of(fields, names), 0, minimum=0)
    unused = "|".join(str(i) for i in range(first, first + count))
    return ((rf".*\.layers\.({unused})\..*", ""),) if unused else ()


def _dots1(fields: ConfigFields) -> ModelSpec:
    spec = base_spec(fields, _dots1_layers(fields), qk_norm="head", **attention_biases(fields))
    experts = replace(
        deepseek_experts(fields), renormalizes=fields.boolean("norm_topk_prob", False)
    )
    return with_experts(spec, experts, first_dense(fields, 0))


def _dots1_layers(fields: ConfigFields) -> Any:
    return qwen_layers(
        fields.with_defaults(
            use_sliding_window=fields.get("layer_types") is not None, max_window_layers=62
        )
    )


def gpt_oss(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a gpt-oss."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
    if fields.get("rope_scaling") is None:
        fields = fields.with_defaults(rope_parameters=yarn)
    require_usual_swiglu(fields)
    fields = fields.with_defaults(head_dim=64, rms_norm_eps=1e-5, attention_bias=True)
    rope = read_rope(fields, head_dim(fields), theta=150_000.0)
    layers = windowed_layers(fields, lambda i: i % 2 == 0, rope, rope, window=128)
    spec = base_spec(
        fields.with_values({"hidden_act": "silu"}),
        layers,
        activation="clamped_swiglu",
        has_sinks=True,
        **attention_biases(fields),
    )
    experts = read_experts(
        fields,
        (128, 4),
        intermediate_size="intermediate_size",
        has_router_bias=True,
        has_biases=True,
    )
    return with_experts(spec, experts, tensor_names=((r"\.mlp\.router\.", ".mlp.gate."),))


def ernie4_5_moe(fields: ConfigFields, **differences: Any) -> ModelSpec:
    """Return the spec of ERNIE 4.5 with experts; `differences` are those of the experts."""
    if fields.number("moe_norm_min", 1e-12) > 1e-6:
        # The sum of the chosen scores is never smaller.
        raise fields.wrong("moe_norm_min", "at most 1e-06", fields.get("moe_norm_min"))
    size = fields.integer("moe_intermediate_size", 1536)
    num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    experts = read_experts(
        fields,
        (64, 6, size),
        has_correction_bias=True,
        shared_intermediate_size=size * num_shared,
        **differences,
    )
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    last = fields.get("moe_layer_end_index", -1)
    interval = fields.integer("moe_layer_interval", 1)

    def has_experts(layer: int) -> bool:
        is_within = first <= layer and (last == -1 or layer <= last)
        return is_within and (layer + 1) % interval == 0

    names = ((r"(\.gate)?\.moe_statics\.e_score", ".gate.e_score"), (r"^(model\.)?mtp_.*", ""))
    fields = fields.with_defaults(head_dim=head_dim(fields))
    has_biases = fields.boolean("use_bias", False)
    return with_experts(
        ernie4_5(fields),
        experts,
        has_listed_experts(fields, has_experts),
        tensor_names=names,
        head_bias=has_biases,
    )


def _hunyuan_moe(fields: ConfigFields) -> ModelSpec:
    size = fields.integer("intermediate_size")
    experts = read_experts(
        fields,
        (None, 1),
        intermediate_size="intermediate_size",
        shared_intermediate_size=size * fields.integer("num_shared_expert", 1, minimum=0),
    )
    spec = hunyuan(fields)
    names = (
        *spec.tensor_names,
        (r"\.mlp\.gate\.wg\.", ".mlp.gate."),
        (r"\.shared_mlp\.", ".shared_experts."),
    )
    return with_experts(spec, experts, tensor_names=names)


def _phimoe(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, rms_norm_eps=1e-5)
    rope = read_rope(fields, head_dim(fields), theta=1_000_000.0)
    spec = base_spec(
        fields,
        uniform_layers(fields, rope, fields.optional_integer("sliding_window")),
        norm_kind="layer",
        norm_bias=True,
        head_bias=fields.boolean("lm_head_bias", False),
        **attention_biases(fields),
    )
    # The sparse mixer is only defined for two experts per token.
    experts = read_experts(
        fields.with_values({"num_experts_per_tok": 2}),
        (16,),
        intermediate_size="intermediate_size",
        scoring="sparse mixer",
        mixer_noise=fields.number("router_jitter_noise", 0.01),
    )
    names = (*MIXTRAL_NAMES, (r"\.mlp\.router\.", ".mlp.gate."))
    return with_experts(spec, experts, tensor_names=names)


def _llama4(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-5, attention_chunk_size=8192
    )
    size = fields.integer("intermediate_size", 8192)
    rope = read_rope(fields, head_dim(fields), theta=500_000.0)
    count = fields.layer_count("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval", 4)
    rotates = fields.per_layer("no_rope_layers", count) if fields.get("no_rope_layers") else None
    if rotates is None:
        rotates = [(i + 1) % interval != 0 for i in range(count)]
    chunk = fields.optional_integer("attention_chunk_size")
    kinds = fields.per_layer("layer_types", count)
    if kinds is None:
        kinds = ["chunked_attention" if x else "full_attention" for x in rotates]
    scaling = None
    if fields.boolean("attn_temperature_tuning", True):
        scaling = QueryScaling(
            fields.positive("attn_scale", 0.1), fields.positive("floor_scale", 8192), offset=1
        )
    layers = tuple(
        LayerSpec(
            rope if has_rope else None,
            Chunk(chunk) if chunk and kind == "chunked_attention" else None,
            query_scaling=None if has_rope else scaling,
        )
        for has_rope, kind in zip(rotates, kinds, strict=True)
    )
    spec = base_spec(
        fields.with_values({"intermediate_size": fields.integer("intermediate_size_mlp", 16384)}),
        layers,
        qk_norm="unit" if fields.boolean("use_qk_norm", True) else None,
        rotates_before_norm=True,
        rope_order="interleaved",
        **attention_biases(fields),
    )
    experts = read_experts(
        fields.with_values({"intermediate_size": size}),
        (16, 1),
        intermediate_size="intermediate_size",
        scoring="sigmoid",
        renormalizes=False,
        scales_inputs=True,
        shared_intermediate_size=size,
    )
    step = fields.integer("interleave_moe_layer_step", 1)
    listed = read_layer_numbers(fields, "moe_layers")
    chosen = range(step - 1, count, step) if listed is None else listed
    names = (
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.shared_expert\.", ".mlp.shared_experts."),
        (r"\.feed_forward\.", ".mlp."),
    )
    return with_experts(spec, experts, lambda i: i in chosen, tensor_names=names)


FAMILIES = (
    Family("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", ernie4_5_moe),
    Family("Llama4ForCausalLM", "llama4_text", _llama4),
    Family("Llama4ForConditionalGeneration", "llama4", _llama4),
    Family("GptOssForCausalLM", "gpt_oss", gpt_oss),
    Family("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _hunyuan_moe),
    Family("PhiMoEForCausalLM", "phimoe", _phimoe),
    Family("PhimoeForCausalLM", "phimoe", _phimoe),
    Family("FlexOlmoForCausalLM", "flex_olmo", _flex_olmo),
    Family("DeepseekForCausalLM", "deepseek", deepseek),
    Family("Dots1ForCausalLM", "dots1", _dots1),
    Family("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe),
    Family("Glm4vMoeForConditionalGeneration", "glm4v_moe", _glm4_moe_images),
    Family("GraniteMoeForCausalLM", "granitemoe", _granite_moe),
    Family("GraniteMoeSharedForCausalLM", "granitemoeshared", _granite_moe),
    Family("MiniMaxM2ForCausalLM", "minimax_m2", _minimax_m2),
    Family("MixtralForCausalLM", "mixtral", _mixtral),
    Family("OlmoeForCausalLM", "olmoe", _olmoe),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", _qwen2_moe),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", qwen3_moe),
    Family("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe", _qwen3_omni),
    Family("Qwen3OmniMoeThinkerForConditionalGeneration", "qwen3_omni_moe_thinker", _qwen3_omni),
    Family("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe", _qwen3_vl_moe),
)
