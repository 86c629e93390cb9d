"""Block-diffusion families, which fill blocks of masks. Their layers are those of models that generate by tokens."""

from __future__ import annotations

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.spec import ModelSpec
from .common import Family
from .experts import qwen3_moe
from .llama import qwen3
from .sigmoid_experts import ling2


def _llada2(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an LLaDA 2 (arXiv 2512.15745), whose layers are those of a Ling 2."""
    fields.require("expert_capacity", None, " (experts that a whole block shares)")
    return ling2(fields)


FAMILIES = (
    Family("LLaDA2MoeModelLM", "llada2_moe", _llada2),
    Family("SDARForCausalLM", "sdar", qwen3),
    Family("SDARMoeForCausalLM", "sdar_moe", qwen3_moe),
)
