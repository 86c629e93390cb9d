"""The events that clients send in OpenAI's Realtime API."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from . import Int


class AudioFormat(msgspec.Struct, kw_only=True):
    """The format of the audio that a client sends."""

    type: str | None = None
    rate: Int | None = None


class Transcription(msgspec.Struct, kw_only=True):
    """The settings of the transcription."""

    model: str | None = None
    language: str | None = None
    languages: list[str] | None = None
    prompt: str | None = None
    keywords: list[str] | None = None
    delay: Any = None


class TurnDetection(msgspec.Struct, kw_only=True):
    """The settings by which the server detects that a speaker has stopped."""

    type: str | None = None
    threshold: float | None = None
    prefix_padding_ms: Int | None = None
    silence_duration_ms: Int | None = None
    idle_timeout_ms: Any = None
    eagerness: Any = None

    # Transcription sessions have no responses, so these have no effect.
    create_response: bool | None = None
    interrupt_response: bool | None = None


class AudioInput(msgspec.Struct, kw_only=True):
    """The settings of the input."""

    format: AudioFormat | None = None
    noise_reduction: Any = None
    transcription: Transcription | UnsetType | None = UNSET
    turn_detection: TurnDetection | UnsetType | None = UNSET


class SessionAudio(msgspec.Struct, kw_only=True):
    """The settings of audio."""

    input: AudioInput | None = None
    output: Any = None


class Session(msgspec.Struct, kw_only=True):
    """The settings of a session."""

    type: str | None = None
    audio: SessionAudio | None = None
    include: list[str] | UnsetType | None = UNSET


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """The seconds after its creation for which a client secret is valid."""

    anchor: str | None = None
    seconds: Int | None = None


class ClientSecretRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/realtime/client_secrets`."""

    expires_after: ExpiresAfter | None = None
    session: Session | None = None


class SessionUpdate(msgspec.Struct, kw_only=True):
    """Changes the settings. vLLM's clients send no `session`, but `model` and the other fields here."""

    type: str
    event_id: str | None = None
    session: Session | None = None
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    include: list[str] | None = None


class AudioAppend(msgspec.Struct, kw_only=True):
    """Adds audio, in base64."""

    type: str
    audio: bytes
    event_id: str | None = None


class AudioCommit(msgspec.Struct, kw_only=True):
    """Ends the audio of an utterance. vLLM's clients also begin one with it, and set `final` at the end."""

    type: str
    event_id: str | None = None
    final: bool | None = None


class AudioClear(msgspec.Struct, kw_only=True):
    """Drops the audio that was not committed."""

    type: str
    event_id: str | None = None
