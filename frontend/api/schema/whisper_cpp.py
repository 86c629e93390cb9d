"""The form of whisper.cpp's server."""

from __future__ import annotations

from typing import Any

import msgspec

from . import Int


class InferenceRequest(msgspec.Struct, kw_only=True):
    """The fields other than `file` in the form of `POST /inference`."""

    model: str | None = None
    response_format: str | None = None
    # The language of the clip, English if absent; auto detects it.
    language: str | None = None
    detect_language: bool | None = None
    translate: bool | None = None
    prompt: str | None = None
    temperature: float | None = None
    # Text without times.
    no_timestamps: bool | None = None
    # The words of each segment with their times, in verbose_json.
    token_timestamps: bool | None = None
    # The number of subtitles before the first one.
    offset_n: Int | None = None

    # Fields that have a single value (see `ONLY`).
    temperature_inc: float | None = None
    no_speech_thold: float | None = None
    entropy_thold: float | None = None
    logprob_thold: float | None = None
    offset_t: Int | None = None
    duration: Int | None = None
    audio_ctx: Int | None = None
    max_len: Int | None = None
    beam_size: Int | None = None
    diarize: bool | None = None
    tinydiarize: bool | None = None
    suppress_nst: bool | None = None
    suppress_non_speech: bool | None = None
    vad: bool | None = None

    # Fields that have no effect on a text that is cut at quiet places and decoded greedily.
    best_of: Any = None
    carry_initial_prompt: Any = None
    debug_mode: Any = None
    max_context: Any = None
    no_language_probabilities: Any = None
    split_on_word: Any = None
    word_thold: Any = None
