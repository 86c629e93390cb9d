"""Families of T5: encoder-decoder models with biases of distances, and their encoders alone; and T5Gemma."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from .....protocol.checkpoint.config_fields import ConfigFields
from .....protocol.checkpoint.pooling.classification import (
    CLASSIFIER_SUFFIX,
    TOKEN_CLASSIFIER_SUFFIX,
    classifies_tokens,
)
from .....protocol.checkpoint.speech import max_source_positions
from ....layers.spec import ModelSpec, SourceSpec
from ....layers.specs.norm_names import NormNames
from ..common import Family, base_spec, uniform_layers, with_score_head
from ..gemma import gemma2
from .encoder_decoders import BESIDE_IMAGES, PRE_NORMS, WHOLE, classifier, with_source

_T5_LAYER_NAMES: Final = (
    (r"^block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", "distance_biases."),
    (r"^block\.", "layers."),
    (r"\.layer\.0\.SelfAttention\.([qkvo])\.", r".self_attn.\1_proj."),
    (r"\.layer\.1\.EncDecAttention\.([qkvo])\.", r".cross_attn.\1_proj."),
    (r"\.layer\.0\.layer_norm\.", ".attention_norm."),
    (r"\.layer\.\d\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.layer\.\d\.DenseReluDense\.wi(_1)?\.", ".mlp.up_proj."),
    (r"\.layer\.\d\.DenseReluDense\.wo\.", ".mlp.down_proj."),
    (r"^final_layer_norm\.", "norm."),
)
_PIX2STRUCT_NAMES: Final = (
    (
        r"^decoder\.layer\.0\.self_attention\.attention\.relative_attention_bias\.",
        "distance_biases.",
    ),
    (r"^decoder\.final_layer_norm\.", "norm."),
    (r"^decoder\.layer\.", "layers."),
    (r"^decoder\.", ""),
    (r"\.self_attention\.layer_norm\.", ".attention_norm."),
    (r"\.encoder_decoder_attention\.layer_norm\.", ".cross_norm."),
    (r"\.mlp\.layer_norm\.", ".mlp_norm."),
    (r"\.mlp\.DenseReluDense\.wi_0\.", ".mlp.gate_proj."),
    (r"\.mlp\.DenseReluDense\.wi_1\.", ".mlp.up_proj."),
    (r"\.mlp\.DenseReluDense\.wo\.", ".mlp.down_proj."),
    (r"\.self_attention\.attention\.([qkvo])\w+\.", r".self_attn.\1_proj."),
    (r"\.encoder_decoder_attention\.attention\.([qkvo])\w+\.", r".cross_attn.\1_proj."),
)
_LONGT5_NAMES: Final = (
    (
        r"^encoder\.block\.0\.layer\.0\.\w+\.global_relative_attention_bias\.",
        "block_distance_biases.",
    ),
    (r"\.layer\.0\.\w+\.global_input_layer_norm\.", ".self_attn.sum_norm."),
    (r"\.(Local|TransientGlobal)SelfAttention\.", ".SelfAttention."),
)
_T5GEMMA_NORMS: Final = NormNames(
    "pre_self_attention",
    "post_self_attention",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "pre_cross_attention",
    "post_cross_attention",
)
_T5GEMMA_NAMES: Final = ((r"\.(pre|post)_(self|cross)_attn_layernorm\.", r".\1_\2_attention."),)


def _layers(fields: ConfigFields, feed_forward: str) -> tuple[ConfigFields, dict[str, Any]]:
    """Return the fields of the layers of a T5, and how they differ from Llama's."""
    fields = fields.with_defaults(
        rms_norm_eps=fields.number("layer_norm_epsilon", 1e-6), head_dim=64
    )
    kind = fields.text("feed_forward_proj", feed_forward)
    has_gate, activation = kind.startswith("gated-"), kind.removeprefix("gated-")
    if kind == "gated-gelu":
        activation = "gelu_new"
    num_buckets = fields.integer("relative_attention_num_buckets", 32, minimum=4)
    differences: dict[str, Any] = {
        "norms": PRE_NORMS,
        "has_gate": has_gate,
        "attention_scale": 1.0,
        "num_distance_buckets": num_buckets,
        # The first half of the buckets cover one distance each, and the others longer ones.
        "max_distance": fields.integer(
            "relative_attention_max_distance",
            128,
            minimum=num_buckets // 2 + 1,
            maximum=1 << 16,
        ),
    }
    fields = fields.with_values({"hidden_act": activation, "tie_word_embeddings": True})
    return fields, differences


