"""Write responses and their events as interactions of Google's Interactions API.

Each event of a response becomes at most one event of the interaction, whose `event_id` is the number of the former.
So a client that resumes after any event gets exactly the rest.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ....http.errors import APIError
from ....http.json_pieces import encode_whole
from ...logprobs import Json
from .answer import error_status
from .interaction_request import sign

_STATUSES: Final = {"queued": "in_progress"}
"""Status of a response -> of an interaction. Others are the same."""

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data: "


class Response(msgspec.Struct):
    """The fields of a response that an interaction has too."""

    id: str
    status: str
    model: str | None = None
    created_at: int = 0
    completed_at: int | None = None
    output: list[Json] = []
    usage: Json | None = None
    previous_response_id: str | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    error: Json | None = None


class _Event(msgspec.Struct):
    type: str
    sequence_number: int = 0
    response: Response | None = None
    output_index: int = 0
    item: Json | None = None
    delta: Any = None
    text: str = ""
    # Of an error before the response existed.
    code: str | None = None
    message: str | None = None


_decode_response: Final = msgspec.json.Decoder(Response).decode
_decode_event: Final = msgspec.json.Decoder(_Event).decode


def error_body(error: APIError, request_id: str) -> Json:
    """Return the body of an error. Unlike in the rest of Gemini's API, its code is a text."""
    return {"error": {"code": error_status(error), "message": error.message}}


def write_whole(response: bytes, given: list[Json] | None = None) -> Json:
    """Return a response as an interaction, with the items that it was `given` as its input."""
    found = _interaction(_decode_response(response))
    if given is not None:
        found["input"] = [_step(item) for item in given]
    return found


def _interaction(response: Response) -> Json:
    found: Json = {
        "id": response.id,
        "object": "interaction",
        "model": response.model,
        "status": _status(response),
        "created": _time(response.created_at),
        "updated": _time(response.completed_at or response.created_at),
        "steps": [_step(item) for item in response.output],
    }
    if response.usage is not None:
        found["usage"] = _usage(response.usage)
    if response.error is not None:
        found["errors"] = [_error(response.error)]
    for name, value in (
        ("previous_interaction_id", response.previous_response_id),
        ("system_instruction", response.instructions),
        ("labels", response.metadata),
    ):
        if value:
            found[name] = value
    return found


def _status(response: Response) -> str:
    if response.status == "completed" and any(
        item["type"] == "function_call" for item in response.output
    ):
        return "requires_action"
    return _STATUSES.get(response.status, response.status)


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _error(error: Json) -> Json:
    return {"code": error.get("code"), "message": error.get("message")}


def _usage(usage: Json) -> Json:
    num_thoughts = usage["output_tokens_details"]["reasoning_tokens"]
    return {
        "total_input_tokens": usage["input_tokens"],
        "total_cached_tokens": usage["input_tokens_details"]["cached_tokens"],
        "total_output_tokens": usage["output_tokens"] - num_thoughts,
        "total_thought_tokens": num_thoughts,
        "total_tool_use_tokens": 0,
        "total_tokens": usage["total_tokens"],
    }


def _step(item: Json) -> Json:
    """Return the step for a finished item."""
    match item["type"]:
        case "message":
            kind = "model_output" if item["role"] == "assistant" else "user_input"
            return {"type": kind, "content": [_content(part) for part in item["content"]]}
        case "reasoning":
            return _thought(item)
        case "function_call":
            step = _begun(item)
            try:
                arguments = msgspec.json.decode(item["arguments"])
            except msgspec.DecodeError:
                # The answer was cut within them.
                arguments = None
            step["arguments"] = arguments if isinstance(arguments, dict) else {}
            return step
        case "function_call_output":
            output = item["output"]
            result = output if isinstance(output, str) else [_content(part) for part in output]
            step = {"type": "function_result", "call_id": item["call_id"], "result": result}
            return step | ({"name": item["name"]} if "name" in item else {})
    # Requests of the Responses API may have other items. Clients show steps that they do not know.
    return item


def _begun(item: Json) -> Json:
    """Return the step for an item that begins."""
    match item["type"]:
        case "message":
            return {"type": "model_output"}
        case "reasoning":
            return {"type": "thought"}
        case "function_call":
            step: Json = {"type": "function_call", "id": item["call_id"], "name": item["name"]}
            return step | {"arguments": {}}
    return item


