"""Bodies of requests to the Responses API, whose core repeats the last message."""

from __future__ import annotations

import json
from typing import Any, get_args

import pydantic
from openai.types.responses import Response, ResponseStreamEvent
from support.chat.shown_prompts import SCHEMA
from support.servers.frontend_process import MODEL, FrontendProcess

TOOLS: list[Any] = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
AGENT_MESSAGE = {
    "type": "agent_message",
    "author": "/root/a",
    "recipient": "/root",
    "content": [
        {"type": "input_text", "text": "Done"},
        {"type": "encrypted_content", "encrypted_content": "QWJj"},
    ],
}
FUNCTION: dict[str, Any] = {"type": "function", "name": "read"}
NAMESPACE: dict[str, Any] = {"type": "namespace", "name": "files", "tools": [FUNCTION]}


def num_tokens(frontend: FrontendProcess, text: str) -> int:
    return len(frontend.tokenizer.encode(text))


def options(frontend: FrontendProcess, text: str) -> dict[str, Any]:
    return {"model": MODEL, "max_output_tokens": num_tokens(frontend, text), "input": text}


def check_events(frontend: FrontendProcess, body: dict[str, Any], **headers: str) -> list[Any]:
    """Return the output of a response, after a check of its stream by the types of OpenAI's client.

    Every event must be valid, in place, and have fields that the type of the event knows. The last one must have the
    output that the whole response has.
    """
    answer = frontend.http.post("/v1/responses", json=body | {"stream": True}, headers=headers)
    assert answer.status_code == 200, answer.text
    types = {get_args(each.model_fields["type"].annotation)[0]: each for each in _event_types()}
    lines = answer.text.splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    for number, event in enumerate(events):
        kind = types[event["type"]]
        pydantic.TypeAdapter(kind).validate_python(event)
        assert event["sequence_number"] == number and not event.keys() - kind.model_fields.keys()
    whole = frontend.http.post("/v1/responses", json=body, headers=headers).json()
    pydantic.TypeAdapter(Response).validate_python(whole)
    output = whole["output"]
    assert _without_ids(events[-1]["response"]["output"]) == _without_ids(output)
    return output


def _event_types() -> tuple[Any, ...]:
    union, *_ = get_args(ResponseStreamEvent)
    return get_args(union)


def _without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]
