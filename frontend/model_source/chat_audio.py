"""Read from a checkpoint the settings with which a chat model reads audio clips."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

from ...protocol.checkpoint.audio.tower import (
    NEMOTRON_OMNI,
    audio_section,
    audio_tower_spec,
    has_audio_tower,
)
from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.gguf_config.mmproj.audio import LFM2_PLACEHOLDERS, PLACEHOLDERS
from ...protocol.checkpoint.gguf_config.mmproj.fields import Mmproj
from ...protocol.checkpoint.speech import ADDED_KINDS
from ...protocol.config.chat_audio import (
    ChatAudioConfig,
    ClipMarks,
    Framing,
    SpeechFormat,
    TimeMarks,
)
from ...protocol.errors import CheckpointError
from ..media.transcription.languages import LANGUAGE_NAMES
from ..media.transcription.omniasr import omniasr_languages
from ..tokenizer.config import TokenizerConfig
from .audio_features import verify_features

_NAMES: Final = {code: name.title() for code, name in LANGUAGE_NAMES.items()}
_QWEN3_LANGUAGES: Final = (
    "ar cs da de el en es fa fi fil fr hi hu id it ja ko mk ms nl pl pt ro ru sv th tr vi yue zh"
)
_QWEN3_ASR: Final = SpeechFormat(
    languages={code: _NAMES[code] for code in _QWEN3_LANGUAGES.split()},
    has_context=True,
    answer="language {language}<asr_text>",
    language_mark="language ",
    text_mark="<asr_text>",
)
_STYLE: Final = """Follow these specific instructions for formatting the answer:
* Only output the transcription, with no newlines.
* When transcribing numbers, write the digits, i.e. write 1.7 and not one point seven, and write 3 instead of three."""

_GRANITE: Final = SpeechFormat(
    instruction="{audio}can you transcribe the speech into a written format?",
    translation="{audio}translate the speech to English",
)
_GEMMA4: Final = SpeechFormat(
    languages=_NAMES,
    instruction="Transcribe the following speech segment[ in {language} into {language} text].\n\n"
    + _STYLE,
)
_SPEECH: Final = {
    "audioflamingo3": SpeechFormat(instruction="Transcribe the input speech.", follows=True),
    "fireredasr2": SpeechFormat(
        prompt="<|im_start|>user\n{audio}请转写音频为文字<|im_end|>\n<|im_start|>assistant\n"
    ),
    "fun_asr_nano": SpeechFormat(
        languages={"en": "英文", "ja": "日文", "zh": "中文"},
        has_parts=True,
        has_context=True,
        reads_keywords=True,
    ),
    "funasr": SpeechFormat(
        prompt="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n语音转写：{audio}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "gemma3n": SpeechFormat(
        languages=_NAMES,
        instruction="Transcribe this audio[ into {language}]: {audio}",
        translation="Translate this audio[ from {language}] into English: {audio}",
    ),
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "glmasr": SpeechFormat(instruction="Please transcribe this audio into text"),
    "granite_speech": _GRANITE,
    "granite_speech_plus": _GRANITE,
    "meralion2": SpeechFormat(
        instruction="Instruction: Please transcribe this speech. \nFollow the text instruction based on the following "
        "audio: {audio}"
    ),
    "moss_transcribe_diarize": SpeechFormat(has_parts=True, reads_keywords=True, turns="marks"),
    "omniasr": SpeechFormat(has_parts=True),
    "qwen3_asr": _QWEN3_ASR,
    "vibevoice_asr": SpeechFormat(has_parts=True, has_context=True, turns="json"),
    "voxtral": SpeechFormat(
        # Mistral's tokenizer accepts every code of two letters.
        languages={code: code for code in LANGUAGE_NAMES if len(code) == 2},
        answer="lang:{language}",
        task_mark="[TRANSCRIBE]",
    ),
}
"""The conversation in which each model type transcribes, as its processor in transformers or its authors write it."""

_FRAMING: Final = {
    "gemma3n": Framing.EMPHASIZED,
    "gemma4": Framing.LEADING,
    "embedding_gemma2": Framing.LEADING,
    "gemma4_unified": Framing.SAMPLES,
    "audioflamingo3": Framing.WINDOWS,
    "dots3_note": Framing.WINDOWS,
    "midashenglm": Framing.DECIBELS,
    "musicflamingo": Framing.WINDOWS,
    "fireredasr2": Framing.KALDI,
    **dict.fromkeys(("fun_asr_nano", "funasr"), Framing.STACKED),
    "funaudiochat": Framing.PADDED,
    **dict.fromkeys(("lfm2_audio", *NEMOTRON_OMNI), Framing.NORMED),
    "moss_audio": Framing.CLIP,
    "glmasr": Framing.WINDOWS,
    "moss_transcribe_diarize": Framing.WINDOWS,
    "granite_speech": Framing.PAIRS,
    "granite_speech_plus": Framing.PAIRS,
    "qwen2_5_omni_thinker": Framing.PADDED,
    "qwen3_asr": Framing.CLIP,
    "vibevoice_asr": Framing.WAVE,
    "qwen3_omni_moe_thinker": Framing.CLIP,
    "omniasr": Framing.STANDARD,
    "ultravox": Framing.CLIP,
}
_MAX_WINDOWS: Final = {
    # 300 s, as in its processor.
    "funaudiochat": 150,
    "audioflamingo3": 20,
    "meralion2": 10,
    "musicflamingo": 40,
    **dict.fromkeys(("gemma3n", "gemma4", "embedding_gemma2"), 1),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), 1),
    "qwen2_audio": 1,
    # Their encoders read a clip as a whole.
    **dict.fromkeys(("fireredasr2", "fun_asr_nano", "funasr", "lfm2_audio"), 1),
    **dict.fromkeys(("midashenglm", "omniasr"), 1),
    **dict.fromkeys(NEMOTRON_OMNI, 1),
}
"""The processors of Audio Flamingo 3, Music Flamingo, Qwen2-Audio and Gemma drop the rest of an audio clip."""

_TOKENS: Final = {
    **dict.fromkeys(("fireredasr2", "funasr"), ("<|AUDIO|>",)),
    "dots3_note": ("<|audio_comp_pad|>",),
    # Its clips have no token in texts.
    "lfm2_audio": LFM2_PLACEHOLDERS,
    "midashenglm": ("<|AUDIO|>",),
    "ultravox": PLACEHOLDERS,
    "voxtral": ("[AUDIO]",),
}
"""The texts of tokens that may stand for audio where the config does not have its id: the first that exists."""

_MIN_SAMPLES: Final = {
    "qwen3_asr": 8000,
    "funaudiochat": 400,
    "midashenglm": 3200,
    "fireredasr2": 1040,
}
"""Processors fill shorter clips with silence, Qwen3-ASR's because very short clips confuse the model."""

