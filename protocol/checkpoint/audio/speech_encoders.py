"""Read the config of a speech model's own encoder, whose outputs a decoder reads by cross attention."""

from __future__ import annotations

import math
from typing import Annotated, Final

import msgspec

from ...config.audio.conformer_layers import ConformerLayers
from ...config.audio.samples import StreamingSpec
from ...config.audio.tower import FastConformerSpec, RelativeConformerSpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS, Channels, read_num_heads

_Rows = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITIONS)]

_WINDOWS: Final[tuple[tuple[int, int], ...]] = (
    (16, 4),
    (16, 4),
    (16, 0),
    (16, 0),
    (16, 4),
    (16, 4),
)
"""The rows before and after each row that it attends to, in the layers of the smallest Moonshine Streaming."""

_COHERE_NAMES: Final = (
    (r"^model\.", ""),
    # The names of Cohere's own checkpoints.
    (r"^encoder_decoder_proj\.", "decoder.proj."),
    (r"^encoder\.pre_encode\.conv\.", "encoder.subsampling.layers."),
    (r"^encoder\.pre_encode\.out\.", "encoder.subsampling.linear."),
    (r"(^encoder\.layers\.\d+\.self_attn\.)linear_([qkv])\.", r"\1\2_proj."),
    (r"(^encoder\.layers\.\d+\.self_attn\.)linear_out\.", r"\1o_proj."),
    (r"(^encoder\.layers\.\d+\.self_attn\.)linear_pos\.", r"\1relative_k_proj."),
    (r"(^encoder\.layers\.\d+\.self_attn\.)pos_bias_", r"\1bias_"),
    (r"(^encoder\.layers\.\d+\.conv\.)batch_norm\.", r"\1norm."),
)

_FIRERED_NAMES: Final = (
    (r"^encoder\.layer_stack\.", "encoder.layers."),
    (r"\.ffn([12])\.net\.0\.", r".norm_feed_forward\1."),
    (r"\.ffn([12])\.net\.1\.", r".feed_forward\1.linear1."),
    (r"\.ffn([12])\.net\.4\.", r".feed_forward\1.linear2."),
    (r"\.mhsa\.layer_norm_([qkv])\.", r".norm_\1."),
    (r"\.mhsa\.w_([qkv])s\.", r".self_attn.\1_proj."),
    (r"\.mhsa\.fc\.", ".self_attn.o_proj."),
    (r"\.mhsa\.linear_pos\.", ".self_attn.relative_k_proj."),
    (r"\.mhsa\.pos_bias_", ".self_attn.bias_"),
    (r"\.conv\.pre_layer_norm\.", ".norm_conv."),
    (r"\.conv\.batch_norm\.", ".conv.norm."),
    (r"(^encoder\.layers\.\d+)\.layer_norm\.", r"\1.norm_out."),
)

_NEMO_FIELDS: Final = {
    "subsampling": "dw_striding",
    "causal_downsampling": False,
    "reduction": None,
    "self_attention_model": "rel_pos",
    "att_context_size": [-1, -1],
    "conv_norm_type": "batch_norm",
    "feat_out": -1,
}
"""Fields of NeMo's configs, and the only values that are read."""

_OMNI_FRAMES: Final = 30_000
"""The maximum length of a clip of Nemotron Omni and LFM2-Audio: 300 s. All its rows attend to each other."""

_OMNI_NAMES: Final = (
    (r"^audio_tower\.", "sound_encoder.encoder."),
    (r"^(embed_audio\.layer_norm|sound_projection\.norm)\.", "sound_encoder.projection.norm."),
    (r"^(embed_audio\.linear_|sound_projection\.linear)", "sound_encoder.projection.linear"),
)


def canary_encoder_spec(fields: ConfigFields) -> FastConformerSpec:
    """Return the encoder of Canary. Raise CheckpointError if a field is missing or invalid."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 32}
    spec = fast_conformer_spec(fields, **sizes)
    if spec.layers.hidden_size != spec.output_size:
        raise fields.error(
            f"encoder_config.hidden_size {spec.layers.hidden_size} must be the decoder's hidden_size {spec.output_size}"
        )
    return msgspec.structs.replace(spec, has_projection=False)


def fast_conformer_spec(fields: ConfigFields, **defaults: int) -> FastConformerSpec:
    """Return the encoder of Cohere Transcribe, or that of another model with other `defaults`.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    encoder = fields.section_or_empty("encoder_config")
    encoder = encoder.with_defaults(**defaults)
    encoder.require_all(subsampling_conv_kernel_size=3, subsampling_conv_stride=2)
    factor = encoder.integer("subsampling_factor", 8, maximum=64)
    if factor & (factor - 1) or factor < 2:
        raise encoder.wrong("subsampling_factor", "a power of 2, at least 2", factor)
    hidden_size = encoder.integer("hidden_size", 1280, maximum=MAX_POSITIONS)
    return FastConformerSpec(
        layers=ConformerLayers(
            hidden_size=hidden_size,
            intermediate_size=encoder.integer("intermediate_size", 5120, maximum=MAX_POSITIONS),
            num_layers=encoder.integer("num_hidden_layers", 48, maximum=1024),
            num_heads=read_num_heads(encoder, hidden_size, 8),
            kernel_size=encoder.odd("conv_kernel_size", 9, maximum=1023),
            activation=encoder.text("hidden_act", "silu"),
            has_bias=encoder.boolean("attention_bias", True),
            has_conv_bias=encoder.boolean("convolution_bias", True),
        ),
        num_mel_bins=encoder.integer("num_mel_bins", 128, minimum=factor, maximum=1024),
        num_frames=3000,
        conv_channels=encoder.integer("subsampling_conv_channels", 256, maximum=MAX_POSITIONS),
        num_halvings=factor.bit_length() - 1,
        input_scale=math.sqrt(hidden_size) if encoder.boolean("scale_input", False) else 1.0,
        output_size=fields.integer("hidden_size", 1024),
        tensor_names=_COHERE_NAMES,
    )


