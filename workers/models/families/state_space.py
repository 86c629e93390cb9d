"""Families with Mamba layers, or with only Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Callable

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.recurrent_config import DEFAULT_LENGTH, nominal_heads
from ...layers.spec import LayerSpec, ModelSpec, NormNames
from .common import Family, base_spec
from .experts import read_experts, with_experts
from .hybrid import BAMBA_NAMES, mixed_layers, recurrent_layer


def _purely_recurrent(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Mamba, Falcon-Mamba or Mamba-2, whose layers have neither attention nor an MLP."""
    recurrent = recurrent_layer(fields)
    num_heads, size = nominal_heads(recurrent)
    layer = LayerSpec(None, recurrent=recurrent, attends=False, has_mlp=False)
    is_tied = fields.text("model_type") != "mamba2"
    length = fields.optional_integer("max_position_embeddings") or DEFAULT_LENGTH
    return base_spec(
        fields.with_values(
            {
                "max_position_embeddings": length,
                "num_attention_heads": num_heads,
                "num_key_value_heads": num_heads,
                "head_dim": size,
                # No layer has an MLP.
                "intermediate_size": recurrent.num_units,
            }
        ).with_defaults(
            tie_word_embeddings=is_tied,
            rms_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        ),
        (layer,) * fields.layer_count("num_hidden_layers"),
        norms=NormNames(attention_input="norm"),
        tensor_names=((r"(^|\.)embeddings\.", r"\1embed_tokens."), (r"(^|\.)norm_f\.", r"\1norm.")),
    )


def _jamba(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(num_key_value_heads=8, num_experts=16)
    attends = _periodic(fields, "attn_layer", 8, 4)
    spec = base_spec(
        fields,
        mixed_layers(fields, None, attends),
        norms=NormNames(mlp_input="pre_ff_layernorm"),
        tensor_names=(*BAMBA_NAMES, (r"\.mlp\.router\.", ".mlp.gate.")),
    )
    if fields.integer("num_experts") == 1:
        return spec
    experts = read_experts(fields, 16, 2, intermediate_size="intermediate_size", renormalizes=False)
    return with_experts(
        spec, experts, _periodic(fields, "expert_layer", 2, 1), tensor_names=spec.tensor_names
    )


def _periodic(fields: ConfigFields, prefix: str, period: int, offset: int) -> Callable[[int], bool]:
    """Return a function that says whether a layer is one of those given by a period and an offset in the config."""
    period = fields.integer(f"{prefix}_period", period)
    offset = fields.integer(f"{prefix}_offset", offset, minimum=0)
    return lambda i: i % period == offset


FAMILIES = (
    Family("FalconMambaForCausalLM", "falcon_mamba", _purely_recurrent),
    Family("JambaForCausalLM", "jamba", _jamba),
    Family("MambaForCausalLM", "mamba", _purely_recurrent),
    Family("Mamba2ForCausalLM", "mamba2", _purely_recurrent),
)