_MARKS: Final = {"moss_audio": "<|audio_bos|><|AUDIO|><|audio_eos|>", "ultravox": "<|audio|>"}
"""The texts of clips in prompts that are no tokens."""

_AROUND: Final = dict.fromkeys(("funaudiochat", "midashenglm"), ("<|audio_bos|>", "<|audio_eos|>"))
"""The texts around a clip's tokens if the chat template reads only text."""


_VIBEVOICE: Final[dict[str, Any]] = {
    "rate": 24_000,
    "duration_mark": "<|AUDIO_DURATION|>",
}


def read_chat_audio(
    path: Path,
    config: ConfigFields,
    text: ConfigFields,
    mmproj: Mmproj | None = None,
    tokenizer: Path | None = None,
) -> ChatAudioConfig | None:
    """Return the settings with which the model reads audio clips; None if it reads none.

    Args:
        path: The directory of the checkpoint.
        config: The config of the checkpoint.
        text: The text decoder's section of the config.
        mmproj: The file with the towers of a GGUF model.
        tokenizer: The directory of the tokenizer.json, if another one than that of the checkpoint.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    kind, section = config.text("model_type", ""), audio_section(config)
    if not has_audio_tower(config) or kind in ADDED_KINDS:
        return None
    if not path.is_dir() and mmproj is None:
        return None
    found = ChatAudioConfig(
        token_id=_read_token(
            tokenizer or path,
            _moss_processor(path) if kind == "moss_audio" else section,
            text.integer("vocab_size"),
        ),
        tower=audio_tower_spec(config, text.integer("hidden_size")),
        framing=_FRAMING.get(kind, Framing.FILLED),
        max_windows=_MAX_WINDOWS.get(kind, 0),
        min_samples=_MIN_SAMPLES.get(kind, 0),
        speech=_read_speech(tokenizer or path, kind),
        marks=_read_marks(path if kind == "moss_audio" else tokenizer or path, config),
        times=_read_times(path, kind),
        norms=_read_norms(path, kind),
        mark=_MARKS.get(kind, ""),
        around=_AROUND.get(kind, ("", "")) if mmproj is None else mmproj.around_clip,
        **(_VIBEVOICE if kind == "vibevoice_asr" else {}),
    )
    verify_features(path, found)
    return found


def _read_speech(tokenizer: Path, kind: str) -> SpeechFormat | None:
    found = _SPEECH.get(kind)
    if kind == "omniasr" and found is not None:
        return msgspec.structs.replace(found, languages=omniasr_languages(tokenizer))
    return found


def _read_token(tokenizer: Path, section: ConfigFields, vocab_size: int) -> int:
    """Return the placeholder token of audio."""
    has_id = section.get("audio_token_id") is not None
    if not has_id and (texts := _TOKENS.get(section.text("model_type", ""))) is not None:
        # Ultravox has a field in its config, which is the id of a word.
        found = TokenizerConfig(tokenizer)
        for id_ in map(found.added_token_id, texts):
            if id_ is not None and id_ < vocab_size:
                return id_
        raise CheckpointError(tokenizer, f"the tokenizer has none of the tokens {', '.join(texts)}")
    name = "audio_token_id" if has_id else "audio_token_index"
    return section.integer(name, minimum=0, maximum=vocab_size - 1)


def _read_marks(path: Path, config: ConfigFields) -> ClipMarks | None:
    kind = config.text("model_type")
    if kind in NEMOTRON_OMNI:
        begin, end = (_added_token(path, text) for text in ("<so_start>", "<so_end>"))
        return ClipMarks(begin, end)
    if kind == "moss_audio":
        processor = _moss_processor(path)
        return ClipMarks(
            processor.integer("audio_start_id", 151_669, minimum=0),
            processor.integer("audio_end_id", 151_670, minimum=0),
            are_unnamed=True,
        )
    if kind == "musicflamingo":
        return ClipMarks(
            config.integer("audio_bos_token_id", 151_670, minimum=0),
            config.integer("audio_eos_token_id", 151_671, minimum=0),
        )
    if not kind.startswith(("gemma3n", "gemma4", "embedding_gemma2")):
        return None
    is_fixed = kind == "gemma3n"
    name, default = ("eoa_token_id", 262_272) if is_fixed else ("eoa_token_index", 258_883)
    return ClipMarks(
        config.integer("boa_token_id", 256_000, minimum=0),
        config.integer(name, default, minimum=0),
        has_end_output=is_fixed,
        margin="\n\n" if is_fixed else "",
    )


def _added_token(path: Path, text: str) -> int:
    """Return a token that only the tokenizer's files name."""
    found = TokenizerConfig(path).added_token_id(text)
    if found is None:
        raise CheckpointError(path, f"the tokenizer has no token {text!r}; download it again")
    return found


