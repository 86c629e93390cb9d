"""Read the config of VibeVoice's convolutional encoders."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...config.audio.samples import WaveEncoder, WaveSpec
from ..config_fields import ConfigFields
from .fields import MAX_POSITIONS

_Number = Annotated[int, msgspec.Meta(ge=1, le=1024)]
_Numbers = Annotated[tuple[_Number, ...], msgspec.Meta(min_length=1, max_length=16)]


def wave_spec(fields: ConfigFields, audio: ConfigFields, output_size: int) -> WaveSpec:
    """Return the encoders of VibeVoice ASR, of which `audio` describes the acoustic one.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    acoustic = _encoder(audio, 64)
    semantic = _encoder(fields.required_section("semantic_tokenizer_encoder_config"), 128)
    if acoustic.hop != semantic.hop:
        raise fields.error(
            f"the encoders have outputs of {acoustic.hop} and {semantic.hop} samples"
        )
    samples = fields.multiple("acoustic_tokenizer_chunk_size", acoustic.hop, 1_440_000)
    return WaveSpec(acoustic, semantic, samples // acoustic.hop, output_size)


def _encoder(fields: ConfigFields, hidden_size: int) -> WaveEncoder:
    fields.require("channels", 1)
    ratios = _numbers(fields, "downsampling_ratios", (2, 2, 4, 5, 5, 8))
    depths = _numbers(fields, "depths", (3, 3, 3, 3, 3, 3, 8))
    if len(depths) != len(ratios) + 1:
        raise fields.wrong("depths", f"{len(ratios) + 1} numbers", depths)
    return WaveEncoder(
        num_filters=fields.integer("num_filters", 32, maximum=1024),
        kernel_size=fields.integer("kernel_size", 7, maximum=1023),
        ratios=ratios,
        depths=depths,
        expansion=fields.integer("ffn_expansion", 4, maximum=64),
        hidden_size=fields.integer("hidden_size", hidden_size, maximum=MAX_POSITIONS),
        activation=fields.text("hidden_act", "gelu"),
        norm_eps=fields.positive("rms_norm_eps", 1e-5),
    )


def _numbers(fields: ConfigFields, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
    return fields.convert(name, default, _Numbers, "1 to 16 numbers from 1 to 1024")
