"""Block-diffusion families, which fill blocks of masks. Their layers are those of models that generate by tokens."""

from __future__ import annotations

from msgspec.structs import replace

from ....protocol.checkpoint.config_fields import ConfigFields
from ...layers.spec import ModelSpec
from .common import Family
from .experts import qwen3_moe
from .llama import qwen3
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


FAMILIES = (
    Family("LLaDA2MoeModelLM", "llada2_moe", _llada2),
    Family("SDARForCausalLM", "sdar", qwen3),
    Family("SDARMoeForCausalLM", "sdar_moe", qwen3_moe),
)
