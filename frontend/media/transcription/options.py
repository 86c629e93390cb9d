"""The options that callers set for a transcription (language, task, prompt, …), and their checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

import msgspec

from ....protocol.config import EngineConfig, ParallelConfig
from ....protocol.config.audio.processor import AudioProcessorConfig
from ....protocol.config.chat_audio import ChatAudioConfig
from ....protocol.errors import ParameterError
from ...http.shown_values import echo
from .languages import LANGUAGE_NAMES, find_language

CHAT_WINDOW_S: Final = 30.0
"""The maximum length in seconds of a window that a chat model transcribes. It also fits into half of the context.

Shorter windows have more exact times, and more of them are decoded at the same time.
"""

TURNS_WINDOW_S: Final = 600.0
"""The same for a chat model that names speakers, which it knows only within a window."""

_MAX_LISTED: Final = 120
"""The maximum number of languages that an error lists."""


class Task(StrEnum):
    """The task of a speech model: transcribe in the spoken language, or translate to English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


class TranscriptionOptions(msgspec.Struct, frozen=True):
    """The options of a transcription.

    Attributes:
        task: The task: transcription or translation.
        language: The code of the spoken language; "" to detect it.
        languages: The codes of the languages among which it is detected; empty for all languages of the model.
        prompt: Text that the model continues, as an example of style and spelling.
        keywords: Words that occur in the clip.
        temperature: 0 decodes greedily, and tries higher temperatures if the text repeats itself or is doubtful.
        seed: The seed of sampling at other temperatures; None for a random one.
        sampling: Other sampling parameters, such as penalties.
        max_tokens: The maximum number of tokens of each window; None for that of the model.
        has_segments: True to return segments with times.
        has_words: True to return words with times.
        has_speakers: True to name the speaker of each segment.
        is_streamed: True if text is sent as it is generated. No window can be decoded again then.
    """

    task: Task = Task.TRANSCRIBE
    language: str = ""
    languages: tuple[str, ...] = ()
    prompt: str = ""
    keywords: tuple[str, ...] = ()
    temperature: float = 0.0
    seed: int | None = None
    sampling: Mapping[str, Any] = msgspec.field(default_factory=dict)
    max_tokens: int | None = None
    has_segments: bool = False
    has_words: bool = False
    has_speakers: bool = False
    is_streamed: bool = False

    @property
    def context(self) -> str:
        """The prompt, and the keywords after it, for models that read one text."""
        return f"{self.prompt} {', '.join(self.keywords)}".strip()


class SpeechModel(msgspec.Struct, frozen=True):
    """The abilities of a model that transcribes.

    Attributes:
        languages: The codes of the languages that a caller may give; empty if the model always detects the language.
        translates: True if the model can write an English translation.
        no_word_times: Why the model cannot report the times of single words; "" if it can.
        needs_language: True if a caller must give the language.
        reads_prompt: True if the model reads a caller's text.
        reads_keywords: True if it reads words that occur in the clip.
        names_speakers: True if it writes who speaks.
        sampling_rate: Samples per second.
        window_seconds: The maximum length of a window in seconds.
        audio: The decoder's prompts of an encoder-decoder model; None for a chat model.
    """

    languages: Collection[str]
    translates: bool
    no_word_times: str
    needs_language: bool
    reads_prompt: bool
    sampling_rate: int
    window_seconds: float
    reads_keywords: bool = False
    names_speakers: bool = False
    audio: AudioProcessorConfig | None = None


def speech_model(config: EngineConfig) -> SpeechModel | None:
    """Return the abilities of a model that transcribes; None for other models, and without a tokenizer."""
    model = config.model
    if not model.has_tokenizer:
        return None
    if (audio := model.audio) is not None:
        seconds = audio.chunk_seconds
        if (added := audio.added) is not None:
            # One more output than the silence around a clip has.
            num_outputs = max(1, model.max_model_len - added.num_outputs(0))
            seconds = min(seconds, num_outputs * added.samples_per_output / audio.sampling_rate)
        return SpeechModel(
            languages=LANGUAGE_NAMES
            if audio.writes_tokens
            else ()
            if added is not None
            else audio.languages or audio.language_token_ids or ("en",),
            translates=audio.translates,
            no_word_times="" if audio.writes_tokens else _no_alignment(audio, config.parallel),
            needs_language=bool(audio.languages),
            reads_prompt=audio.previous_token_id >= 0,
            reads_keywords=audio.previous_token_id >= 0,
            sampling_rate=audio.sampling_rate,
            window_seconds=seconds,
            audio=audio,
        )
    if model.chat_audio is None or (speech := model.chat_audio.speech) is None:
        return None
    return SpeechModel(
        languages=speech.languages,
        translates=bool(speech.translation),
        no_word_times="writes text without times",
        needs_language=False,
        reads_prompt=speech.has_context,
        sampling_rate=model.chat_audio.rate,
        window_seconds=min(
            TURNS_WINDOW_S if speech.turns else CHAT_WINDOW_S,
            _half_context_s(model.chat_audio, model.max_model_len),
        ),
        reads_keywords=speech.has_context or speech.reads_keywords,
        names_speakers=bool(speech.turns),
    )


