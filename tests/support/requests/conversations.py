"""Requests that take several messages: WebSockets, lines of JSON, batches, and responses in the background.

Each is a function that returns what a client has read, without IDs and times, so that it can be compared.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

import numpy as np
from support.requests import realtime
from support.servers.server import Server
from websockets.sync.client import connect

PATIENCE_S: Final = 120.0
"""Seconds for several recoveries in a row, on a slow machine."""
_PAUSE_S: Final = 0.1
_TURN: Final = {"max_output_tokens": 40, "temperature": 0, "ignore_eos": True}
TOOL: Final[dict[str, Any]] = {
    "name": "look_out",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 12}, "days": {"enum": [1, 2]}},
        "required": ["place", "days"],
        "additionalProperties": False,
    },
}

Conversation: TypeAlias = Callable[[Server], Any]


class Refused(Exception):
    """The server answered with an error."""


def open_websocket(server: Server, path: str) -> Any:
    return connect(server.url.replace("http", "ws", 1) + path, max_size=None, open_timeout=60)


def response_on_socket(server: Server) -> list[Any]:
    """Return the texts of two turns of a response that is not stored."""
    found: list[Any] = []
    previous = None
    with open_websocket(server, "/v1/responses") as socket:
        for text in ("the quick", "brown fox"):
            fields = {"input": text, "store": False, "previous_response_id": previous, **_TURN}
            socket.send(json.dumps({"type": "response.create", "model": "tiny", **fields}))
            deltas = ""
            while (event := json.loads(socket.recv(PATIENCE_S)))["type"] not in (
                *("response.completed", "response.incomplete", "response.failed", "error"),
            ):
                deltas += event.get("delta", "")
            if event["type"] != "response.incomplete":
                raise Refused(event)
            previous = event["response"]["id"]
            found.append((deltas, _output_of(event["response"])))
    return found


def background_response(server: Server) -> Any:
    """Return the output of a response that runs in the background."""
    fields = {"input": "seven wizards", "background": True, "seed": 5, **_TURN, "temperature": 1.0}
    _, response = _checked(server.post("/v1/responses", {"model": "tiny", **fields}))
    while response["status"] in ("queued", "in_progress"):
        time.sleep(_PAUSE_S)
        _, response = _checked(_get_persistently(server, f"/v1/responses/{response['id']}"))
    return response["status"], _output_of(response)


def interaction(server: Server) -> Any:
    """Return the text of an interaction in the background, whose stream is continued whenever it breaks."""
    fields = {"input": "brown fox", "background": True, "store": True, "stream": True}
    config = {"max_output_tokens": 120, "temperature": 0}
    lines = _stream(
        server, "/v1beta/interactions", {"model": "tiny", **fields, "generation_config": config}
    )
    created = _event(next(line for line in lines if line.startswith(b"data: ")))
    path = f"/v1beta/interactions/{created['interaction']['id']}"
    last, text = created["event_id"], ""
    while True:
        with suppress(OSError, http.client.HTTPException):
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                event = _event(line)
                if event["event_type"] == "error":
                    raise Refused(event)
                last = event["event_id"]
                text += event.get("delta", {}).get("text", "")
                if event["event_type"] == "interaction.completed":
                    return text, event["interaction"]["status"]
        time.sleep(_PAUSE_S)
        lines = _stream(server, f"{path}?stream=true&last_event_id={last}", None)


def _event(line: bytes) -> Any:
    return json.loads(line.removeprefix(b"data: "))


def tool_response(server: Server) -> Any:
    """Return the output of a response that must call a tool."""
    tools = [{"type": "function", **TOOL}]
    fields = {"input": "brew tea", "tools": tools, "tool_choice": "required"}
    answer = server.post("/v1/responses", {"model": "tiny", **fields, **_TURN})
    return _output_of(_checked(answer)[1])


def _output_of(response: dict[str, Any]) -> Any:
    return [
        {key: item[key] for key in ("type", "content", "name", "arguments") if key in item}
        for item in response["output"]
    ]


def batch(server: Server) -> Any:
    """Return the results of a batch, whose file is deleted afterwards."""
    bodies = [
        {"model": model, "prompt": [9, 8, seed], "seed": seed, "max_tokens": 20, "ignore_eos": True}
        for seed, model in enumerate(("tiny", "one", "two"))
    ]
    lines = [
        json.dumps({"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body})
        for at, body in enumerate(bodies)
    ]
    part = '--part\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
    form = part.format("purpose", "", "batch") + part.format(
        "file", '; filename="a.jsonl"', "\n".join(lines)
    )
    headers = {"content-type": "multipart/form-data; boundary=part"}
    _, file = _checked(server.post("/v1/files", f"{form}--part--\r\n".encode(), headers=headers))
    fields = {"endpoint": "/v1/completions", "completion_window": "24h"}
    _, job = _checked(server.post("/v1/batches", {"input_file_id": file["id"], **fields}))
    while not job.get("output_file_id"):
        if job["status"] in ("failed", "expired", "cancelled") or job.get("error_file_id"):
            raise Refused(job)
        time.sleep(_PAUSE_S)
        _, job = _checked(_get_persistently(server, f"/v1/batches/{job['id']}"))
    _, text = _checked(_get_persistently(server, f"/v1/files/{job['output_file_id']}/content"))
    results = [json.loads(line) for line in _lines(text)]
    return sorted(
        (each["custom_id"], each["response"]["body"]["choices"][0]["text"]) for each in results
    )


def _lines(text: Any) -> list[str]:
    return text.splitlines() if isinstance(text, str) else [json.dumps(text)]


def ollama_chat(server: Server) -> str:
    """Return the text of lines of JSON in Ollama's format."""
    options = {"num_predict": 40, "temperature": 0, "ignore_eos": True}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "brew tea"}]}
    text = ""
    for line in _stream(server, "/api/chat", body | {"options": options}):
        event = json.loads(line)
        if "error" in event:
            raise Refused(event)
        text += event["message"]["content"]
        if event["done"]:
            return text
    raise OSError("the stream was cut")


