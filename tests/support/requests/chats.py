"""Requests to the route of chats, and what tests read of its answers."""

from __future__ import annotations

import shutil
from pathlib import Path

from engine.frontend.tokenizer.converted import tokenizer_json_path
from support.servers.frontend_process import MODEL, FrontendProcess
from support.servers.server import default_model

TEXT = "One two three four five"

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

TIME = {"type": "function", "function": {"name": "get_time"}}


def user(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def chat(frontend: FrontendProcess, **fields) -> dict:
    fields.setdefault("messages", MESSAGES)
    response = frontend.post("/v1/chat/completions", model=MODEL, **fields)
    assert response.status_code == 200, response.text
    return response.json()


def marked_tokenizer(path: Path) -> Path:
    """Write a tokenizer with tokens for the marks of reasoning, and return its directory `path`."""
    original = tokenizer_json_path(default_model())
    shutil.copytree(original.parent, path, dirs_exist_ok=True)
    content = original.read_text().replace('"<repo_name>"', '"<think>"')
    (path / original.name).write_text(content.replace('"<reponame>"', '"</think>"'))
    return path


def last_params(frontend: FrontendProcess):
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    return added.requests[0].sampling_params


def num_tokens(frontend: FrontendProcess, text: str) -> int:
    return len(frontend.tokenizer.encode(text))


CALLS = (
    '[{"name": "get_weather", "parameters": {"city": "O\\"s]lo"}}, '
    '{"name": "get_time", "parameters": {}}]'
)


def accumulate(events: list[dict]) -> tuple[list[dict], str, str]:
    """Return the calls, the content and the finish reason of a stream with one choice."""
    calls: list[dict] = []
    content, reason = "", ""
    for event in events:
        [choice] = event["choices"]
        content += choice["delta"].get("content") or ""
        for piece in choice["delta"].get("tool_calls", []):
            if piece["index"] == len(calls):
                assert piece["id"] and piece["type"] == "function"
                calls.append({"name": piece["function"]["name"], "arguments": ""})
            calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return calls, content, reason
