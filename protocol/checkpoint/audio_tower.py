"""Read the config of a checkpoint's audio tower, which turns audio clips into embeddings for the decoder."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from .config_fields import ConfigFields

MAX_POSITIONS: Final = 1 << 16

FRAMES_AFTER: Final = 2
"""Frames after the last computed row of an audio clip that the convolutions still read."""


class AudioTowerSpec(msgspec.Struct, frozen=True):
    """Whisper's encoder (arXiv 2212.04356), followed by a projection to the decoder's hidden size.

    It reads windows of log-mel features. Two convolutions turn every two frames into one row. After the encoder's
    layers, `rows_per_output` neighboring rows become one output. If `join` is "mean" (Qwen2-Audio, arXiv 2407.10759),
    their mean is normed and projected by a matrix with a bias. If it is "stack" (Voxtral, arXiv 2507.13264), they are
    normed, concatenated and projected by two matrices, with `projection_activation` in between.

    If `is_filled`, a window always has `num_frames` frames, padded with silence. Otherwise it ends with the clip and
    `FRAMES_AFTER` more frames, which only the convolutions read, so no rows are computed for silence.
    """

    num_mel_bins: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    activation: str
    output_size: int
    join: Literal["mean", "stack"]
    rows_per_output: int
    is_filled: bool
    projection_activation: str = "gelu"

    @property
    def num_frames(self) -> int:
        """The number of frames of a full window."""
        return 2 * self.num_positions

    @property
    def frames_after(self) -> int:
        """The number of frames at the end of a window for which no row is computed."""
        return 0 if self.is_filled else FRAMES_AFTER


def has_audio_tower(fields: ConfigFields) -> bool:
    """Return whether a model with this config has an audio tower that Engine supports."""
    is_known = fields.text("model_type", "") in ("qwen2_audio", "voxtral")
    return is_known and fields.section("audio_config") is not None


def audio_tower_spec(fields: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the audio tower of a model for which `has_audio_tower` is true.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    is_voxtral = fields.text("model_type") == "voxtral"
    audio = fields.required_section("audio_config")

    def size(name: str, other: str, default: int, maximum: int = MAX_POSITIONS) -> int:
        """Return a size, which configs have under one of two names."""
        found = name if audio.get(name) is not None else other
        return audio.integer(found, default, maximum=maximum)

    hidden_size = size("d_model", "hidden_size", 1280)
    intermediate_size = size("encoder_ffn_dim", "intermediate_size", 5120)
    num_heads = size("encoder_attention_heads", "num_attention_heads", 20)
    num_positions = audio.integer("max_source_positions", 1500, maximum=MAX_POSITIONS)
    if hidden_size % num_heads:
        raise audio.error(
            f"{audio.prefix}d_model {hidden_size} must be a multiple of the {num_heads} attention heads"
        )
    rows_per_output = 2
    if is_voxtral:
        rows_per_output = intermediate_size // hidden_size
        if intermediate_size % hidden_size or num_positions % rows_per_output:
            raise audio.error(
                f"{audio.prefix}intermediate_size {intermediate_size} must be a multiple of hidden_size {hidden_size}, "
                f"and its share must divide max_source_positions {num_positions}"
            )
    return AudioTowerSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=size("encoder_layers", "num_hidden_layers", 32, maximum=1024),
        num_heads=num_heads,
        num_positions=num_positions,
        activation=audio.text("activation_function", "gelu"),
        output_size=output_size,
        join="stack" if is_voxtral else "mean",
        rows_per_output=rows_per_output,
        is_filled=is_voxtral,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
    )
