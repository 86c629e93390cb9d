"""Transcription sessions of OpenAI's Realtime API."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import openai
import soundfile

RATE = 16_000
CHUNK_BYTES = 16_384


def to_pcm(samples: np.ndarray) -> bytes:
    return np.clip(np.round(samples * 32767), -32768, 32767).astype("<i2").tobytes()


def to_file(samples: np.ndarray) -> tuple[str, bytes]:
    """Return a file with the samples that `to_pcm` returns."""
    file = io.BytesIO()
    pcm = np.frombuffer(to_pcm(samples), "<i2")
    soundfile.write(file, pcm, RATE, format="WAV", subtype="PCM_16")
    return "sound.wav", file.getvalue()


def session_of(detection: dict[str, Any] | None = None, **transcription: Any) -> dict[str, Any]:
    """Return the settings of a session."""
    audio_input = {
        "format": {"type": "audio/pcm", "rate": RATE},
        "transcription": transcription,
        "turn_detection": detection,
    }
    return {"type": "transcription", "audio": {"input": audio_input}}


def append(connection: Any, data: bytes) -> None:
    """Send audio in pieces."""
    for start in range(0, len(data), CHUNK_BYTES):
        piece = base64.b64encode(data[start : start + CHUNK_BYTES]).decode()
        connection.input_audio_buffer.append(audio=piece)


def read_item(connection: Any, *first: Any) -> tuple[str, list[Any]]:
    """Return the text of the next item, and the events until its end, of which `first` were received."""
    events = [*first, connection.recv()]
    while not events[-1].type.endswith((".completed", ".failed")):
        assert events[-1].type != "error", events[-1]
        events.append(connection.recv())
    assert events[-1].type.endswith(".completed"), events[-1]
    deltas = [event.delta for event in events if event.type.endswith(".delta")]
    assert "".join(deltas).strip() == events[-1].transcript
    return events[-1].transcript, events


def transcribe(url: str, samples: np.ndarray, **transcription: Any) -> str:
    """Return the text of an utterance, in a session of its own."""
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    with client.realtime.connect(extra_query={"intent": "transcription"}) as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session=session_of(**transcription))
        assert connection.recv().type == "session.updated"
        append(connection, to_pcm(samples))
        connection.input_audio_buffer.commit()
        return read_item(connection)[0]
