"""The forms of transcriptions and translations."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from . import Int, SamplingFields


class InputAudio(msgspec.Struct):
    """An audio file. Its `format` is found by its content."""

    data: str
    format: str | None = None


class TranslationRequest(SamplingFields, kw_only=True):
    """The fields other than `file` in the form of `POST /v1/audio/translations`."""

    model: str | None = None
    # The URL of the clip, in place of the file, as in vLLM's batches.
    file_url: str | None = None
    # In JSON: the file in base64, which may be a data URL. The object is OpenRouter's.
    file: str | None = None
    input_audio: InputAudio | None = None
    prompt: str | None = None
    response_format: str | None = None
    # The language of the clip; detected if absent.
    language: str | None = None
    seed: Int | None = None
    # Words that occur in the clip.
    hotwords: str | None = None
    # The tokens of each window, as in vLLM.
    max_completion_tokens: Int | None = None
    stream: bool | None = None
    # A stream has vLLM's chunks if one of these is given.
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None
    priority: Int | None = None
    # The tenant. Ignored if the server has several API keys.
    user: str | None = None

    # The language of the answer, as in vLLM. Only English is possible, in a translation.
    to_language: str | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = (
        "use_beam_search n length_penalty include_stop_str_in_output vllm_xargs watermarking"
    )


class TranscriptionRequest(TranslationRequest, kw_only=True):
    """The fields other than `file` in the form of `POST /v1/audio/transcriptions`."""

    timestamp_granularities: list[str] | None = None
    include: list[str] | None = None
    # The possible languages of the clip, and words that occur in it.
    languages: list[str] | None = None
    keywords: list[str] | None = None
    # Long audio clips are always split at quiet places. An object may only have a type.
    chunking_strategy: str | dict[str, str] | None = None

    # Rejected, because an answer that ignores them would be wrong.
    rejected: ClassVar[str] = "known_speaker_names known_speaker_references"