def nemotron_omni_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> FastConformerSpec:
    """Return the encoder of Nemotron Omni, which is that of Parakeet with another projection.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    encoder = audio.with_defaults(attention_bias=False, scale_input=False)
    own = fields.with_values({"encoder_config": encoder.config, "hidden_size": output_size})
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    return msgspec.structs.replace(
        fast_conformer_spec(own, num_mel_bins=80, **sizes),
        num_frames=_OMNI_FRAMES,
        projection_size=encoder.integer("projection_hidden_size", 4096, maximum=MAX_POSITIONS),
        has_projection_bias=encoder.boolean("projection_bias", False),
        has_last_row=True,
        tensor_names=_OMNI_NAMES,
    )


def lfm2_audio_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> FastConformerSpec:
    """Return the encoder of LFM2-Audio, whose fields have the names of NeMo's configs.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    audio.require_all(**_NEMO_FIELDS)
    size = audio.integer("d_model", 512, maximum=MAX_POSITIONS)
    encoder = {
        "num_mel_bins": audio.get("feat_in", 128),
        "hidden_size": size,
        "intermediate_size": size * audio.integer("ff_expansion_factor", 4, maximum=64),
        "num_hidden_layers": audio.get("n_layers", 17),
        "num_attention_heads": audio.get("n_heads", 8),
        "conv_kernel_size": audio.get("conv_kernel_size", 9),
        "subsampling_factor": audio.get("subsampling_factor", 8),
        "subsampling_conv_channels": audio.get("subsampling_conv_channels", 256),
        "scale_input": audio.boolean("xscaling", False),
    }
    own = fields.with_values({"encoder_config": encoder, "hidden_size": output_size})
    (inner,) = fields.convert(
        "adapter_hidden_dims", (output_size,), tuple[Channels], "a list of one number"
    )
    return msgspec.structs.replace(
        fast_conformer_spec(own),
        num_frames=_OMNI_FRAMES,
        projection_size=inner,
        projection_activation="gelu",
        has_projection_bias=True,
        tensor_names=(
            (r"^conformer\.", "encoder."),
            (r"^audio_adapter\.model\.0\.", "projection.norm."),
            (r"^audio_adapter\.model\.1\.", "projection.linear1."),
            (r"^audio_adapter\.model\.3\.", "projection.linear2."),
            *_COHERE_NAMES,
        ),
    )


def streaming_spec(fields: ConfigFields) -> StreamingSpec:
    """Return the encoder of Moonshine Streaming. Raise CheckpointError if a field is missing or invalid."""
    encoder = fields.section_or_empty("encoder_config")
    encoder.require("sample_rate", 16_000, default=16_000)
    hidden_size = encoder.integer("hidden_size", 320, maximum=MAX_POSITIONS)
    num_heads = read_num_heads(encoder, hidden_size, 8)
    num_kv_heads = encoder.divisor("num_key_value_heads", num_heads, 8)
    num_layers = encoder.integer("num_hidden_layers", 6, maximum=1024)
    windows, needed = _WINDOWS, f"{num_layers} pairs of numbers"
    windows = encoder.convert(
        "sliding_windows", windows, tuple[tuple[Channels, _Rows], ...], needed
    )
    if len(windows) != num_layers:
        raise encoder.wrong("sliding_windows", needed, windows)
    frame_size = round(16 * encoder.positive("frame_ms", 5.0))
    num_samples, max_positions = 480_000, fields.integer("max_position_embeddings", 4096)
    if (num_rows := -(-num_samples // (4 * frame_size))) > max_positions:
        needed = f"at least {num_rows}, the rows of 30 s"
        raise fields.wrong("max_position_embeddings", needed, max_positions)
    return StreamingSpec(
        frame_size=frame_size,
        hidden_size=hidden_size,
        intermediate_size=encoder.integer("intermediate_size", 1280, maximum=MAX_POSITIONS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=encoder.integer("head_dim", hidden_size // num_heads),
        windows=windows,
        num_frames=num_samples,
        max_positions=max_positions,
        activation=encoder.text("hidden_act", "gelu"),
        has_bias=encoder.boolean("attention_bias", False),
        output_size=fields.integer("hidden_size", 320),
    )


def relative_conformer_spec(
    fields: ConfigFields, audio: ConfigFields, output_size: int
) -> RelativeConformerSpec:
    """Return the encoder of FireRedASR2. Raise CheckpointError if a field is missing or invalid."""
    hidden_size = audio.integer("d_model", maximum=MAX_POSITIONS)
    heads = audio.with_values({"num_attention_heads": audio.get("n_head")})
    return RelativeConformerSpec(
        layers=ConformerLayers(
            hidden_size=hidden_size,
            intermediate_size=4 * hidden_size,
            num_layers=audio.integer("n_layers_enc", maximum=1024),
            num_heads=read_num_heads(heads, hidden_size, 20),
            kernel_size=audio.odd("kernel_size", 33, maximum=1023),
            activation="silu",
            has_attention_bias=False,
            has_qkv_norms=True,
            conv_expansion=2,
            conv_norm="layer",
        ),
        num_mel_bins=audio.integer("idim", 80, minimum=7, maximum=1024),
        num_frames=3000,
        conv_channels=32,
        rows_per_output=fields.integer("encoder_downsample_rate", 2, maximum=64),
        output_size=output_size,
        tensor_names=_FIRERED_NAMES,
    )
