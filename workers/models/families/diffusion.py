"""Families that denoise blocks of tokens. Their layers are those of models that generate by tokens."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.spec import ModelSpec
from .common import Family
from .experts import qwen3_moe, read_experts, with_experts
from .gemma import gemma4
from .llama import llama, qwen2, qwen3
from .sigmoid_experts import ling2


def _llada2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LLaDA 2 (arXiv 2512.15745), whose layers are those of a Ling 2.

    With `expert_capacity`, the tokens of a block choose among the same experts, instead of the best groups.
    """
    spec = ling2(fields)
    capacity = fields.optional_integer("expert_capacity")
    if capacity is None:
        return spec
    num_experts, num_chosen = fields.integer("num_experts"), fields.integer("num_experts_per_tok")
    if not num_chosen <= capacity <= num_experts:
        raise fields.error(
            f"expert_capacity {capacity} must be between num_experts_per_tok, which is {num_chosen}, and "
            f"num_experts, which is {num_experts}"
        )
    layers = tuple(
        replace(
            layer,
            experts=replace(
                layer.experts,
                block_size=fields.integer("block_size", 32, minimum=1),
                num_experts_per_block=capacity,
                num_groups=1,
                renormalizes=num_chosen > 1,
            ),
        )
        if layer.experts is not None
        else layer
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


_LLADA_NAMES = (
    (r"(^|\.)transformer\.wte\.", r"\1embed_tokens."),
    (r"(^|\.)transformer\.ln_f\.", r"\1norm."),
    (r"^(model\.)?transformer\.ff_out\.", "lm_head."),
    (r"(^|\.)transformer\.blocks\.", r"\1layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ff_norm\.", ".post_attention_layernorm."),
    (r"(\.\d+)\.([qkv])_proj\.", r"\1.self_attn.\2_proj."),
    (r"\.attn_out\.", ".self_attn.o_proj."),
    (r"(\.\d+)\.ff_proj\.", r"\1.mlp.gate_proj."),
    (r"(\.\d+)\.up_proj\.", r"\1.mlp.up_proj."),
    (r"(\.\d+)\.ff_out\.", r"\1.mlp.down_proj."),
)


def _llada(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LLaDA (arXiv 2502.09992), a Llama whose config has the names of the first OLMo."""
    fields.require_all(
        block_type="llama",
        layer_norm_type="rms",
        activation_type="silu",
        alibi=False,
        rope=True,
        attention_layer_norm=False,
        input_emb_norm=False,
        scale_logits=False,
        clip_qkv=None,
    )
    has_biases = fields.boolean("include_bias", False)
    return llama(
        fields.with_defaults(rms_norm_eps=1e-5, rope_theta=500_000.0),
        mlp_bias=has_biases,
        qkv_bias=has_biases or fields.boolean("include_qkv_bias", False),
        attention_output_bias=has_biases,
        tensor_names=_LLADA_NAMES,
    )


def _llada_moe(fields: ConfigFields) -> ModelSpec:
    fields.require_all(
        qk_layernorm=True,
        moe_router_score_function="softmax",
        moe_router_enable_expert_bias=False,
        clip_qkv=None,
    )
    if shared := fields.integer("shared_expert_intermediate_size", 0, minimum=0):
        raise fields.wrong("shared_expert_intermediate_size", "0", shared)
    experts = read_experts(
        fields,
        (64, 8),
        intermediate_size="expert_intermediate_size",
        renormalizes=fields.boolean("norm_topk_prob", False),
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    fields = fields.with_defaults(
        intermediate_size=fields.integer("dense_intermediate_size", 8192),
        rms_norm_eps=1e-5,
        rope_theta=50_000.0,
    )
    sparse = fields.per_layer("moe_layer_freq", fields.layer_count("num_hidden_layers"))
    return with_experts(
        llama(fields, qk_norm="head"), experts, lambda i: sparse is None or bool(sparse[i])
    )


def _diffusion_gemma(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a DiffusionGemma, a Gemma 4 with experts whose tokens in canvases attend to each other.

    A context encoder and a decoder of canvases share all weights but the scales of layers.
    """
    spec = gemma4(
        fields.with_defaults(final_logit_softcapping=30.0).with_values(
            {
                "enable_moe_block": True,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "use_double_wide_mlp": False,
            }
        )
    )
    size = fields.optional_integer("self_conditioning_size") or fields.integer("intermediate_size")
    encoder = r"\.encoder\.language_model\."
    return replace(
        spec,
        self_conditioning_size=size,
        unit_norms=(*spec.unit_norms, "post_norm"),
        tensor_names=(
            (rf"{encoder}(layers\.\d+)\.layer_scalar$", r".decoder.\1.scale_before_canvas"),
            (rf".*{encoder}.*", ""),
            *spec.tensor_names,
        ),
    )


FAMILIES = (
    Family("DiffusionGemmaForBlockDiffusion", "diffusion_gemma", _diffusion_gemma),
    Family("DreamModel", "Dream", qwen2),
    Family("LLaDA2MoeModelLM", "llada2_moe", _llada2),
    Family("LLaDAModelLM", "llada", _llada),
    Family("LLaDAMoEModelLM", "llada_moe", _llada_moe),
    Family("RND1LM", "rnd1", qwen3_moe),
    Family("SDARForCausalLM", "sdar", qwen3),
    Family("SDARMoeForCausalLM", "sdar_moe", qwen3_moe),
)
