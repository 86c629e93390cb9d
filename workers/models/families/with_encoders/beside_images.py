"""Families of text encoders that embed texts beside a tower that embeds images."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, base_spec, uniform_layers

_NAMES = (
    (r"^(vision_model|visual_projection|text_projection|text_model\.head)\..*", ""),
    (r"^(logit_scale|logit_bias)$", ""),
    (r".*\.position_ids$", ""),
    (r"^text_model\.embeddings\.token_embedding\.", "embed_tokens."),
    (r"^text_model\.embeddings\.position_embedding\.", "embed_positions."),
    (r"^text_model\.final_layer_norm\.", "norm."),
    (r"^text_model\.encoder\.", ""),
    (r"\.layer_norm1\.", ".attention_norm."),
    (r"\.layer_norm2\.", ".mlp_norm."),
    (r"\.out_proj\.", ".o_proj."),
    (r"\.mlp\.fc1\.", ".mlp.up_proj."),
    (r"\.mlp\.fc2\.", ".mlp.down_proj."),
)


def _text(fields: ConfigFields, *, is_causal: bool) -> ModelSpec:
    return base_spec(
        fields,
        uniform_layers(fields, None),
        is_causal=is_causal,
        norms=NormNames("attention_norm", None, "mlp_norm", None),
        norm_kind="layer",
        norm_bias=True,
        has_gate=False,
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        num_positions=fields.integer("max_position_embeddings"),
        tensor_names=_NAMES,
    )


def _clip(fields: ConfigFields) -> ModelSpec:
    return _text(fields.with_defaults(hidden_act="quick_gelu", rms_norm_eps=1e-5), is_causal=True)


def _siglip(fields: ConfigFields) -> ModelSpec:
    return _text(
        fields.with_defaults(hidden_act="gelu_pytorch_tanh", rms_norm_eps=1e-6), is_causal=False
    )


FAMILIES = (
    Family("CLIPModel", "clip_text_model", _clip),
    Family("SiglipModel", "siglip_text_model", _siglip),
)
