"""Decision 3.0, a Qwen3.5 that scores the codes of answers."""

from __future__ import annotations

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.decisions import ARCHITECTURE
from ....layers.spec import ModelSpec
from ..common import Family
from ..hybrid import qwen3_5_vl


def _d3(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Decision 3.0, in which attention may read later tokens, while states do not."""
    spec = qwen3_5_vl(fields)
    readout = (r"^weight$", "score_head.output.weight")
    return replace(
        spec,
        is_causal=fields.boolean("is_causal", True),
        tensor_names=(readout, *spec.tensor_names),
    )


FAMILIES = (Family(ARCHITECTURE, "qwen3_5", _d3),)