def _thought(item: Json) -> Json:
    step: Json = {"type": "thought"}
    shown = [part["text"] for part in item.get("summary") or ()]
    if shown:
        step["summary"] = [{"type": "text", "text": text} for text in shown]
    if texts := shown or [part["text"] for part in item.get("content") or ()]:
        step["signature"] = sign("\n\n".join(texts))
    return step


def _content(part: Json) -> Json:
    match part["type"]:
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": part["text"]}
        case "input_image" if "image_url" in part:
            return _media("image", part["image_url"])
        case "video_url" if isinstance(part.get("video_url"), dict):
            return _media("video", part["video_url"]["url"])
        case "input_file" if "file_data" in part:
            return _media("document", part["file_data"])
        case "input_audio":
            audio = part["input_audio"]
            form = audio.get("format") or "wav"
            return _media("audio", f"data:audio/{form};base64,{audio['data']}")
    # A stored file, which only the Responses API has.
    return part


def _media(kind: str, url: str) -> Json:
    if not url.startswith("data:"):
        return {"type": kind, "uri": url}
    head, _, data = url.partition(",")
    media_type = head.removeprefix("data:").removesuffix(";base64")
    return {"type": kind, "mime_type": media_type, "data": data}


class InteractionEvents:
    """Translates the events of one response.

    Attributes:
        interaction_id: The identifier of the response; "" before its first event.
        has_ended: True after the last event of an interaction.
    """

    def __init__(self, interaction_id: str = "") -> None:
        self.interaction_id = interaction_id
        self.has_ended = False

    def translate(self, events: bytes) -> bytes:
        """Return the events of the interaction for complete events of the response. Comments are kept."""
        return b"".join(self._translate(event) for event in events.split(_EVENT_END) if event)

    def ending(self, response: bytes) -> bytes:
        """Return the last event of a response that has ended without one, because it was cancelled."""
        self.has_ended = True
        interaction = _interaction(_decode_response(response))
        return _encode({"event_type": "interaction.completed", "interaction": interaction})

    def _translate(self, event: bytes) -> bytes:
        _, found, content = event.rpartition(_DATA)
        if not found or event.startswith(b":"):
            return event + _EVENT_END
        decoded = _decode_event(content)
        translated = self._event(decoded)
        if translated is None:
            return b""
        return _encode(translated | {"event_id": str(decoded.sequence_number)})

    def _event(self, event: _Event) -> Json | None:
        """Return the event of the interaction; None if it has no such event."""
        match event.type:
            case "response.created" if event.response is not None:
                self.interaction_id = event.response.id
                interaction = _interaction(event.response)
                return {"event_type": "interaction.created", "interaction": interaction}
            case "response.in_progress" if event.response is not None:
                status = {"interaction_id": event.response.id, "status": "in_progress"}
                return {"event_type": "interaction.status_update", **status}
            case "response.output_item.added" if event.item is not None:
                step = _begun(event.item)
                return {"event_type": "step.start", "index": event.output_index, "step": step}
            case "response.output_item.done":
                return {"event_type": "step.stop", "index": event.output_index}
            case "response.completed" | "response.incomplete" if event.response is not None:
                self.has_ended = True
                interaction = _interaction(event.response)
                return {"event_type": "interaction.completed", "interaction": interaction}
            case "response.failed" if event.response is not None:
                self.has_ended = True
                return {"event_type": "error", "error": _error(event.response.error or {})}
            case "error":
                self.has_ended = True
                error = {"code": event.code or "INTERNAL", "message": event.message}
                return {"event_type": "error", "error": error}
        delta = _delta(event)
        if delta is None:
            return None
        return {"event_type": "step.delta", "index": event.output_index, "delta": delta}


def _delta(event: _Event) -> Json | None:
    match event.type:
        case "response.output_text.delta":
            return {"type": "text", "text": event.delta}
        case "response.function_call_arguments.delta":
            return {"type": "arguments_delta", "arguments": event.delta}
        case "response.reasoning_summary_text.delta":
            return {"type": "thought_summary", "content": {"type": "text", "text": event.delta}}
        case "response.reasoning_summary_text.done" | "response.reasoning_text.done":
            return {"type": "thought_signature", "signature": sign(event.text)}
    return None


def _encode(event: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["event_type"].encode(), encode_whole(event))
