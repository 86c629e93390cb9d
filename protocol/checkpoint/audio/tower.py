"""Read the config of a checkpoint's audio tower, which turns audio clips into embeddings for the decoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ...config.audio.tower import AnyAudioSpec
from ..config_fields import ConfigFields
from .codecs import codec_spec
from .conformers import conformer_spec, frames_spec, gemma3n_spec, gemma4_spec
from .convolutions import wave_spec
from .memory import memory_spec, published_memory_spec
from .patches import patches_spec
from .speech_encoders import lfm2_audio_spec, nemotron_omni_spec, relative_conformer_spec
from .token_writers import omniasr_spec
from .whisper_towers import (
    audio_flamingo_spec,
    causal_spec,
    dots3_note_spec,
    fun_audio_chat_spec,
    glm_asr_spec,
    meralion_spec,
    moss_audio_spec,
    moss_transcribe_spec,
    music_flamingo_spec,
    qwen2_5_omni_spec,
    qwen2_audio_spec,
    qwen3_asr_spec,
    qwen3_omni_spec,
    ultravox_spec,
    voxtral_spec,
)

_THINKER: Final = "thinker_config"

_READERS: Final[dict[str, Callable[[ConfigFields, ConfigFields, int], AnyAudioSpec]]] = {
    "audioflamingo3": audio_flamingo_spec,
    "dots3_note": dots3_note_spec,
    "embedding_gemma2": gemma4_spec,
    "fireredasr2": relative_conformer_spec,
    "fun_asr_nano": memory_spec,
    "funasr": published_memory_spec,
    "funaudiochat": fun_audio_chat_spec,
    "gemma3n": gemma3n_spec,
    "gemma4": gemma4_spec,
    "gemma4_unified": frames_spec,
    "glmasr": glm_asr_spec,
    "granite_speech": conformer_spec,
    "granite_speech_plus": conformer_spec,
    "kyutai_speech_to_text": codec_spec,
    "lfm2_audio": lfm2_audio_spec,
    "meralion2": meralion_spec,
    "midashenglm": patches_spec,
    "moss_audio": moss_audio_spec,
    "moss_transcribe_diarize": moss_transcribe_spec,
    "musicflamingo": music_flamingo_spec,
    "nemotron_h_omni": nemotron_omni_spec,
    "NemotronH_Nano_VL_V2": nemotron_omni_spec,
    "omniasr": omniasr_spec,
    "qwen2_5_omni_thinker": qwen2_5_omni_spec,
    "qwen2_audio": qwen2_audio_spec,
    "qwen3_asr": qwen3_asr_spec,
    "qwen3_omni_moe_thinker": qwen3_omni_spec,
    "ultravox": ultravox_spec,
    "vibevoice_asr": wave_spec,
    "voxtral": voxtral_spec,
    "voxtral_realtime": causal_spec,
}
"""The function of each model type. Its arguments are the config, the encoder's section and the decoder's size."""

NEMOTRON_OMNI: Final = ("nemotron_h_omni", "NemotronH_Nano_VL_V2")
"""Model types of Nemotron Omni. mmproj files describe its vision tower like the older one without audio."""

_SECTIONS: Final = {
    "fireredasr2": "audio_encoder_conf",
    "funasr": "audio_encoder_conf",
    "granite": "encoder_config",
    "kyutai": "codec_config",
    "midashenglm": "audio_encoder_config",
    "vibevoice": "acoustic_tokenizer_encoder_config",
}
"""The section of the encoder, if it has another name than that of other models."""


def audio_section(fields: ConfigFields) -> ConfigFields:
    """Return the section of a config that describes how audio is read, which is the config itself for most models."""
    return fields.section(_THINKER) or fields


def has_audio_tower(fields: ConfigFields) -> bool:
    """Return whether a model with this config has an audio tower that Engine supports."""
    kind = fields.text("model_type", "")
    section = audio_section(fields).section(_section_name(kind))
    return kind in _READERS and section is not None


def _section_name(kind: str) -> str:
    return _SECTIONS.get(kind.partition("_")[0], "audio_config")


def audio_tower_spec(fields: ConfigFields, output_size: int) -> AnyAudioSpec:
    """Return the audio tower of a model for which `has_audio_tower` is true.

    Args:
        fields: The content of a config.json.
        output_size: The hidden size of the decoder.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    kind = fields.text("model_type")
    audio = audio_section(fields).required_section(_section_name(kind))
    return _READERS[kind](fields, audio, output_size)
