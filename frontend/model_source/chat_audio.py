"""Read how a chat model reads audio clips, from its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...protocol.checkpoint.audio_tower import audio_section, audio_tower_spec, has_audio_tower
from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.config.chat_audio import ChatAudioConfig, Framing, SpeechFormat
from ..media.transcription.languages import LANGUAGE_NAMES

_QWEN3_ASR: Final = SpeechFormat(
    languages={
        "ar": "Arabic",
        "cs": "Czech",
        "da": "Danish",
        "de": "German",
        "el": "Greek",
        "en": "English",
        "es": "Spanish",
        "fa": "Persian",
        "fi": "Finnish",
        "fil": "Filipino",
        "fr": "French",
        "hi": "Hindi",
        "hu": "Hungarian",
        "id": "Indonesian",
        "it": "Italian",
        "ja": "Japanese",
        "ko": "Korean",
        "mk": "Macedonian",
        "ms": "Malay",
        "nl": "Dutch",
        "pl": "Polish",
        "pt": "Portuguese",
        "ro": "Romanian",
        "ru": "Russian",
        "sv": "Swedish",
        "th": "Thai",
        "tr": "Turkish",
        "vi": "Vietnamese",
        "yue": "Cantonese",
        "zh": "Chinese",
    },
    has_context=True,
    answer="language {language}<asr_text>",
    language_mark="language ",
    text_mark="<asr_text>",
)
_SPEECH: Final = {
    "glmasr": SpeechFormat(instruction="Please transcribe this audio into text"),
    "granite_speech": SpeechFormat(
        instruction="can you transcribe the speech into a written format?",
        translation="translate the speech to English",
        is_inline=True,
    ),
    "qwen3_asr": _QWEN3_ASR,
    "voxtral": SpeechFormat(
        # Mistral's tokenizer accepts every code of two letters.
        languages={code: code for code in LANGUAGE_NAMES if len(code) == 2},
        answer="lang:{language}",
        task_mark="[TRANSCRIBE]",
    ),
}
"""The conversation in which each model type transcribes, as its processor in transformers writes it."""

_FRAMING: Final = {
    "glmasr": Framing.WINDOWS,
    "granite_speech": Framing.PAIRS,
    "qwen3_asr": Framing.CLIP,
}
_MAX_WINDOWS: Final = {"granite_speech": 1, "qwen2_audio": 1}
"""Qwen2-Audio reads a single window, and its processor drops the rest of an audio clip."""

_MIN_SAMPLES: Final = {"qwen3_asr": 8000}
"""Qwen3-ASR's processor fills shorter clips with silence, because very short clips confuse the model."""


def read_chat_audio(path: Path, config: ConfigFields, text: ConfigFields) -> ChatAudioConfig | None:
    """Return how the model reads audio clips; None if it reads none.

    Args:
        path: The directory of the checkpoint.
        config: The config of the checkpoint.
        text: The text decoder's section of the config.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    if not has_audio_tower(config) or not path.is_dir():
        return None
    kind, section = config.text("model_type"), audio_section(config)
    has_id = section.get("audio_token_id") is not None
    return ChatAudioConfig(
        token_id=section.integer(
            "audio_token_id" if has_id else "audio_token_index",
            minimum=0,
            maximum=text.integer("vocab_size") - 1,
        ),
        tower=audio_tower_spec(config, text.integer("hidden_size")),
        framing=_FRAMING.get(kind, Framing.FILLED),
        max_windows=_MAX_WINDOWS.get(kind, 0),
        min_samples=_MIN_SAMPLES.get(kind, 0),
        speech=_SPEECH.get(kind),
    )
