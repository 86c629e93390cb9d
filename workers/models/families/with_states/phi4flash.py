"""Phi-4-mini-Flash: SambaY with differential attention (arXiv 2507.06607)."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.layer_spec import Difference, LayerSpec
from ....layers.spec import ModelSpec
from ..common import Family, base_spec, head_dim
from ..hybrid import recurrent_layer
from ..with_other_names.differential import initial_share

_NAMES = (
    (r"(^|\.)final_layernorm\.", r"\1norm."),
    (r"\.layers\.(\d*[02468])\.attn\.", r".layers.\1.mixer."),
    (r"\.attn\.inner_cross_attn\.", ".self_attn."),
    (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.gate_up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)


def _phi4flash(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Phi-4-mini-Flash, whose layers are Mamba layers and attention in turn.

    Those of the second half gate the outputs of one Mamba layer, or read the keys and values of one attention layer.
    """
    fields.require("mb_per_layer", 2)
    kv_heads = fields.integer("num_key_value_heads", fields.integer("num_attention_heads"))
    if kv_heads % 2:
        raise fields.wrong("num_key_value_heads", "an even number", kv_heads)
    count, size = fields.layer_count("num_hidden_layers"), head_dim(fields)
    # The last Mamba layer, and the last layer with keys, precede it.
    first_shared = count // 2 + 2
    # Saved configs have a window for each layer.
    windows = fields.get("sliding_window")
    if isinstance(windows, list):
        windows = fields.per_layer("sliding_window", count) or []
        if not all(x is None or (type(x) is int and x > 0) for x in windows):
            raise fields.wrong("sliding_window", "a list of positive integers and nulls", windows)
    else:
        windows = [fields.optional_integer("sliding_window")] * count
    recurrent = LayerSpec(None, recurrent=recurrent_layer(fields), attends=False)
    layers = []
    for i in range(count):
        source = max(k for k in range(first_shared) if k % 2 == i % 2)
        is_shared = i >= first_shared
        if i % 2 == 0:
            gate = LayerSpec(None, attends=False, memory_source=source)
            layers.append(gate if is_shared else recurrent)
            continue
        share = initial_share(i)
        layers.append(
            LayerSpec(
                None,
                windows[i] if i < count // 2 else None,
                difference=Difference(share, 1e-5, has_norm_weights=True, are_neighbors=True),
                kv_source=source if is_shared else None,
            )
        )
    shared = "|".join(str(i) for i in range(first_shared, count))
    return base_spec(
        fields.with_defaults(
            rms_norm_eps=fields.number("layer_norm_eps", 1e-5), tie_word_embeddings=True
        ),
        tuple(layers),
        norm_kind="layer",
        norm_bias=True,
        head_dim=2 * size,
        attention_scale=size**-0.5,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=fields.boolean("mlp_bias", False),
        head_bias=fields.boolean("lm_head_bias", False),
        tensor_names=(
            (rf"\.layers\.({shared})\.attn\.Wqkv\.", r".layers.\1.self_attn.q_proj."),
            (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
            *_NAMES,
        ),
    )


FAMILIES = (Family("Phi4FlashForCausalLM", "phi4flash", _phi4flash),)