def _read_times(path: Path, kind: str) -> TimeMarks | None:
    """Return the times that the processors of MOSS add to a clip."""
    if kind == "moss_audio" and _moss_processor(path).boolean("enable_time_marker", False):
        return TimeMarks(12.5, 2)
    if kind != "moss_transcribe_diarize":
        return None
    processor = ConfigFields.read_if_present(path / "processor_config.json")
    seconds = processor.integer("time_marker_every_seconds", 2, minimum=0)
    if not seconds:
        return None
    times = TimeMarks(processor.positive("audio_tokens_per_second", 12.5), seconds)
    return times if times.num_outputs else None


def _read_norms(path: Path, kind: str) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the means of FireRedASR2's features, and the factors of the differences from them."""
    if kind != "fireredasr2":
        return None
    processor = ConfigFields.read_if_present(path / "preprocessor_config.json")
    found = processor.get("means"), processor.get("inverse_std_variences")
    try:
        means, scales = msgspec.convert(found, tuple[tuple[float, ...], tuple[float, ...]])
    except msgspec.ValidationError:
        means = scales = ()
    count = processor.integer("num_mel_bins", 80)
    if not len(means) == len(scales) == count:
        raise processor.wrong("means", f"{count} numbers, as inverse_std_variences", found[0])
    return means, scales


def _moss_processor(path: Path) -> ConfigFields:
    """Return the settings of MOSS-Audio's processor."""
    joined = ConfigFields.read_if_present(path / "processor_config.json")
    other = ConfigFields.read_if_present(path / "preprocessor_config.json")
    found = joined if joined.config else other
    return found.with_values({"audio_token_id": found.get("audio_token_id", 151_654)})
