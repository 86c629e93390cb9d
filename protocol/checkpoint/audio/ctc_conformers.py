"""Read the configs of conformers that write tokens: Wav2Vec2-BERT and MedASR, and the layers of wav2vec2-conformer."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from ...config.audio.conformer_layers import ConformerLayers, Convolutions, CtcConformerSpec
from ...config.token_decoders import CtcSpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS

CONFORMER_NAMES: Final = (
    (r"\.ffn([12])\.intermediate_dense\.", r".feed_forward\1.linear1."),
    (r"\.ffn([12])\.output_dense\.", r".feed_forward\1.linear2."),
    (r"\.ffn([12])_layer_norm\.", r".norm_feed_forward\1."),
    (r"(\.layers\.\d+\.)self_attn_layer_norm\.", r"\1norm_self_att."),
    (r"\.self_attn\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
    (r"\.self_attn\.linear_pos\.", ".self_attn.relative_k_proj."),
    (r"\.self_attn\.pos_bias_", ".self_attn.bias_"),
    (r"\.conv_module\.layer_norm\.", ".norm_conv."),
    (r"\.conv_module\.(batch_norm|depthwise_layer_norm)\.", ".conv.norm."),
    (r"\.conv_module\.", ".conv."),
    (r"\.final_layer_norm\.", ".norm_out."),
)
"""The names of layers in wav2vec2-conformer and Wav2Vec2-BERT, and those of a `ConformerStack`."""

_BERT_NAMES: Final = (
    (r"^wav2vec2_bert\.adapter\.layers\.", "encoder.adapters."),
    (r"\.ffn\.intermediate_dense\.", ".ffn.linear1."),
    (r"\.ffn\.output_dense\.", ".ffn.linear2."),
    (r"^wav2vec2_bert\.feature_projection\.layer_norm\.", "encoder.subsampling.norm."),
    (r"^wav2vec2_bert\.feature_projection\.projection\.", "encoder.subsampling.linear."),
    (r"^wav2vec2_bert\.", ""),
    (r"^lm_head\.", "ctc_head."),
    *CONFORMER_NAMES,
)

_JOINED_NAMES: Final = (
    (r"^encoder\.(adapter|feature_projection)\.", r"wav2vec2_bert.\1."),
    (r"^encoder\.encoder\.", "encoder."),
    *_BERT_NAMES,
)
"""The names of Wav2Vec2-BERT beside a decoder."""

_LASR_NAMES: Final = (
    (r"^encoder\.subsampler\.dense_0\.", "encoder.subsampling.first."),
    (r"^encoder\.subsampler\.dense_1\.", "encoder.subsampling.linear."),
    (r"^encoder\.subsampler\.", "encoder.subsampling."),
)

_Positions = Literal["distances", "keys", "inputs", "none"]
_POSITIONS: Final[dict[str | None, _Positions]] = {
    "relative": "distances",
    "relative_key": "keys",
    "rotary": "inputs",
    None: "none",
}


def conformer_layers(fields: ConfigFields, hidden_size: int) -> ConformerLayers:
    """Return the layers of wav2vec2-conformer. Raise CheckpointError if a field is missing or invalid."""
    # A value of null differs from an absent one.
    kind = fields.config.get("position_embeddings_type", "relative")
    if kind not in _POSITIONS:
        names = ", ".join(str(name) for name in _POSITIONS)
        raise fields.wrong("position_embeddings_type", f"one of {names}", kind)
    return ConformerLayers(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 3072, maximum=MAX_POSITIONS),
        num_layers=fields.integer("num_hidden_layers", 12, maximum=1024),
        num_heads=fields.divisor("num_attention_heads", hidden_size, 12),
        kernel_size=fields.odd("conv_depthwise_kernel_size", 31, maximum=1023),
        activation=fields.text("hidden_act", "gelu"),
        positions=_POSITIONS[kind],
        num_before=fields.integer("left_max_position_embeddings", 64, maximum=MAX_POSITIONS),
        num_after=fields.integer("right_max_position_embeddings", 8, maximum=MAX_POSITIONS),
        theta=fields.positive("rotary_embedding_base", 10_000.0),
    )


def bert_spec(fields: ConfigFields) -> CtcConformerSpec:
    """Return the encoder of Wav2Vec2-BERT. Raise CheckpointError if a field is missing or invalid."""
    layers = bert_layers(fields)
    fields.require("output_hidden_size", layers.hidden_size)
    adapters = read_adapters(fields)
    if adapters is not None:
        fields.require("use_intermediate_ffn_before_adapter", False)
    vocab_size = fields.integer("vocab_size")
    return CtcConformerSpec(
        layers=layers,
        num_mel_bins=fields.integer("feature_projection_input_dim", 160, maximum=1024),
        num_frames=1500,
        output_size=layers.hidden_size,
        decoder=CtcSpec(
            vocab_size, fields.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1)
        ),
        tensor_names=_BERT_NAMES,
        adapters=adapters,
        adapter_activation=fields.text("adapter_act", "relu"),
    )


def joined_bert_spec(audio: ConfigFields, output_size: int) -> CtcConformerSpec:
    """Return the encoder of a Wav2Vec2-BERT that is joined to a decoder of texts.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    spec = bert_spec(audio.with_values({"vocab_size": 1, "pad_token_id": 0}))
    size = spec.layers.hidden_size
    return msgspec.structs.replace(
        spec,
        decoder=None,
        output_size=output_size,
        last="none" if size == output_size else "matrix",
        tensor_names=_JOINED_NAMES,
    )