def _no_alignment(audio: AudioProcessorConfig, parallel: ParallelConfig) -> str:
    """Return why the model cannot align its tokens with the clip; "" if it can."""
    if not audio.alignment_heads:
        return "has no alignment heads (generation_config.json)"
    num_stages = parallel.pipeline_parallel_size
    return f"is served with --pipeline-parallel-size {num_stages}" if num_stages > 1 else ""


def _half_context_s(audio: ChatAudioConfig, max_model_len: int) -> float:
    """Return the length in seconds of a clip whose embeddings fill half of the context."""
    samples_per_output = audio.window_samples / audio.outputs_per_window
    return max_model_len / 2 * samples_per_output / audio.rate


def verify_transcribes(config: EngineConfig) -> SpeechModel:
    """Return the abilities of a model that transcribes. Raise ParameterError if the model does not transcribe."""
    found, model = speech_model(config), config.model
    if found is None:
        reads_speech = model.audio is not None or model.chat_audio is not None
        lacks_tokenizer = reads_speech and not model.has_tokenizer
        problem = "is served without its tokenizer" if lacks_tokenizer else "is not a speech model"
        raise ParameterError(
            "model", f"{model.served_names[0]!r} {problem}, so it cannot transcribe"
        )
    return found


def parse_language(given: str | None, model: SpeechModel, field: str = "language") -> str:
    """Return the code of a language given by its code or name in a field; "" to detect it.

    Raises:
        ParameterError: The language is unknown, or the model does not support it.
    """
    if not given:
        return ""
    if not model.languages:
        raise ParameterError(
            field,
            f"is not supported by this model, which detects the language itself, got {echo(given)}",
        )
    # The model may have codes of its own.
    code = find_language(given) or given.strip().lower()
    if code not in model.languages:
        raise ParameterError(
            field,
            f"must be one of the model's languages ({_listed(model.languages)}), got {echo(given)}",
        )
    return code


def _listed(languages: Collection[str]) -> str:
    """Return the codes of languages, the shortest first, up to a length that an error may have."""
    codes = sorted(languages, key=lambda code: (len(code), code))
    rest = len(codes) - _MAX_LISTED
    more = f" and {rest} more" if rest > 0 else ""
    return ", ".join(codes[:_MAX_LISTED]) + more


def parse_languages(given: Sequence[str], model: SpeechModel) -> tuple[str, ...]:
    """Return the codes of the languages among which the language is detected, or of the only one.

    Raises:
        ParameterError: A language is unknown, or the model cannot choose among some of its languages.
    """
    codes = tuple(dict.fromkeys(parse_language(each, model, "languages") for each in given))
    detects = model.audio is not None and model.audio.language_token_ids
    if len(codes) > 1 and (model.needs_language or not detects):
        raise ParameterError(
            "languages",
            f"must have one language for this model, which cannot choose among {len(codes)} languages",
        )
    return codes


def verify_options(options: TranscriptionOptions, model: SpeechModel) -> None:
    """Verify options that depend on the model. Raise ParameterError if the model does not support an option."""
    if options.task is Task.TRANSLATE and not model.translates:
        raise ParameterError("model", "writes only the spoken language; it cannot translate")
    if model.needs_language and not options.language:
        names = ", ".join(sorted(model.languages))
        raise ParameterError(
            "language", f"is required, because this model does not detect it; one of {names}"
        )
    if options.has_words and model.no_word_times:
        raise ParameterError(
            "timestamp_granularities",
            f"must not contain word, because the model {model.no_word_times}",
        )
    reads = {"prompt": model.reads_prompt, "keywords": model.reads_keywords}
    for name, is_read in reads.items():
        if getattr(options, name) and not is_read:
            raise ParameterError(name, "is not supported by this model, which accepts only audio")
    if model.audio is not None and model.audio.writes_tokens:
        sampling = {"temperature": options.temperature, "max_completion_tokens": options.max_tokens}
        for name, value in {**sampling, **options.sampling}.items():
            if value:
                problem = "must be omitted, because the model writes the most probable tokens"
                raise ParameterError(name, f"{problem}, got {value}")
    if options.has_speakers and not model.names_speakers:
        raise ParameterError(
            "response_format", "must not be diarized_json, because the model does not name speakers"
        )
