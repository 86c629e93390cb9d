"""Families of encoder-decoder models with mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from ....layers.spec import ModelSpec
from ....layers.specs.experts import ExpertsSpec
from ..common import Family
from ..experts import with_experts
from .encoder_decoders import m2m100
from .t5 import t5

_SWITCH_NAMES: Final = (
    (r"\.layer\.\d\.mlp\.router\.classifier\.", ".mlp.gate."),
    (r"\.layer\.\d\.mlp\.(experts\.)expert_", r".mlp.\1"),
    (r"\.layer\.\d\.mlp\.", ".mlp."),
    (r"(\.mlp\..*)\bwi\.", r"\1up_proj."),
    (r"(\.mlp\..*)\bwo\.", r"\1down_proj."),
)

_NLLB_NAMES: Final = (
    (r"\.cross_attention_layer_norm\.", ".cross_norm."),
    (r"\.cross_attention\.", ".cross_attn."),
    (r"\.ff_layer_norm\.", ".mlp_norm."),
    (r"\.ffn\.router\.classifier\.", ".mlp.gate."),
    (r"\.ffn\.(experts\.)expert_", r".mlp.\1"),
    (r"\.ffn\.", ".mlp."),
    (r"(\.mlp\..*)\bfc1\.", r"\1up_proj."),
    (r"(\.mlp\..*)\bfc2\.", r"\1down_proj."),
)


def _switch_transformers(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a Switch Transformer (arXiv 2101.03961): a T5 with experts in some layers.

    An expert of the encoder computes a limited number of a text's tokens. The decoder has no limit, because generation
    computes one token at a time.
    """
    fields = fields.with_values({"feed_forward_proj": fields.text("dense_act_fn", "relu")})
    spec = t5(fields)
    experts = ExpertsSpec(
        fields.integer("num_experts", 8),
        1,
        spec.intermediate_size,
        renormalizes=False,
        has_router_bias=fields.boolean("router_bias", False),
    )
    capacity = fields.integer("expert_capacity", 64)
    return _with_mixtures(
        spec,
        _SWITCH_NAMES,
        (replace(experts, capacity=capacity), _is_sparse(fields, "encoder", "num_layers")),
        (experts, _is_sparse(fields, "decoder", "num_hidden_layers")),
    )


def _is_sparse(fields: ConfigFields, part: str, count: str) -> Callable[[int], bool]:
    """Return a function that says whether a layer of a Switch Transformer has experts."""
    num_layers = fields.integer(count)
    name = f"num_sparse_{part}_layers"
    # As in transformers, 0 also means one layer.
    step = num_layers // (fields.integer(name, 3, minimum=0, maximum=num_layers) or 1)
    return lambda i: step == 1 or i % step == 1


def _nllb_moe(fields: ConfigFields) -> ModelSpec:
    """Return the spec of an NLLB-200 with experts (arXiv 2207.04672): an M2M100 with two experts per token."""
    # Experts then compute all tokens that choose them.
    fields.require("moe_eval_capacity_token_fraction", 1.0, default=1.0)
    fields.require("second_expert_policy", "all", default="all")
    spec = m2m100(fields)
    assert spec.source is not None and spec.source.encoder is not None
    experts = ExpertsSpec(
        fields.integer("num_experts", 128, minimum=2),
        2,
        spec.intermediate_size,
        # Training drops outputs, and generation scales them instead.
        scale=1.0 - fields.number("moe_token_dropout", 0.2),
        has_router_bias=fields.boolean("router_bias", False),
        has_biases=True,
    )
    size = spec.source.encoder.intermediate_size
    in_encoder, in_decoder = (
        _is_every(fields.integer(f"{part}_sparse_step", 4, minimum=0))
        for part in ("encoder", "decoder")
    )
    return _with_mixtures(
        spec,
        _NLLB_NAMES,
        (replace(experts, intermediate_size=size), in_encoder),
        (experts, in_decoder),
    )


def _is_every(step: int) -> Callable[[int], bool]:
    """Return a function that says whether a layer is the last of `step` ones; none is if that is 0."""
    return lambda i: step > 0 and (i + 1) % step == 0


def _with_mixtures(
    spec: ModelSpec,
    names: tuple[tuple[str, str], ...],
    encoder: tuple[ExpertsSpec, Callable[[int], bool]],
    decoder: tuple[ExpertsSpec, Callable[[int], bool]],
) -> ModelSpec:
    """Return the spec with experts in some layers of the encoder and of the decoder."""
    assert spec.source is not None and spec.source.encoder is not None
    source = spec.source.encoder
    source = with_experts(source, *encoder, tensor_names=(*names, *source.tensor_names))
    spec = with_experts(spec, *decoder, tensor_names=(*names, *spec.tensor_names))
    assert spec.source is not None
    return replace(spec, source=replace(spec.source, encoder=source))


FAMILIES = (
    Family("NllbMoeForConditionalGeneration", "nllb-moe", _nllb_moe),
    Family(
        "SwitchTransformersForConditionalGeneration", "switch_transformers", _switch_transformers
    ),
)
