"""A frontend that shuts down answers every request that has arrived, in whatever phase that request is."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from engine.protocol.supervisor_messages import Stage
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

PROMPT = "One two three"
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3}
TOOL = {"name": "look", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
LOOK = {"type": "function", "function": TOOL}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "several outputs": (
        "/v1/completions",
        {
            "prompt": [PROMPT, PROMPT],
            "n": 2,
            "max_tokens": 3,
            "structured_outputs": {"regex": "a*"},
        },
    ),
    "best of": (
        "/v1/completions",
        {"prompt": PROMPT, "best_of": 3, "max_tokens": 3, "structured_outputs": {"regex": "b*"}},
    ),
    "a stream": ("/v1/chat/completions", {**CHAT, "stream": True, "response_format": FORMAT}),
    "tools": ("/v1/chat/completions", {**CHAT, "tools": [LOOK], "tool_choice": "required"}),
    "a response": (
        "/v1/responses",
        {
            "input": PROMPT,
            "max_output_tokens": 3,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        },
    ),
    "a background response": (
        "/v1/responses",
        {
            "input": PROMPT,
            "max_output_tokens": 3,
            "background": True,
            "text": {"format": {"type": "json_schema", "name": "b", "schema": SCHEMA}},
        },
    ),
    "messages": (
        "/v1/messages",
        {
            **CHAT,
            "tools": [{"name": "look", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
    "beams": (
        "/v1/completions",
        {"prompt": PROMPT, "use_beam_search": True, "n": 2, "max_tokens": 3},
    ),
    "a list of texts": ("/v1/completions", {"prompt": [PROMPT] * 40, "max_tokens": 3}),
    "several chats": ("/v1/chat/completions/batch", {**CHAT, "messages": [CHAT["messages"]] * 2}),
    "tokens": ("/tokenize", {"prompt": PROMPT}),
}
"""Most need several phases before the core gets anything, such as the check of a grammar in another process."""


class Exchange:
    """A request whose head has arrived: the server waits for the body."""

    def __init__(self, frontend: FrontendProcess, path: str, body: dict[str, Any]) -> None:
        self._body = json.dumps(body).encode()
        self._socket = socket.create_connection(("127.0.0.1", frontend.port), 20)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(self._body)}\r\nexpect: 100-continue\r\n"
        self._socket.sendall(f"{head}connection: close\r\n\r\n".encode())
        assert self._socket.recv(100).startswith(b"HTTP/1.1 100 ")

    def send_body(self) -> None:
        self._socket.sendall(self._body)

    def read(self) -> tuple[int, str]:
        """Return the status and the rest of the response."""
        with self._socket, self._socket.makefile("rb") as file:
            return int(file.readline().split()[1]), file.read().decode()


def test_requests_that_arrived_pass_all_phases_during_a_shutdown() -> None:
    with FrontendProcess() as frontend:
        exchanges = {name: Exchange(frontend, *each) for name, each in REQUESTS.items()}
        frontend.begin_stop()
        frontend.wait_for_stage(Stage.DRAINING)
        for exchange in exchanges.values():
            exchange.send_body()
        refused = frontend.post("/v1/completions", prompt=PROMPT)
        assert refused.status_code == 503 and "shutting down" in refused.text
        answers = {name: exchange.read() for name, exchange in exchanges.items()}
        statuses = {name: status for name, (status, _) in answers.items()}
        assert statuses == dict.fromkeys(REQUESTS, 200), answers
        assert "data: [DONE]" in answers["a stream"][1] and "error" not in answers["a stream"][1]
        assert frontend.process.wait(20) == 0
        assert "Traceback" not in frontend.log
