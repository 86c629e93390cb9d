"""The settings of a transcription session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from msgspec import UNSET

from ...http.errors import bad_request, echo, renaming, wrong
from ..logprobs import Json
from ..routes.transcriptions import Plan, Transcriptions
from ..schema.audio import TranscriptionRequest
from ..schema.realtime import AudioFormat, Session, Transcription, TurnDetection
from .audio import FORMATS, PCM

LOGPROBS: Final = "item.input_audio_transcription.logprobs"

_INPUT: Final = "session.audio.input"
_RATES: Final = (24_000, 16_000)
"""The rates of PCM. OpenAI's API has the first, vLLM's the second."""

MAX_MS: Final = 60_000
"""Maximum of the times of a turn detection in milliseconds."""


@dataclass(slots=True)
class Settings:
    """The settings of a session, as its client set them.

    Attributes:
        format: The name of the audio's format.
        rate: Its rate in Hz.
        transcription: The settings of transcriptions; None if items are not transcribed.
        detection: The settings that find the ends of utterances; None if the client commits them.
        has_logprobs: True if events have log-probabilities.
    """

    format: str
    rate: int
    transcription: Transcription | None
    detection: TurnDetection | None
    has_logprobs: bool = False

    @classmethod
    def default(cls, model: str) -> Settings:
        """Return the settings of a new session."""
        return cls(PCM, _RATES[0], Transcription(model=model), _complete(TurnDetection()))

    def updated(self, session: Session) -> Settings:
        """Return the settings after an update. Fields that it does not have stay as they are.

        Raises:
            APIError: A value is not supported (400).
        """
        if session.type not in (None, "transcription"):
            raise bad_request(
                "session.type",
                f'must be "transcription", got {echo(session.type)}: this server holds no conversations',
            )
        new = Settings(
            self.format, self.rate, self.transcription, self.detection, self.has_logprobs
        )
        if session.include is not UNSET:
            for each in session.include or ():
                if each != LOGPROBS:
                    raise wrong("session.include", f'"{LOGPROBS}"', each)
            new.has_logprobs = bool(session.include)
        audio = session.audio
        if audio is not None and audio.output is not None:
            raise bad_request("session.audio.output", "is not supported: a transcription is text")
        if audio is None or (given := audio.input) is None:
            return new
        if given.noise_reduction is not None:
            raise bad_request(f"{_INPUT}.noise_reduction", "is not supported; send null")
        if given.format is not None:
            new.format, new.rate = _read_format(given.format)
        if given.transcription is not UNSET:
            new.transcription = given.transcription
        if given.turn_detection is not UNSET:
            detection = given.turn_detection
            new.detection = None if detection is None else _complete(detection)
        return new

    def request(self) -> TranscriptionRequest | None:
        """Return the request with which an item is transcribed; None if items are not.

        Raises:
            APIError: A field is not supported (400).
        """
        given = self.transcription
        if given is None:
            return None
        if given.delay is not None:
            raise bad_request(f"{_INPUT}.transcription.delay", "is not supported; leave it out")
        return TranscriptionRequest(
            model=given.model,
            language=given.language,
            languages=given.languages,
            prompt=given.prompt,
            keywords=given.keywords,
            include=["logprobs"] if self.has_logprobs else None,
            stream=True,
        )

    def describe(self, session_id: str) -> Json:
        """Return the session as clients see it."""
        given, detection = self.transcription, self.detection
        form: Json = {"type": self.format}
        if self.format == PCM:
            form["rate"] = self.rate
        return {
            "id": session_id,
            "object": "realtime.transcription_session",
            "type": "transcription",
            "audio": {
                "input": {
                    "format": form,
                    "noise_reduction": None,
                    "transcription": None if given is None else _given(given),
                    "turn_detection": None if detection is None else _given(detection),
                }
            },
            "include": [LOGPROBS] if self.has_logprobs else None,
        }


def make_plan(transcriptions: Transcriptions, request: TranscriptionRequest) -> Plan:
    """Verify a session's settings of transcription, and return the plan by which items are transcribed.

    Raises:
        APIError: A value is not supported (400); the error names the field of the session.
    """

    def rename(name: str) -> str:
        return name if name == "model" else f"{_INPUT}.transcription.{name}"

    with renaming(rename):
        return transcriptions.plan(request)


def _given(fields: Transcription | TurnDetection) -> Json:
    pairs = ((name, getattr(fields, name)) for name in fields.__struct_fields__)
    return {name: value for name, value in pairs if value is not None}


def _read_format(given: AudioFormat) -> tuple[str, int]:
    where = f"{_INPUT}.format"
    name = PCM if given.type is None else given.type
    if name not in FORMATS:
        raise wrong(f"{where}.type", f"one of {', '.join(FORMATS)}", name)
    fixed = FORMATS[name].rate
    rates = _RATES if fixed is None else (fixed,)
    rate = rates[0] if given.rate is None else given.rate
    if rate not in rates:
        raise wrong(f"{where}.rate", " or ".join(map(str, rates)), rate)
    return name, rate


def _complete(given: TurnDetection) -> TurnDetection:
    """Return a turn detection with the defaults of what is missing."""
    where = f"{_INPUT}.turn_detection"
    if given.type not in (None, "server_vad"):
        raise wrong(f"{where}.type", '"server_vad", or turn_detection null', given.type)
    for name in ("idle_timeout_ms", "eagerness"):
        if getattr(given, name) is not None:
            raise bad_request(f"{where}.{name}", "is not supported; leave it out")

    def limited(name: str, default: Any, most: float) -> Any:
        value = getattr(given, name)
        if value is not None and not 0 <= value <= most:
            raise wrong(f"{where}.{name}", f"between 0 and {most}", value)
        return default if value is None else value

    return TurnDetection(
        type="server_vad",
        threshold=limited("threshold", 0.5, 1),
        prefix_padding_ms=limited("prefix_padding_ms", 300, MAX_MS),
        silence_duration_ms=limited("silence_duration_ms", 500, MAX_MS),
    )