def t5(
    fields: ConfigFields, feed_forward: str = "relu", scales_outputs: bool | None = None
) -> ModelSpec:
    """Return the spec of a T5.

    Args:
        fields: The config.
        feed_forward: The default of `feed_forward_proj`.
        scales_outputs: The default of `scale_decoder_outputs`; None for that of `tie_word_embeddings`, which has no
            other meaning. An output projection is used if the checkpoint has one.
    """
    is_tied = fields.boolean("tie_word_embeddings", True)
    fields, differences = _layers(fields, feed_forward)
    encoder = fields.with_values({"num_hidden_layers": fields.integer("num_layers")})
    source = SourceSpec(
        base_spec(
            encoder,
            uniform_layers(encoder, None),
            tensor_names=(
                *BESIDE_IMAGES,
                (r"^encoder\.embed_tokens\.", "embed_tokens."),
                (r"^shared\.", "embed_tokens."),
                (r"^decoder\.embed_tokens\.", "embed_tokens."),
                (r"^(decoder|lm_head)\..*", ""),
                (r"^encoder\.", ""),
                *_T5_LAYER_NAMES,
                (r"\.layer\.1\.layer_norm\.", ".mlp_norm."),
            ),
            **differences,
        ),
        max_source_positions(fields),
    )
    if fields.boolean(
        "scale_decoder_outputs", is_tied if scales_outputs is None else scales_outputs
    ):
        differences["logits_divisor"] = math.sqrt(fields.integer("hidden_size"))
    spec = base_spec(
        fields,
        uniform_layers(fields, None),
        tensor_names=(
            *BESIDE_IMAGES,
            (r"^decoder\.embed_tokens\.", "embed_tokens."),
            (r"^shared\.", "embed_tokens."),
            (r"^encoder\.embed_tokens\.", "embed_tokens."),
            (r"^encoder\..*", ""),
            (r"^decoder\.", ""),
            *_T5_LAYER_NAMES,
            (r"\.layer\.1\.layer_norm\.", ".cross_norm."),
            (r"\.layer\.2\.layer_norm\.", ".mlp_norm."),
        ),
        **differences,
    )
    return with_source(spec, source)


def _pix2struct(fields: ConfigFields) -> ModelSpec:
    """Return the spec of the decoder of a Pix2Struct: a T5's with names of its own."""
    activation = fields.text("dense_act_fn", "gelu_new")
    is_tied = fields.boolean("tie_word_embeddings", False)
    fields, differences = _layers(fields, f"gated-{activation}")
    return base_spec(
        fields,
        uniform_layers(fields, None),
        **differences | {"tie_word_embeddings": is_tied},
        tensor_names=_PIX2STRUCT_NAMES,
    )


def _mt5(fields: ConfigFields) -> ModelSpec:
    fields = fields.with_values({"scale_decoder_outputs": None})
    return t5(fields, feed_forward="gated-gelu", scales_outputs=False)