def bert_layers(fields: ConfigFields) -> ConformerLayers:
    """Return the layers of Wav2Vec2-BERT. Raise CheckpointError if a field is missing or invalid."""
    fields = fields.with_defaults(
        hidden_size=1024,
        hidden_act="swish",
        intermediate_size=4096,
        num_attention_heads=16,
        num_hidden_layers=24,
        position_embeddings_type="relative_key",
    )
    return msgspec.structs.replace(
        conformer_layers(fields, fields.integer("hidden_size", maximum=MAX_POSITIONS)),
        conv_norm="layer",
        is_causal=True,
        norm_eps=fields.positive("layer_norm_eps", 1e-5),
    )


def read_adapters(fields: ConfigFields) -> Convolutions | None:
    """Return the convolutions of adapters, which make fewer rows; None if there are no adapters."""
    if not fields.boolean("add_adapter", False):
        return None
    stride = fields.integer("adapter_stride", 2, maximum=64)
    count = fields.integer("num_adapter_layers", 1, maximum=64)
    kernel_size = fields.integer("adapter_kernel_size", 3, maximum=1023)
    return Convolutions(count, kernel_size, stride, stride // 2)


def lasr_spec(fields: ConfigFields) -> CtcConformerSpec:
    """Return the encoder of MedASR. Raise CheckpointError if a field is missing or invalid."""
    encoder = fields.section_or_empty("encoder_config")
    hidden_size = encoder.integer("hidden_size", 512, maximum=MAX_POSITIONS)
    num_heads = encoder.divisor("num_attention_heads", hidden_size, 8)
    encoder.require("num_key_value_heads", num_heads)
    rope = encoder.section_or_empty("rope_parameters")
    rope.require("rope_type", "default")
    channels = encoder.integer("subsampling_conv_channels", 256, maximum=MAX_POSITIONS)
    kernel_size = encoder.integer("subsampling_conv_kernel_size", 5, maximum=1023)
    stride = encoder.integer("subsampling_conv_stride", 2, maximum=64)
    vocab_size = fields.integer("vocab_size")
    return CtcConformerSpec(
        layers=ConformerLayers(
            hidden_size=hidden_size,
            intermediate_size=encoder.integer("intermediate_size", 2048, maximum=MAX_POSITIONS),
            num_layers=encoder.integer("num_hidden_layers", 17, maximum=1024),
            num_heads=num_heads,
            kernel_size=encoder.integer("conv_kernel_size", 32, maximum=1023),
            activation=encoder.text("hidden_act", "silu"),
            has_bias=encoder.boolean("attention_bias", False),
            has_conv_bias=encoder.boolean("convolution_bias", False),
            positions="rotary",
            theta=rope.positive("rope_theta", 10_000.0),
            mlp_factors=_pair(encoder, "feed_forward_residual_weights", (1.5, 0.5)),
            conv_factors=_pair(encoder, "conv_residual_weights", (2.0, 1.0)),
            norm_eps=encoder.positive("layer_norm_eps", 1e-6),
            has_norm_bias=False,
        ),
        num_mel_bins=encoder.integer("num_mel_bins", 128, maximum=1024),
        num_frames=3000,
        output_size=hidden_size,
        decoder=CtcSpec(
            vocab_size, fields.integer("pad_token_id", 0, minimum=0, maximum=vocab_size - 1)
        ),
        tensor_names=_LASR_NAMES,
        stem=Convolutions(2, kernel_size, stride),
        stem_channels=channels,
        has_last_norm=True,
    )


def _pair(fields: ConfigFields, name: str, default: tuple[float, float]) -> tuple[float, float]:
    return fields.convert(name, default, tuple[float, float], "two numbers")
