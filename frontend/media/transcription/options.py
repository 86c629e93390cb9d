"""The options that callers set for a transcription (language, task, prompt, …), and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ....protocol.config import ModelConfig
from ....protocol.config.model import AudioProcessorConfig
from ....protocol.errors import ParameterError
from ...http.shown_values import echo
from .languages import find_language


class Task(StrEnum):
    """The task of a speech model: transcribe in the spoken language, or translate to English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """The options of a transcription.

    Attributes:
        task: Whether to transcribe or to translate.
        language: The code of the spoken language; "" to detect it.
        prompt: Text that the model continues, as an example of style and spelling.
        temperature: 0 decodes greedily, and tries higher temperatures if the text repeats itself or is doubtful.
        seed: The seed of sampling at other temperatures; None for a random one.
        has_segments: Whether to return segments with times.
        has_words: Whether to return words with times.
        is_streamed: Whether text is sent as it is generated. No window can be decoded again then.
    """

    task: Task = Task.TRANSCRIBE
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None
    has_segments: bool = False
    has_words: bool = False
    is_streamed: bool = False


def verify_transcribes(model: ModelConfig) -> AudioProcessorConfig:
    """Return the audio configuration of a model that transcribes.

    Raises:
        ParameterError: The model does not transcribe.
    """
    if model.audio is None or not model.has_tokenizer:
        problem = (
            "is not a speech model" if model.audio is None else "is served without its tokenizer"
        )
        raise ParameterError(
            "model", f"{model.served_names[0]!r} {problem}, so it cannot transcribe"
        )
    return model.audio


def parse_language(given: str | None, audio: AudioProcessorConfig) -> str:
    """Return the code of a language given by its code or name; "" to detect it.

    Raises:
        ParameterError: The language is unknown, or the model does not support it.
    """
    if not given:
        return ""
    code = find_language(given)
    known = audio.language_token_ids or {"en": 0}
    if code not in known:
        names = ", ".join(sorted(known))
        raise ParameterError(
            "language", f"must be one of the model's languages ({names}), got {echo(given)}"
        )
    return code


def verify_options(options: TranscriptionOptions, audio: AudioProcessorConfig) -> None:
    """Verify options that depend on the model.

    Raises:
        ParameterError: The model does not support an option.
    """
    if options.task is Task.TRANSLATE and audio.translate_token_id < 0:
        raise ParameterError("model", "writes only the spoken language; it cannot translate")
    if options.has_words and not audio.alignment_heads:
        raise ParameterError(
            "timestamp_granularities",
            "must not contain word, because the model has no alignment heads (generation_config.json)",
        )
    if options.prompt and audio.previous_token_id < 0:
        raise ParameterError("prompt", "is not supported by this model, which accepts only audio")
