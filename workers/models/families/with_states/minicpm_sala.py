"""MiniCPM-SALA, a MiniCPM with lightning attention in most layers."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.recurrent_layers import LightningAttention
from ....layers.layer_spec import LayerSpec
from ....layers.read_rope import read_rope
from ....layers.spec import ModelSpec
from ..common import Family, head_dim
from ..hybrid import recurrent_layer
from ..llama_variants import minicpm

_ATTENDING = ("attention", "attn", "minicpm", "minicpm4", "standard")
_LIGHTNING = ("lightning", "lightning-attn", "lightning_attn")


def _sala(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a MiniCPM-SALA. Its other layers attend to all keys, as those of MiniCPM 4."""
    fields = fields.with_defaults(
        tie_word_embeddings=False, scale_emb=12, scale_depth=1.4, dim_model_base=256
    )
    count = fields.layer_count("num_hidden_layers")
    kinds = fields.get("mixer_types", ["minicpm4"])
    if not isinstance(kinds, list) or not kinds or not {*_ATTENDING, *_LIGHTNING}.issuperset(kinds):
        raise fields.wrong("mixer_types", "a list of 'minicpm4' and 'lightning-attn'", kinds)
    # The pattern is repeated.
    attends = [kinds[i % len(kinds)] in _ATTENDING for i in range(count)]
    recurrent = recurrent_layer(fields)
    assert isinstance(recurrent, LightningAttention), "the family has no other recurrent layers"
    has_rope = fields.boolean("attn_use_rope", True)
    own = LayerSpec(read_rope(fields, head_dim(fields)) if has_rope else None)
    rope = read_rope(fields, recurrent.head_dim)
    lightning = LayerSpec(rope, recurrent=recurrent, attends=False)
    numbers = "|".join(str(i) for i, is_own in enumerate(attends) if not is_own)
    return minicpm(
        fields,
        layers=tuple(own if is_own else lightning for is_own in attends),
        gates_attention=fields.boolean("attn_use_output_gate", False),
        has_gate_projection=True,
        tensor_names=(
            (r"\.self_attn\.o_gate\.", ".self_attn.gate_proj."),
            (rf"\.layers\.({numbers})\.self_attn\.", r".layers.\1.mixer."),
            (r"\.mixer\.o_proj\.", ".mixer.out_proj."),
            (r"\.mixer\.o_norm\.", ".mixer.norm."),
            (r"\.mixer\.z_proj\.", ".mixer.output_gate."),
        ),
    )


FAMILIES = (Family("MiniCPMSALAForCausalLM", "minicpm_sala", _sala),)
