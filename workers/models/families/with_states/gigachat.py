"""GigaChat 3.5, a DeepSeek-V3 with gated norms and with delta nets in most layers."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ....layers.specs.experts import GateLimit
from ....layers.specs.norm_gate import NormGateSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, with_limits
from ..experts import deepseek_experts, first_dense, unused_layers, with_experts
from ..hybrid import layer_indices, mixed_layers
from ..latent import latent_spec

_RANK = 16
_GATED = "GatedNorm"
_ZERO_CENTERED = "ZeroCenteredGatedNorm"


def _gigachat(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a GigaChat 3.5. The norms of its latent vectors have gates, too."""
    fields = fields.with_defaults(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_theta=100_000.0,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=896,
        routed_scaling_factor=2.5,
    )
    fields.require_all(
        linear_attention_type="Qwen3NextGatedDeltaNet",
        use_shared_expert_sigmoid=False,
        moe_layer_freq=1,
    )
    kind = fields.choice("norm_type", (_ZERO_CENTERED, _GATED), _ZERO_CENTERED)
    attending = layer_indices(fields, "full_attention_layers") or []
    rope = read_rope(fields, fields.integer("qk_rope_head_dim"))
    layers = mixed_layers(fields, rope, lambda i: i in attending, ("layer_types",))
    recurrent = "|".join(str(i) for i, layer in enumerate(layers) if not layer.attends)
    is_interleaved = fields.boolean("rope_interleave", True)
    norms = _norms(fields)
    spec = latent_spec(
        fields,
        layers=layers,
        rope_order="interleaved" if is_interleaved else "half",
        norms=norms,
        norm_weight_offset=1.0 if kind == _ZERO_CENTERED else 0.0,
        norm_gate=NormGateSpec(
            tuple(name for name in (*norms.of_blocks, "norm") if name),
            _RANK,
            factor=fields.positive("layernorm_gating_weight", 2.0),
            has_latent_gates=True,
        ),
        gates_attention=fields.boolean("gated_attention", True),
        has_gate_projection=True,
        tensor_names=(
            (r"norm\.gate_up_(projection|lowrank)\.", "norm.gate.down."),
            (r"norm\.gate_down_(projection|lowrank)\.", "norm.gate.up."),
            (r"\.self_attn\.attn_gate\.", ".self_attn.gate_proj."),
            (rf"\.layers\.({recurrent})\.self_attn\.", r".layers.\1.mixer."),
            *unused_layers(fields),
        ),
    )
    latent = spec.latent
    assert latent is not None, "the family has latent attention"
    latent = replace(latent, norm_eps=spec.norm_eps)
    if fields.boolean("use_mla_scaling_factor", True):
        size = fields.integer("hidden_size")
        latent = replace(latent, multiplier=(size / latent.kv_rank) ** 0.5)
        # The same factor for queries.
        scale = spec.attention_scale * (size / (latent.query_rank or size)) ** 0.5
        spec = replace(spec, attention_scale=scale)
    spec = with_experts(
        replace(spec, latent=latent), deepseek_experts(fields), first_dense(fields, 1)
    )
    limit = fields.number("swiglu_limit", 0.0)
    if limit <= 0:
        return spec
    count = len(layers)
    return with_limits(spec, [GateLimit(limit)] * count, [None] * count)


def _norms(fields: ConfigFields) -> NormNames:
    place = fields.choice("layernorm_type", ("pre", "post", "pre_post"), "pre_post")
    has_inputs, has_outputs = place != "post", place != "pre"
    return NormNames(
        attention_input="input_layernorm" if has_inputs else None,
        attention_output="post_self_attn_layernorm" if has_outputs else None,
        mlp_input="post_attention_layernorm" if has_inputs else None,
        mlp_output="post_feedforward_layernorm" if has_outputs else None,
    )


FAMILIES = (Family("GigaChat35ForCausalLM", "gigachat3_5", _gigachat),)
