"""Donut (arXiv 2111.15664), Nougat and PP-FormulaNet, whose decoder reads a page by cross attention: an mBART's."""

from __future__ import annotations

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ..common import Family
from ..with_encoders.encoder_decoders import CAUSAL_NAMES, bart_spec

_NAMES = (
    # The names of PP-FormulaNet.
    (r"^model\.decoder\.", ""),
    *CAUSAL_NAMES,
)


def _donut(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_defaults(
        rms_norm_eps=1e-5,
        hidden_act=fields.text("activation_function", "gelu"),
        max_position_embeddings=1024,
    )
    return bart_spec(
        fields,
        num_positions=fields.integer("max_position_embeddings"),
        position_offset=2,
        has_embedding_norm=True,
        tensor_names=_NAMES,
    )


FAMILIES = (
    Family("DonutForConditionalGeneration", "donut", _donut),
    Family("NougatForConditionalGeneration", "nougat", _donut),
    Family("PPFormulaNetForConditionalGeneration", "pp_formulanet", _donut),
)