def session(server: Server) -> list[list[int]]:
    """Return the tokens of requests that each continue the one before, in SGLang's format."""
    _, session_id = _checked(server.post("/open_session", {}))
    params = {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}
    found: list[list[int]] = []
    previous: dict[str, str] = {}
    for turn in range(3):
        fields = {"input_ids": [9, 8, turn + 5], "rid": str(turn), "sampling_params": params}
        body = fields | {"session_params": {"id": session_id, **previous}}
        _, answer = _checked(server.post("/generate", body))
        found.append(answer["output_ids"])
        previous = {"rid": str(turn)}
    _checked(server.post("/close_session", {"session_id": session_id}))
    return found


def make_adapter_use(path: Path) -> Conversation:
    """Return a use of an adapter that is loaded for it and unloaded afterwards."""

    def adapter_use(server: Server) -> str:
        name = f"adapter-{secrets.token_hex(4)}"
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
        # While no replica is up, none loads it.
        _checked(_persistently(lambda: server.post("/v1/load_lora_adapter", body)))
        fields = {"prompt": [9, 8, 7], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
        _, answer = _checked(server.post("/v1/completions", {"model": name, **fields}))
        _checked(server.post("/v1/unload_lora_adapter", {"lora_name": name}))
        text: str = answer["choices"][0]["text"]
        return text

    return adapter_use


def claude_stream(server: Server) -> str:
    """Return the text of a stream in Anthropic's format."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "brew tea"}]}
    fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}
    text = ""
    for line in _stream(server, "/v1/messages", body | fields):
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if event["type"] == "error":
            raise Refused(event)
        text += event.get("delta", {}).get("text", "")
        if event["type"] == "message_stop":
            return text
    raise OSError("the stream was cut")


def _stream(server: Server, path: str, body: dict[str, Any] | None) -> Iterator[bytes]:
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port or 0, timeout=PATIENCE_S
    )
    try:
        headers = {"content-type": "application/json"}
        method = "GET" if body is None else "POST"
        connection.request(method, path, json.dumps(body) if body else None, headers)
        response = connection.getresponse()
        if response.status == 503:
            raise OSError("no replica is up")
        if response.status != 200:
            raise Refused(response.status, response.read())
        yield from response
    finally:
        connection.close()


def make_live_session(samples: np.ndarray) -> Conversation:
    """Return a session that transcribes the samples twice, each time in two halves."""

    def live_session(server: Server) -> list[str]:
        pcm = realtime.to_pcm(samples)
        half = len(pcm) // 4 * 2
        texts: list[str] = []
        with open_websocket(server, "/v1/realtime?model=tiny") as socket:

            def read(end: str) -> Any:
                while (event := json.loads(socket.recv(PATIENCE_S)))["type"] != end:
                    if event["type"].endswith((".failed", "error")):
                        raise Refused(event)
                return event

            read("session.created")
            settings = realtime.session_of(model="tiny")
            socket.send(json.dumps({"type": "session.update", "session": settings}))
            read("session.updated")
            for _ in range(2):
                for piece in (pcm[:half], pcm[half:]):
                    audio = base64.b64encode(piece).decode()
                    socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                    time.sleep(_PAUSE_S)
                socket.send(json.dumps({"type": "input_audio_buffer.commit"}))
                end = read("conversation.item.input_audio_transcription.completed")
                texts.append(end["transcript"])
        return texts

    return live_session


def _get_persistently(server: Server, path: str) -> tuple[int, Any]:
    """Return an answer of a server with a store."""
    return _persistently(lambda: server.get(path))


def _persistently(ask: Callable[[], tuple[int, Any]]) -> tuple[int, Any]:
    """Return an answer of a server whose processes may be restarted meanwhile."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            status, answer = ask()
        except (OSError, http.client.HTTPException):
            if time.monotonic() > deadline:
                raise
        else:
            if status != 503 or time.monotonic() > deadline:
                return status, answer
        time.sleep(_PAUSE_S)


def _checked(answer: tuple[int, Any]) -> tuple[int, Any]:
    if answer[0] != 200:
        raise Refused(*answer)
    return answer
