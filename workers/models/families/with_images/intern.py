"""The decoders of Intern-S1 Pro and Intern-S2 Mobius.

The first is a Qwen3-MoE with Fourier embeddings and with groups of experts, the second a Qwen3.5 whose layers share
experts.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.rope import FourierSpec, RopeSpec
from ....layers.spec import ModelSpec
from ....layers.specs.experts import ExpertsSpec
from ..common import Family
from ..experts import qwen3_moe
from ..hybrid import qwen3_5_vl_moe

_FOURIER = ("fope_init_factor", "fope_sep_head", "num_inv_freq")


def _interns1_pro(fields: ConfigFields) -> ModelSpec:
    spec = qwen3_moe(fields)
    layers = tuple(
        replace(
            layer,
            rope=layer.rope and _with_sums(layer.rope, fields),
            experts=layer.experts and _with_groups(layer.experts, fields),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers)


def _with_sums(rope: RopeSpec, fields: ConfigFields) -> RopeSpec:
    """Return the rotation by sums of its first frequencies: those with a whole turn in the trained context."""
    section = fields.first_section("rope_scaling", "rope_parameters")
    if all(section.get(name) is None for name in _FOURIER):
        return rope
    inv_freq, _ = rope.inverse_frequencies(0)
    shortest = 2 * math.pi / fields.integer("max_position_embeddings")
    count = int((inv_freq > shortest).sum())
    if section.get("num_inv_freq") is not None:
        count = section.integer("num_inv_freq", maximum=len(inv_freq))
    return replace(rope, fourier=FourierSpec(count, section.boolean("fope_sep_head", False)))


def _with_groups(experts: ExpertsSpec, fields: ConfigFields) -> ExpertsSpec:
    """Return the mixture, of which a token chooses equally many experts in each group."""
    num_groups = fields.integer("router_n_groups", 1, minimum=-1)
    if num_groups <= 1:
        return experts
    counts = {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_token,
    }
    for name, count in counts.items():
        if count % num_groups:
            raise fields.wrong(name, f"a multiple of router_n_groups {num_groups}", count)
    return replace(experts, num_groups=num_groups, divides_choice=True)


def _interns2_mobius(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder, or of its layer for multi-token prediction, which has experts of its own."""
    spec = qwen3_5_vl_moe(fields)
    count = fields.integer("num_blocks", 4, minimum=0)
    layers = tuple(
        replace(layer, experts=layer.experts and replace(layer.experts, bank=i % count))
        for i, layer in enumerate(spec.layers if count else ())
    )
    names = (r"(^|\.)meta_mlp\.", r"\1expert_banks."), *spec.tensor_names
    return replace(spec, layers=layers or spec.layers, tensor_names=names)


FAMILIES = (
    Family("InternS1ProForConditionalGeneration", "interns1_pro", _interns1_pro),
    Family("InternS2MobiusForConditionalGeneration", "qwen3_5_moe", _interns2_mobius),
)
