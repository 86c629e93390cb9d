"""The events of a session, in the format of OpenAI's API or of vLLM."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ...http.errors import APIError
from ...http.websocket import WebSocket
from ..logprobs import Json
from ..routes.transcriptions import usage_of

if TYPE_CHECKING:
    from ...media.transcription.transcriber import Transcript

_ITEM = "conversation.item.input_audio_transcription"


class Events:
    """Sends events in the format of OpenAI's API."""

    has_items: ClassVar[bool] = True
    """True if utterances become items. Otherwise a commit may begin one, and audio is read while it arrives."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    def send(self, kind: str, **fields: Any) -> None:
        """Send an event."""
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **fields}
        self._socket.send(msgspec.json.encode(event))

    def send_session(self, kind: str, session: Json) -> None:
        """Send the settings of the session."""
        self.send(kind, session=session)

    def send_committed(self, item_id: str, previous_id: str | None) -> None:
        """Report that audio became an item."""
        self.send("input_audio_buffer.committed", previous_item_id=previous_id, item_id=item_id)
        item = {
            "id": item_id,
            "object": "realtime.item",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        for kind in ("conversation.item.added", "conversation.item.done"):
            self.send(kind, previous_item_id=previous_id, item=item)

    def send_delta(self, item_id: str, text: str, logprobs: list[Json] | None) -> None:
        """Send a piece of the text of an item."""
        fields = {"item_id": item_id, "content_index": 0, "delta": text}
        if logprobs is not None:
            fields["logprobs"] = logprobs
        self.send(f"{_ITEM}.delta", **fields)

    def send_text(self, item_id: str, transcript: Transcript, logprobs: list[Json] | None) -> None:
        """Send the whole text of an item."""
        fields = {"item_id": item_id, "content_index": 0, "transcript": transcript.text}
        fields["usage"] = usage_of(transcript)
        if logprobs is not None:
            fields["logprobs"] = logprobs
        self.send(f"{_ITEM}.completed", **fields)

    def send_failure(self, item_id: str, error: APIError) -> None:
        """Report that an item could not be transcribed."""
        self.send(f"{_ITEM}.failed", item_id=item_id, content_index=0, error=error.body["error"])

    def send_error(self, error: APIError, event_id: str | None) -> None:
        """Report that a client's event could not be handled."""
        self.send("error", error=error.body["error"] | {"event_id": event_id})


class VLLMEvents(Events):
    """Sends events in the format of vLLM."""

    has_items = False

    def send_session(self, kind: str, session: Json) -> None:
        """Do nothing: only `session.created` has another form, and it was sent."""

    def send_committed(self, item_id: str, previous_id: str | None) -> None:
        """Do nothing, because vLLM has no items."""

    def send_delta(self, item_id: str, text: str, logprobs: list[Json] | None) -> None:
        """Send a piece of the text."""
        self.send("transcription.delta", delta=text, logprobs=logprobs)

    def send_text(self, item_id: str, transcript: Transcript, logprobs: list[Json] | None) -> None:
        """Send the whole text."""
        num_prompt, num_generated = transcript.num_prompt_tokens, transcript.num_generated_tokens
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
        }
        self.send("transcription.done", text=transcript.text, usage=usage)

    def send_failure(self, item_id: str, error: APIError) -> None:
        """Report that audio could not be transcribed."""
        self.send_error(error, None)

    def send_error(self, error: APIError, event_id: str | None) -> None:
        """Report an error."""
        self.send("error", error=error.message, code=error.code or error.type)


def send_created(events: Events, session: Json) -> None:
    """Send the first event, with the fields of both formats."""
    events.send("session.created", id=session["id"], created=int(time.time()), session=session)
