"""Read the config of a checkpoint's audio tower, which turns audio clips into embeddings for the decoder."""

from __future__ import annotations

from typing import Final

import msgspec

from ..config.audio_tower import AudioChunks, AudioRotary, AudioTowerSpec
from .config_fields import ConfigFields

MAX_POSITIONS: Final = 1 << 16

_THINKER: Final = "thinker_config"
_MODEL_TYPES: Final = ("qwen2_audio", "voxtral", "qwen3_asr", "glmasr")


def audio_section(fields: ConfigFields) -> ConfigFields:
    """Return the section of a config that describes how audio is read, which is the config itself for most models."""
    return fields.section(_THINKER) or fields


def has_audio_tower(fields: ConfigFields) -> bool:
    """Return whether a model with this config has an audio tower that Engine supports."""
    is_known = fields.text("model_type", "") in _MODEL_TYPES
    return is_known and audio_section(fields).section("audio_config") is not None


def audio_tower_spec(fields: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the audio tower of a model for which `has_audio_tower` is true.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    kind = fields.text("model_type")
    audio = audio_section(fields).required_section("audio_config")
    if kind == "qwen3_asr":
        return _chunked_spec(audio, output_size)
    hidden_size = _size(audio, "d_model", "hidden_size", 1280)
    intermediate_size = _size(audio, "encoder_ffn_dim", "intermediate_size", 5120)
    num_positions_name = "max_position_embeddings" if kind == "glmasr" else "max_source_positions"
    num_positions = audio.integer(num_positions_name, 1500, maximum=MAX_POSITIONS)
    rows_per_output = 2
    if kind != "qwen2_audio":
        rows_per_output = intermediate_size // hidden_size
        if intermediate_size % hidden_size or num_positions % rows_per_output:
            raise audio.error(
                f"{audio.prefix}intermediate_size {intermediate_size} must be a multiple of hidden_size {hidden_size}, "
                f"and its share must divide {num_positions_name} {num_positions}"
            )
    spec = AudioTowerSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=_size(audio, "encoder_layers", "num_hidden_layers", 32, maximum=1024),
        num_heads=_num_heads(audio, hidden_size, 20),
        num_frames=2 * num_positions,
        activation=audio.text("activation_function", "gelu"),
        output_size=output_size,
        join="mean" if kind == "qwen2_audio" else "stack",
        rows_per_output=rows_per_output,
        silence="skipped" if kind == "qwen2_audio" else "kept",
        projection_size=0 if kind == "qwen2_audio" else output_size,
        projection_activation=fields.text("projector_hidden_act", "gelu"),
        has_projection_bias=kind == "qwen2_audio",
    )
    return _with_rotary(spec, audio) if kind == "glmasr" else spec


def _size(
    audio: ConfigFields, name: str, other: str, default: int, maximum: int = MAX_POSITIONS
) -> int:
    """Return a size, which configs have under one of two names."""
    return audio.integer(name if audio.get(name) is not None else other, default, maximum=maximum)


def _num_heads(audio: ConfigFields, hidden_size: int, default: int) -> int:
    num_heads = _size(audio, "encoder_attention_heads", "num_attention_heads", default)
    if hidden_size % num_heads:
        raise audio.error(
            f"{audio.prefix}d_model {hidden_size} must be a multiple of the {num_heads} attention heads"
        )
    return num_heads


def _chunked_spec(audio: ConfigFields, output_size: int) -> AudioTowerSpec:
    """Return the tower of Qwen3-ASR, whose rows attend within windows of several chunks."""
    hidden_size = audio.integer("d_model", 1024, maximum=MAX_POSITIONS)
    chunk_frames = 2 * audio.integer("n_window", 50, maximum=MAX_POSITIONS)
    num_frames = audio.integer("n_window_infer", 800, maximum=MAX_POSITIONS)
    if num_frames % chunk_frames:
        raise audio.error(
            f"{audio.prefix}n_window_infer {num_frames} must be a multiple of {chunk_frames}, "
            "which is twice n_window"
        )
    if hidden_size % 2:
        raise audio.wrong("d_model", "an even number", hidden_size)
    if (found := audio.integer("output_dim", output_size)) != output_size:
        raise audio.wrong("output_dim", f"the decoder's hidden_size {output_size}", found)
    return AudioTowerSpec(
        num_mel_bins=audio.integer("num_mel_bins", 128, maximum=1024),
        hidden_size=hidden_size,
        intermediate_size=audio.integer("encoder_ffn_dim", 4096, maximum=MAX_POSITIONS),
        num_layers=audio.integer("encoder_layers", 24, maximum=1024),
        num_heads=_num_heads(audio, hidden_size, 16),
        num_frames=num_frames,
        activation=audio.text("activation_function", "gelu"),
        output_size=output_size,
        join="stack",
        rows_per_output=1,
        silence="skipped",
        chunks=AudioChunks(
            chunk_frames, audio.integer("downsample_hidden_size", 480, maximum=MAX_POSITIONS)
        ),
        has_key_bias=True,
        projection_size=hidden_size,
        projection_activation=audio.text("activation_function", "gelu"),
        tensor_names=(
            (r"\baudio_tower\.ln_post\.", "audio_tower.layer_norm."),
            # The names of Qwen's own checkpoints.
            (r"\baudio_tower\.proj([12])\.", r"multi_modal_projector.linear_\1."),
        ),
    )


def _with_rotary(spec: AudioTowerSpec, audio: ConfigFields) -> AudioTowerSpec:
    """Return the tower of GLM-ASR, which has rotary positions, and other names."""
    head_dim = audio.integer("head_dim", spec.hidden_size // spec.num_heads)
    num_kv_heads = audio.integer("num_key_value_heads", spec.num_heads)
    if head_dim * spec.num_heads != spec.hidden_size or num_kv_heads != spec.num_heads:
        raise audio.error(
            f"{audio.prefix}head_dim {head_dim} and num_key_value_heads {num_kv_heads} must be those of "
            f"{spec.num_heads} equal heads in hidden_size {spec.hidden_size}"
        )
    rope = audio.section("rope_parameters") or audio
    share = rope.number("partial_rotary_factor", 0.5)
    num_rotated = int(head_dim * share)
    if not 0 < num_rotated <= head_dim or num_rotated % 2:
        raise rope.wrong(
            "partial_rotary_factor", f"a share that is an even part of {head_dim}", share
        )
    return msgspec.structs.replace(
        spec,
        activation=audio.text("hidden_act", "gelu"),
        silence="dropped",
        rotary=AudioRotary(rope.number("rope_theta", 10_000.0), num_rotated),
        projection_size=2 * spec.output_size,
        has_projection_bias=True,
        tensor_names=(
            (r"\baudio_tower\.norm\.", "audio_tower.layer_norm."),
            (r"(\baudio_tower\.layers\.\d+\.)self_attn\.o_proj\.", r"\1self_attn.out_proj."),
            (r"(\baudio_tower\.layers\.\d+\.)mlp\.", r"\1"),
            (r"(\baudio_tower\.layers\.\d+\.)input_layernorm\.", r"\1self_attn_layer_norm."),
            (
                r"(\baudio_tower\.layers\.\d+\.)post_attention_layernorm\.",
                r"\1final_layer_norm.",
            ),
        ),
    )
