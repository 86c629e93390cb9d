"""Google's Interactions API. The core repeats the last message, so a test says in it what the model writes.

The requests are those of `google-genai` 3.6.1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.chat.shown_prompts import ANSWER, PIXEL, SCHEMA
from support.processes.program import wait_until
from support.requests.chats import last_params
from support.requests.dialects import KEY, dialect_frontend, num_tokens
from support.servers.frontend_process import MODEL, FrontendProcess

pytestmark = pytest.mark.slow

PATH = "/v1beta/interactions"
HEADERS = {"x-goog-api-key": KEY}
TOOLS = [{"type": "function", "name": "get_weather", "parameters": SCHEMA}]
SHOWN = {"thinking_summaries": "auto"}


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with dialect_frontend() as process:
        yield process


def post(frontend: FrontendProcess, path: str = "", **body: Any) -> Any:
    return frontend.http.post(PATH + path, json=body, headers=HEADERS)


def get(frontend: FrontendProcess, identifier: str, **query: Any) -> Any:
    return frontend.http.get(f"{PATH}/{identifier}", params=query, headers=HEADERS)


def create(frontend: FrontendProcess, given: Any, shown: str = "", **body: Any) -> Any:
    """Return an interaction whose model writes `shown`, by default the input."""
    config = {"max_output_tokens": num_tokens(frontend, shown or given)}
    config |= body.pop("generation_config", {})
    answer = post(frontend, model=MODEL, input=given, generation_config=config, **body)
    assert answer.status_code == 200, answer.text
    return answer if body.get("stream") else answer.json()


def events_of(answer: Any) -> list[Any]:
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def joined(events: list[Any], kind: str, name: str) -> str:
    deltas = [event["delta"] for event in events if event["event_type"] == "step.delta"]
    return "".join(delta[name] for delta in deltas if delta["type"] == kind)


def without(interaction: Any, *names: str) -> Any:
    left_out = ("id", "created", "updated", "event_id", *names)
    return {name: value for name, value in interaction.items() if name not in left_out}


def test_interaction_has_steps_and_usage(frontend: FrontendProcess) -> None:
    found = create(frontend, ANSWER, tools=TOOLS, generation_config=SHOWN, labels={"a": "b"})
    thought, text, *calls = found["steps"]
    assert thought["summary"] == [{"type": "text", "text": "Let me see."}]
    assert text == {
        "type": "model_output",
        "content": [{"type": "text", "text": "I look it up."}],
    }
    assert [(call["name"], call["arguments"]) for call in calls] == [
        ("get_weather", {"city": "Oslo"}),
        ("get_weather", {"city": "Rome"}),
    ]
    usage, total = found["usage"], num_tokens(frontend, ANSWER)
    assert usage["total_output_tokens"] + usage["total_thought_tokens"] == total
    assert (usage["total_tokens"], found["labels"]) == (2 * total, {"a": "b"})
    hidden = create(frontend, ANSWER, tools=TOOLS)["steps"][0]
    assert hidden == without(thought, "summary") and hidden["signature"]


def test_interaction_with_calls_requires_action(frontend: FrontendProcess) -> None:
    # A stop string ends the answer before the limit cuts it.
    config = {"stop_sequences": ["zebra"], "max_output_tokens": 400}
    whole = create(frontend, f"{ANSWER}zebra", tools=TOOLS, generation_config=config)
    assert whole["status"] == "requires_action"
    text = create(frontend, "Hello zebra", generation_config=config)
    assert (text["status"], text["steps"][0]["content"][0]["text"]) == ("completed", "Hello ")


def test_interaction_stream_has_the_same_steps(frontend: FrontendProcess) -> None:
    body: Any = {"tools": TOOLS, "generation_config": SHOWN, "system_instruction": None}
    whole = create(frontend, ANSWER, **body)
    events = events_of(create(frontend, ANSWER, stream=True, **body))
    kinds = [event["event_type"] for event in events]
    assert kinds[:3] == ["interaction.created", "interaction.status_update", "step.start"]
    assert kinds[-1] == "interaction.completed" and kinds.count("step.start") == 4
    begun = [event["step"]["type"] for event in events if event["event_type"] == "step.start"]
    assert begun == [step["type"] for step in whole["steps"]]
    assert joined(events, "text", "text") == "I look it up."
    arguments = [step["arguments"] for step in whole["steps"][2:]]
    assert joined(events, "arguments_delta", "arguments") == "".join(map(json.dumps, arguments))
    assert joined(events, "thought_signature", "signature") == whole["steps"][0]["signature"]
    final = events[-1]["interaction"]
    assert [without(step) for step in final["steps"]] == [without(s) for s in whole["steps"]]
    used = [{**each["usage"], "total_cached_tokens": 0} for each in (final, whole)]
    assert used[0] == used[1]


def test_interaction_continues_with_results_of_functions(frontend: FrontendProcess) -> None:
    first = create(frontend, ANSWER, tools=TOOLS)
    *_, call, second = first["steps"]
    results = [
        {
            "type": "function_result",
            "call_id": call["id"],
            "name": "get_weather",
            "result": {"t": 5},
        },
        {"type": "function_result", "call_id": second["id"], "result": "no", "is_error": True},
    ]
    shown = (
        f"[user:{ANSWER}][assistant:I look it up.|Let me see.|{call['id']} get_weather "
        f'{{"city": "Oslo"}}|{second["id"]} get_weather {{"city": "Rome"}}]'
        f'[tool:{{"t": 5}}|{call["id"]}][tool:Error: no|{second["id"]}]'
    )
    earlier = {"previous_interaction_id": first["id"]}
    continued = create(frontend, results, shown, **earlier, tools=None)
    # The echo has the calls of the prompt as calls again, so it is compared without the tools.
    texts = [part["text"] for step in continued["steps"] for part in step["content"]]
    assert texts == [shown] and continued["previous_interaction_id"] == first["id"]
    # A client without storage sends all steps, with the thought in its signature.
    user = {"type": "user_input", "content": [{"type": "text", "text": ANSWER}]}
    sent = create(frontend, [user, *first["steps"], *results], shown, store=False)
    assert sent["steps"] == continued["steps"]
    assert get(frontend, sent["id"]).status_code == 404
    read = get(frontend, continued["id"], include_input=True).json()
    assert [step["type"] for step in read["input"]] == ["function_result"] * 2
    assert read["input"][0]["result"] == '{"t": 5}'
    assert without(read, "input") == without(continued)


def test_interaction_may_have_a_format(frontend: FrontendProcess) -> None:
    form = {"type": "text", "mime_type": "application/json", "schema": SCHEMA}
    for body in (
        {"response_format": form},
        {"response_format": [form]},
        {"response_format": SCHEMA, "response_mime_type": "application/json"},
    ):
        create(frontend, "Hi", **body)
        constraint = last_params(frontend).structured_output
        assert constraint is not None and "city" in constraint.spec
    create(frontend, "Hi", response_mime_type="application/json")
    constraint = last_params(frontend).structured_output
    assert constraint is not None and "city" not in constraint.spec
    create(frontend, "Hi", tools=TOOLS, generation_config={"tool_choice": "any"})
    assert last_params(frontend).structured_output is not None


def test_interaction_in_background_is_read_cancelled_and_deleted(frontend: FrontendProcess) -> None:
    text = "One two three four five"
    begun = create(frontend, text, background=True)
    assert begun["status"] == "in_progress"
    wait_until(lambda: get(frontend, begun["id"]).json()["status"] == "incomplete")
    assert get(frontend, begun["id"]).json()["steps"][0]["content"][0]["text"] == text
    events = events_of(create(frontend, text, background=True, stream=True))
    identifier = events[0]["interaction"]["id"]
    assert events_of(get(frontend, identifier, stream=True)) == events
    for i, event in enumerate(events[:-1]):
        rest = get(frontend, identifier, stream=True, last_event_id=event["event_id"])
        assert events_of(rest) == events[i + 1 :]
    config = {"max_output_tokens": 900}
    running = create(frontend, text, background=True, generation_config=config)["id"]
    assert post(frontend, f"/{running}/cancel").json()["status"] == "cancelled"
    last = events_of(get(frontend, running, stream=True))[-1]
    assert last["interaction"]["status"] == "cancelled"
    deleted = frontend.http.delete(f"{PATH}/{identifier}", headers=HEADERS)
    assert (deleted.status_code, deleted.json()) == (200, {})
    assert get(frontend, identifier).json()["error"]["code"] == "NOT_FOUND"


IMAGE = {"type": "image", "mime_type": "image/png", "data": PIXEL}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "nope"}, 'model "nope"'),
        ({"agent": "deep-research"}, "agent "),
        ({"environment": "e"}, "environment "),
        ({"cached_content": "c"}, "cached_content "),
        ({"input": IMAGE}, "input.type"),
        ({"input": [{"type": "text", "text": "x"}, IMAGE]}, "input[1].type"),
        ({"input": [{"type": "user_input", "content": [IMAGE]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "google_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_result", "call_id": "a"}]}, "input[0].result"),
        ({"input": None}, "input "),
        ({"tools": [{"type": "google_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "mcp_server", "url": "http://a"}]}, "tools[0].type"),
        ({"generation_config": {"temperature": -1}}, "generation_config.temperature "),
        ({"generation_config": {"max_output_tokens": 0}}, "generation_config.max_output_tokens "),
        ({"generation_config": {"seed": "x"}}, "generation_config.seed "),
        ({"generation_config": {"thinking_level": "x"}}, "generation_config.thinking_level "),
        ({"generation_config": {"tool_choice": "x"}}, "generation_config.tool_choice "),
        (
            {"generation_config": {"speech_config": {"voice": "x"}}},
            "generation_config.speech_config",
        ),
        ({"response_modalities": ["audio"]}, "response_modalities[0] "),
        ({"response_format": {"type": "audio"}}, "response_format.type "),
        ({"response_format": {"type": "text", "mime_type": "x/y"}}, "response_format.mime_type "),
        ({"labels": {"a": "b" * 600}}, "labels "),
        ({"background": True, "store": False}, "background "),
    ],
)
def test_interaction_errors_name_the_field(
    frontend: FrontendProcess, body: dict[str, Any], field: str
) -> None:
    answer = post(frontend, **({"model": MODEL, "input": "Hi"} | body))
    error = answer.json()["error"]
    assert error.keys() == {"code", "message"} and field in error["message"]
    expected = (404, "NOT_FOUND") if "model" in body else (400, "INVALID_ARGUMENT")
    assert (answer.status_code, error["code"]) == expected


def test_position_in_the_stream_of_an_interaction_is_verified(frontend: FrontendProcess) -> None:
    found = create(frontend, "Hi")["id"]
    for query in ({"stream": True, "last_event_id": "x"}, {"last_event_id": "1"}):
        answer = get(frontend, found, **query)
        assert answer.status_code == 400 and "last_event_id" in answer.json()["error"]["message"]
    assert "does not run in the background" in post(frontend, f"/{found}/cancel").text
