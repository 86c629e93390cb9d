"""Families with Kimi delta attention in most layers, and latent attention in the others."""

from __future__ import annotations

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.read_rope import read_rope
from ...layers.spec import ModelSpec
from .common import Family, read_limits, with_limits
from .experts import (
    MIXTRAL_NAMES,
    deepseek_experts,
    first_dense,
    has_listed_experts,
    unused_layers,
    with_experts,
)
from .hybrid import layer_indices, mixed_layers
from .latent import latent_spec


def _kimi_linear(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        max_position_embeddings=fields.integer("model_max_length", 1_048_576),
        rms_norm_eps=1e-5,
        n_group=fields.integer("num_expert_group", 1),
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        num_experts_per_tok=fields.integer("num_experts_per_token", 8),
        norm_topk_prob=fields.boolean("moe_renormalize", True),
        routed_scaling_factor=2.446,
        moe_intermediate_size=1024,
        num_experts=256,
    )
    if not fields.boolean("mla_use_nope", True):
        raise fields.wrong("mla_use_nope", "true: latent attention has no rotation", False)
    own = fields.section("linear_attn_config")
    attending = None if own is None else layer_indices(own, "full_attn_layers")
    # This config numbers layers from 1.
    layers = mixed_layers(
        fields,
        None,
        lambda i: i + 1 in attending if attending is not None else i > 0 and i % 4 == 0,
        ("layer_types",),
    )
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(
        fields,
        layers=layers,
        # The same as in Nemotron-H.
        tie_word_embeddings=False,
        tensor_names=(
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            *MIXTRAL_NAMES,
        ),
    )
    has_experts = has_listed_experts(fields, first_dense(fields, 1))
    return with_experts(spec, deepseek_experts(fields), has_experts)


def _ling3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Ling 3: groups of layers, of which the last one has gated latent attention."""
    fields = fields.with_defaults(
        max_position_embeddings=fields.integer("model_max_length", 262_144),
        n_group=fields.integer("num_expert_group", 8),
        topk_group=4,
        n_shared_experts=fields.integer("num_shared_experts", 1, minimum=0),
        num_experts_per_tok=fields.integer("num_experts_per_token", 8),
        norm_topk_prob=fields.boolean("moe_renormalize", True),
        routed_scaling_factor=2.5,
        moe_intermediate_size=768,
        num_experts=512,
    )
    period = fields.integer("layer_group_size", 6)
    rope = read_rope(fields, fields.integer("qk_rope_head_dim", 64), theta=6_000_000.0)
    # Layers after the last whole group attend, too.
    num_whole = fields.layer_count("num_hidden_layers") // period * period
    layers = mixed_layers(fields, rope, lambda i: (i + 1) % period == 0 or i >= num_whole)
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    spec = latent_spec(
        fields.with_defaults(
            kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ),
        layers=layers,
        rope_order="interleaved",
        # The same as in Nemotron-H.
        tie_word_embeddings=False,
        gates_attention=True,
        has_head_gates=True,
        tensor_names=(
            (r"(^|\.)word_embeddings\.", r"\1embed_tokens."),
            (r"\.attention\.", ".self_attn."),
            (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            (r"\.self_attn\.forget_gate\.", ".self_attn."),
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
            (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
            *unused_layers(fields),
        ),
    )
    return with_limits(
        with_experts(
            spec, deepseek_experts(fields), has_listed_experts(fields, first_dense(fields, 2))
        ),
        read_limits(fields, "expert_swiglu_limit_list"),
        read_limits(fields, "share_expert_swiglu_limit_list"),
    )


FAMILIES = (
    Family("BailingHybridForCausalLM", "bailing_hybrid", _ling3),
    Family("KimiLinearForCausalLM", "kimi_linear", _kimi_linear),
)