def _umt5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a umT5 (arXiv 2304.09151): a T5 whose layers have their own biases."""
    spec = t5(fields, feed_forward="gated-gelu")
    assert spec.source is not None and spec.source.encoder is not None
    encoder = replace(spec.source.encoder, **_umt5_biases(spec.source.encoder))
    return replace(spec, source=replace(spec.source, encoder=encoder), **_umt5_biases(spec))


def _t5_encoder(fields: ConfigFields, family: Callable[[ConfigFields], ModelSpec]) -> ModelSpec:
    source = family(fields).source
    assert source is not None and source.encoder is not None
    encoder = replace(source.encoder, has_head=True)
    if not classifies_tokens(fields):
        return encoder
    names = (WHOLE, *encoder.tensor_names)
    return with_score_head(
        replace(encoder, tensor_names=names), fields, output=r"^classifier\.", output_bias=True
    )


def _umt5_biases(spec: ModelSpec) -> dict[str, Any]:
    name = (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".self_attn.distance_biases.")
    return {"has_layer_distance_biases": True, "tensor_names": (name, *spec.tensor_names)}


def _longt5(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a LongT5 (arXiv 2112.07916): a T5 whose encoder has windows, and may read sums of blocks."""
    kind = fields.choice("encoder_attention_type", ("local", "transient-global"), "local")
    spec = t5(fields)
    assert spec.source is not None and spec.source.encoder is not None
    encoder = spec.source.encoder
    # The window includes the token itself.
    window, size = fields.integer("local_radius", 127) + 1, fields.integer("global_block_size", 16)
    encoder = replace(
        encoder,
        layers=tuple(replace(layer, window=window) for layer in encoder.layers),
        summed_block_size=size if kind == "transient-global" else 0,
        tensor_names=(*_LONGT5_NAMES, *encoder.tensor_names),
    )
    return replace(spec, source=replace(spec.source, encoder=encoder))


def _t5gemma(fields: ConfigFields) -> ModelSpec:
    """Return the spec of a T5Gemma (arXiv 2504.06225): encoder and decoder are like a Gemma 2."""
    fields = fields.with_defaults(max_position_embeddings=8192)
    own = fields.required_section("encoder").with_defaults(max_position_embeddings=8192)
    # A token of a source also attends to the token at a distance of the window's size.
    window = own.integer("sliding_window", 4096) + 1
    encoder = replace(
        gemma2(own.with_values({"sliding_window": window})),
        norms=_T5GEMMA_NORMS,
        tensor_names=(
            (r"^((model\.)?decoder|lm_head)\..*", ""),
            (r"^(model\.)?encoder\.", ""),
            *_T5GEMMA_NAMES,
        ),
        final_softcap=None,
    )
    positions = max_source_positions(fields)
    decoder = replace(
        gemma2(fields),
        norms=_T5GEMMA_NORMS,
        tensor_names=(
            (r"^(model\.)?encoder\..*", ""),
            (r"^lm_head\.out_proj\.", "lm_head."),
            (r"^(model\.)?decoder\.", ""),
            *_T5GEMMA_NAMES,
        ),
    )
    return with_source(decoder, SourceSpec(encoder, positions))


_T5_FAMILIES: Final = (("MT5", _mt5), ("T5", t5), ("UMT5", _umt5))

FAMILIES = (
    # Configs without an architecture get the last family with their model_type.
    *(
        Family(f"{name}{CLASSIFIER_SUFFIX}", name.lower(), partial(classifier, family=family))
        for name, family in _T5_FAMILIES
    ),
    *(
        Family(
            f"{name}{TOKEN_CLASSIFIER_SUFFIX}", name.lower(), partial(_t5_encoder, family=family)
        )
        for name, family in _T5_FAMILIES
    ),
    Family("MT5EncoderModel", "mt5", partial(_t5_encoder, family=_mt5)),
    Family("T5EncoderModel", "t5", partial(_t5_encoder, family=t5)),
    Family("UMT5EncoderModel", "umt5", partial(_t5_encoder, family=_umt5)),
    Family("LongT5ForConditionalGeneration", "longt5", _longt5),
    Family("Pix2StructForConditionalGeneration", "pix2struct", _pix2struct),
    Family("MT5ForConditionalGeneration", "mt5", _mt5),
    Family("T5ForConditionalGeneration", "t5", t5),
    Family("T5GemmaForConditionalGeneration", "t5gemma", _t5gemma),
    Family("UMT5ForConditionalGeneration", "umt5", _umt5),
)
