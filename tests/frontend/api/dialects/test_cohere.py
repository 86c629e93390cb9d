"""Cohere's Chat API. The core repeats the last message, so a test says in it what the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.chat.shown_prompts import ANSWER, SCHEMA
from support.requests.chats import last_params
from support.requests.dialects import KEY, dialect_frontend, num_tokens, user
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

HEADERS = {"Authorization": f"Bearer {KEY}"}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with dialect_frontend() as process:
        yield process


def chat(frontend: FrontendProcess, text: str, path: str = "/v2/chat", **fields: Any) -> Any:
    body = {"model": MODEL, "messages": user(text), "max_tokens": num_tokens(frontend, text)}
    return frontend.http.post(path, json=body | fields, headers=HEADERS)


def events_of(response: Any) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    assert lines[-2:] == ["[DONE]", ""]
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_cohere_message_has_blocks_calls_and_usage(frontend: FrontendProcess) -> None:
    answer = chat(frontend, ANSWER, tools=TOOLS).json()
    message, tokens = answer["message"], answer["usage"]["tokens"]
    assert (answer["finish_reason"], message["role"]) == ("MAX_TOKENS", "assistant")
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    calls = [call["function"] for call in message["tool_calls"]]
    assert [json.loads(call["arguments"]) for call in calls] == [{"city": "Oslo"}, {"city": "Rome"}]
    num = num_tokens(frontend, ANSWER)
    assert (tokens["output_tokens"], answer["usage"]["billed_units"]) == (num, tokens)
    for fields, reason in (
        ({"max_tokens": 2}, "MAX_TOKENS"),
        ({"stop_sequences": [" three"]}, "STOP_SEQUENCE"),
    ):
        answer = chat(frontend, "One two three", "/cohere/v2/chat", **fields).json()
        assert answer["message"]["content"] == [{"type": "text", "text": "One two"}]
        assert answer["finish_reason"] == reason
    assert len(chat(frontend, "One two", logprobs=True).json()["logprobs"][0]["token_ids"]) == 2


def test_cohere_stream_has_the_same_message(frontend: FrontendProcess) -> None:
    whole = chat(frontend, ANSWER, tools=TOOLS).json()
    events = events_of(chat(frontend, ANSWER, tools=TOOLS, stream=True))
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1]) == ("message-start", "message-end")
    assert events[-1]["delta"] == {name: whole[name] for name in ("finish_reason", "usage")}
    texts, arguments = {"thinking": "", "text": ""}, ["", ""]
    for event in events[1:-1]:
        message = event.get("delta", {}).get("message", {})
        if event["type"] == "content-delta":
            for kind, text in message["content"].items():
                texts[kind] += text
        elif "tool_calls" in message:
            arguments[event["index"]] += message["tool_calls"]["function"]["arguments"]
    blocks = whole["message"]["content"]
    assert texts == {block["type"]: block[block["type"]] for block in blocks}
    calls = whole["message"]["tool_calls"]
    assert arguments == [call["function"]["arguments"] for call in calls]
    for start, end in (("content-start", "content-end"), ("tool-call-start", "tool-call-end")):
        assert kinds.count(start) == kinds.count(end) == 2


def test_cohere_stream_is_lines_for_clients_that_accept_only_json(
    frontend: FrontendProcess,
) -> None:
    body = {"model": MODEL, "messages": user(ANSWER), "tools": TOOLS, "stream": True}
    body["max_tokens"] = num_tokens(frontend, ANSWER)
    kinds = []
    for accepted in ("application/json", "application/json, text/event-stream", "*/*"):
        headers = HEADERS | {"Accept": accepted}
        kinds.append(frontend.http.post("/v2/chat", json=body, headers=headers))
    lines, *others = kinds
    assert lines.headers["content-type"] == "application/stream+json"
    found = [json.loads(line)["type"] for line in lines.text.splitlines()]
    for other in others:
        assert [event["type"] for event in events_of(other)] == found


def test_cohere_conversation_reaches_the_template(frontend: FrontendProcess) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    document = {"id": "d", "data": {"title": "Sky"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "tool_plan": "I look.", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "document", "document": document}],
        },
    ]
    shown = (
        "[system:Documents:\n\ntext: Rain.\n\nid: d\ntitle: Sky][user:Hi]"
        "[assistant:|I look.|c1 get_weather {}][tool:id: d\ntitle: Sky|c1]"
    )
    answer = chat(frontend, shown, messages=messages, documents=["Rain.", document])
    assert answer.json()["message"]["content"][0]["text"] == shown
    for form in ({"schema": SCHEMA}, {"json_schema": SCHEMA}):
        chat(frontend, "?", response_format={"type": "json_object"} | form)
        assert "city" in last_params(frontend).structured_output.spec
    forced = chat(frontend, "Hi", tools=TOOLS, tool_choice="REQUIRED", p=0.5, k=3, seed=4)
    params = last_params(frontend)
    assert (forced.status_code, params.top_p, params.top_k, params.seed) == (200, 0.5, 3, 4)
    assert "get_weather" in params.structured_output.spec


@pytest.mark.parametrize(
    ("fields", "status", "problem"),
    [
        ({"model": "other"}, 404, 'The model "other" does not exist'),
        ({"messages": None}, 400, "messages is required"),
        ({"messages": [{"role": "x"}]}, 400, "messages[0].role must be"),
        ({"tool_choice": "ANY"}, 400, 'tool_choice must be "REQUIRED" or "NONE"'),
        ({"k": -3}, 400, "k must"),
        ({"thinking": {"type": "x"}}, 400, 'thinking.type must be "enabled"'),
        ({"documents": [3]}, 400, "documents[0] must be"),
    ],
)
def test_cohere_error_has_a_message(
    frontend: FrontendProcess, fields: dict, status: int, problem: str
) -> None:
    refused = chat(frontend, "Hi", **fields)
    assert (refused.status_code, sorted(refused.json())) == (status, ["id", "message"])
    assert refused.json()["message"].startswith(problem)


def test_cohere_text_is_tokenized(frontend: FrontendProcess) -> None:
    body = {"model": MODEL, "text": "Hello world"}
    answer = frontend.http.post("/v1/tokenize", json=body, headers=HEADERS).json()
    assert answer["tokens"] == list(frontend.tokenizer.encode("Hello world"))
    assert "".join(answer["token_strings"]) == "Hello world"
