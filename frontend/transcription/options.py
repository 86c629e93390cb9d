"""The options of a transcription."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ...protocol.config import ModelConfig
from ...protocol.config.model import AudioProcessorConfig
from ...protocol.errors import ParameterError
from ..http.shown_values import echo
from .languages import find_language


class Task(StrEnum):
    """Write down what is said, or translate it to English."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


@dataclass(frozen=True, slots=True)
class TranscriptionOptions:
    """The options of a transcription.

    Attributes:
        task: What to write.
        language: The code of the spoken language; "" to detect it.
        prompt: Text before the sound, which shows style and spelling.
        temperature: 0 decodes greedily, and tries higher temperatures if the text repeats itself or is doubtful.
        seed: The seed of sampling at other temperatures; None for a random one.
        has_segments: Whether segments with times are wanted.
        has_words: Whether words with times are wanted.
        is_streamed: Whether text is shown as it is written, so no window can be decoded again.
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
    """Return how a model that transcribes reads sounds.

    Raises:
        ParameterError: It does not transcribe.
    """
    if model.audio is None or not model.has_tokenizer:
        problem = "is no speech model" if model.audio is None else "is served without its tokenizer"
        raise ParameterError(
            "model", f"{model.served_names[0]!r} {problem}, so it cannot transcribe"
        )
    return model.audio


def parse_language(given: str | None, audio: AudioProcessorConfig) -> str:
    """Return the code of a language given by its code or name; "" to detect it.

    Raises:
        ParameterError: The language is unknown, or the model does not know it.
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
    """Verify what depends on the model.

    Raises:
        ParameterError: The model cannot do it.
    """
    if options.task is Task.TRANSLATE and audio.translate_token_id < 0:
        raise ParameterError(
            "model", "writes only the language that is spoken; it cannot translate"
        )
    if options.has_words and not audio.alignment_heads:
        raise ParameterError(
            "timestamp_granularities",
            "must not have word, because the model has no alignment heads (generation_config.json)",
        )
    if options.prompt and audio.previous_token_id < 0:
        raise ParameterError("prompt", "is not supported by this model, which reads only the sound")
