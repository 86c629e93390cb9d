"""A constrained answer of a model that reasons: free reasoning first, then what was asked for."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.server import Server, assert_nothing_is_held, default_model

SHOT = """Question: What is {a} plus {b}?
<think>
I take {a} and add {b}. That makes {c}, which is {{"sum": {c}}}.
</think>{{"sum": {c}}}

"""
SHOTS = "".join(SHOT.format(a=a, b=b, c=a + b) for a, b in ((2, 3), (4, 4), (1, 6), (5, 4)))
QUESTION = SHOTS + "Question: What is 3 plus 2?\n"
THOUGHT = 'I take 3 and add 2. That makes 5, which is {"sum": 5}.'
OPENED = QUESTION + "<think>\n"
CLOSED = QUESTION + "<think>\n\n</think>\n\n"

SUM = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["sum"],
    "additionalProperties": False,
}
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": SUM}}}
TELL = {"type": "function", "function": {"name": "tell", "parameters": SUM}}
NAMED = {"type": "function", "function": {"name": "tell"}}
LONG = {
    "structured_outputs": {
        "json": {"type": "array", "items": {"type": "integer"}, "minItems": 60, "maxItems": 80}
    }
}
SAMPLING_FEATURES: dict[str, dict[str, Any]] = {
    "schema": AS_SCHEMA,
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": r"\n\n(yes|no)"}},
    "choice": {"structured_outputs": {"choice": [" five", " six"]}},
    "grammar": {"structured_outputs": {"grammar": 'start: "It is " NUM "."\nNUM: /[0-9]/'}},
    "required": {"tools": [TELL], "tool_choice": "required"},
    "named": {"tools": [TELL], "tool_choice": NAMED},
    "sampled": {**AS_SCHEMA, "temperature": 0.5, "top_p": 0.9, "seed": 1, "n": 2},
}


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The chat template renders the last message as it is: so tests say how a prompt ends."""
    template = tmp_path_factory.mktemp("template") / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    return ("--max-model-len", "1024", "--chat-template", str(template))


@pytest.fixture(scope="module")
def thinking(flags: tuple[str, ...]) -> Iterator[Server]:
    with Server(default_model(), *flags, "--reasoning-parser", "qwen3") as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.fixture(scope="module")
def undrafted(flags: tuple[str, ...]) -> Iterator[Server]:
    off = ("--speculative-config", '{"num_speculative_tokens": 0}')
    with Server(default_model(), *flags, "--reasoning-parser", "qwen3", *off) as server:
        yield server


def body(prompt: str, **wish: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": 400, "temperature": 0, **wish}


def ask(server: Server, prompt: str, **wish: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices, their calls without ids, and the usage."""
    status, answer = server.post("/v1/chat/completions", body(prompt, **wish))
    assert status == 200, answer
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", []):
            del call["id"]
    return answer["choices"], answer["usage"]


def ask_in_a_stream(
    server: Server, prompt: str, hear: Callable[[str], None] = lambda kind: None, **wish: Any
) -> dict[str, str]:
    """What came of each kind, put together; `hear` is told of each piece's kind."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=240)
    headers = {"content-type": "application/json"}
    request = json.dumps(body(prompt, **wish, stream=True))
    connection.request("POST", "/v1/chat/completions", request, headers)
    told = {"reasoning": "", "content": "", "arguments": ""}
    for line in connection.getresponse():
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        delta = json.loads(data)["choices"][0]["delta"]
        for call in delta.get("tool_calls", []):
            delta["arguments"] = delta.get("arguments", "") + call["function"]["arguments"]
        for kind in told.keys() & delta.keys():
            told[kind] += delta[kind]
            if delta[kind]:
                hear(kind)
    connection.close()
    return told


@pytest.mark.parametrize("prompt", [QUESTION, OPENED], ids=["not_opened", "opened"])
@pytest.mark.parametrize("wish", SAMPLING_FEATURES.values(), ids=SAMPLING_FEATURES.keys())
def test_reasoning_is_free_and_the_answer_is_what_was_asked_for(
    thinking: Server, undrafted: Server, wish: dict[str, Any], prompt: str
) -> None:
    choices, usage = ask(thinking, prompt, **wish)
    for choice in choices:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"]
        if "n" not in wish:
            assert message["reasoning"] == THOUGHT
        if "tools" in wish:
            [call] = message["tool_calls"]
            assert call["function"]["name"] == "tell" and message["content"] is None
            assert json.loads(call["function"]["arguments"])["sum"] >= 0
        elif "response_format" in wish:
            assert isinstance(json.loads(message["content"])["sum"], int)
        else:
            wanted = ("\n\nyes", "\n\nno", " five", " six", "It is 5.", "It is 3.")
            assert message["content"] in wanted
        is_a_call = wish.get("tool_choice") == "required"
        assert choice["finish_reason"] == ("tool_calls" if is_a_call else "stop")
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 20 < counted < usage["completion_tokens"]
    assert ask(undrafted, prompt, **wish)[0] == choices
    message = choices[0]["message"]
    told = ask_in_a_stream(thinking, prompt, **{**wish, "n": 1})
    assert told["reasoning"] == message["reasoning"]
    assert told["content"] == (message["content"] or "")
    calls = message.get("tool_calls", [])
    assert told["arguments"] == "".join(call["function"]["arguments"] for call in calls)


def test_nothing_comes_before_the_answer_where_the_prompt_has_ended_the_reasoning(
    thinking: Server,
) -> None:
    [choice], usage = ask(thinking, CLOSED, **AS_SCHEMA)
    assert choice["message"]["reasoning"] is None
    assert json.loads(choice["message"]["content"]).keys() == {"sum"}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_that_is_not_opened_need_not_come(thinking: Server) -> None:
    [choice], _ = ask(thinking, 'Say {"sum": 5}. {"sum": 5}\nSay {"sum": 7}. ', **AS_SCHEMA)
    assert choice["message"]["content"] == '{"sum": 7}'
    assert choice["message"]["reasoning"] is None


def test_the_end_cannot_come_before_the_answer(thinking: Server) -> None:
    [choice], usage = ask(thinking, OPENED, **AS_SCHEMA, logit_bias={"2": 20}, max_tokens=60)
    assert choice["finish_reason"] == "stop" and choice["message"]["reasoning"] == THOUGHT
    assert json.loads(choice["message"]["content"]).keys() == {"sum"}
    [choice], usage = ask(thinking, OPENED, **AS_SCHEMA, max_tokens=8)
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert THOUGHT.startswith(choice["message"]["reasoning"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}


@pytest.mark.parametrize("moment", ["reasoning", "content"])
def test_a_core_that_dies_changes_nothing(thinking: Server, moment: str) -> None:
    undisturbed = ask_in_a_stream(thinking, OPENED, **LONG)
    assert undisturbed["reasoning"] == THOUGHT and len(json.loads(undisturbed["content"])) >= 60
    victim = thinking.child("core 0")

    def kill(kind: str) -> None:
        if kind == moment and victim.is_running():
            victim.kill()
            victim.wait()

    assert ask_in_a_stream(thinking, OPENED, kill, **LONG) == undisturbed
    assert thinking.child("core 0").pid != victim.pid
    assert_nothing_is_held(thinking)
