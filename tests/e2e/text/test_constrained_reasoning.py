"""Constrained answers of a reasoning model: unconstrained reasoning first, then the answer."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from engine.frontend.client.groups.reasoning_ends import HAS_ENDED
from engine.frontend.tokenizer.converted import tokenizer_json_path
from support.servers.server import Server, assert_nothing_is_held, default_model

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
        "json": {"type": "array", "items": {"type": "integer"}, "minItems": 25, "maxItems": 40}
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
    """Return flags with a chat template that renders the last message unchanged, so tests choose the prompt's end.

    With an explicit tool-call parser, the server does not describe tools in the prompt.
    """
    template = tmp_path_factory.mktemp("template") / "last.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    format = ("--chat-template", str(template), "--tool-call-parser", "hermes")
    return ("--max-model-len", "1024", *format)


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


def body(prompt: str, **features: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": 400, "temperature": 0, **features}


def ask(
    server: Server, prompt: str, **features: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the choices, their calls without ids, and the usage."""
    status, answer = server.post("/v1/chat/completions", body(prompt, **features))
    assert status == 200, answer
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls", []):
            del call["id"]
    return answer["choices"], answer["usage"]


def ask_in_a_stream(
    server: Server,
    prompt: str,
    on_piece: Callable[[str], None] = lambda kind: None,
    **features: Any,
) -> dict[str, str]:
    """Return the joined pieces of each kind; `on_piece` is called with the kind of each piece."""
    parts = urlsplit(server.url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=240)
    headers = {"content-type": "application/json"}
    request = json.dumps(body(prompt, **features, stream=True))
    connection.request("POST", "/v1/chat/completions", request, headers)
    pieces = {"reasoning": "", "content": "", "arguments": ""}
    for line in connection.getresponse():
        data = line.decode().removeprefix("data: ").strip()
        if not data or data == "[DONE]":
            continue
        delta = json.loads(data)["choices"][0]["delta"]
        for call in delta.get("tool_calls", []):
            delta["arguments"] = delta.get("arguments", "") + call["function"]["arguments"]
        for kind in pieces.keys() & delta.keys():
            pieces[kind] += delta[kind] or ""
            if delta[kind]:
                on_piece(kind)
    connection.close()
    return pieces


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        *((name, OPENED) for name in SAMPLING_FEATURES),
        ("schema", QUESTION),
        ("required", QUESTION),
    ],
    ids=lambda value: {OPENED: "opened", QUESTION: "not_opened"}.get(value, value),
)
def test_only_the_answer_after_the_reasoning_is_constrained(
    thinking: Server, undrafted: Server, name: str, prompt: str
) -> None:
    features = SAMPLING_FEATURES[name]
    choices, usage = ask(thinking, prompt, **features)
    for choice in choices:
        message = choice["message"]
        assert message["reasoning_content"] == message["reasoning"]
        if "n" not in features:
            assert message["reasoning"] == THOUGHT
        if "tools" in features:
            [call] = message["tool_calls"]
            assert call["function"]["name"] == "tell" and message["content"] is None
            assert json.loads(call["function"]["arguments"])["sum"] >= 0
        elif "response_format" in features:
            assert isinstance(json.loads(message["content"])["sum"], int)
        else:
            wanted = ("\n\nyes", "\n\nno", " five", " six", "It is 5.", "It is 3.")
            assert message["content"] in wanted
        is_a_call = features.get("tool_choice") == "required"
        assert choice["finish_reason"] == ("tool_calls" if is_a_call else "stop")
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 20 < counted < usage["completion_tokens"]
    assert ask(undrafted, prompt, **features)[0] == choices
    message = choices[0]["message"]
    pieces = ask_in_a_stream(thinking, prompt, **{**features, "n": 1})
    assert pieces["reasoning"] == message["reasoning"]
    assert pieces["content"] == (message["content"] or "")
    calls = message.get("tool_calls", [])
    assert pieces["arguments"] == "".join(call["function"]["arguments"] for call in calls)


def test_the_answer_comes_first_if_the_prompt_ends_the_reasoning(
    thinking: Server,
) -> None:
    [choice], usage = ask(thinking, CLOSED, **AS_SCHEMA)
    assert choice["message"]["reasoning"] is None
    assert json.loads(choice["message"]["content"]).keys() == {"sum"}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_reasoning_that_the_prompt_does_not_open_is_optional(thinking: Server) -> None:
    [choice], _ = ask(thinking, 'Say {"sum": 5}. {"sum": 5}\nSay {"sum": 7}. ', **AS_SCHEMA)
    assert choice["message"]["content"] == '{"sum": 7}'
    assert choice["message"]["reasoning"] is None


def test_the_output_cannot_end_before_the_answer(thinking: Server) -> None:
    [choice], usage = ask(thinking, OPENED, **AS_SCHEMA, logit_bias={"2": 20}, max_tokens=60)
    assert choice["finish_reason"] == "stop" and choice["message"]["reasoning"] == THOUGHT
    assert json.loads(choice["message"]["content"]).keys() == {"sum"}
    [choice], usage = ask(thinking, OPENED, **AS_SCHEMA, max_tokens=8)
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert THOUGHT.startswith(choice["message"]["reasoning"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 8}


@pytest.fixture(scope="module")
def undisturbed(thinking: Server) -> dict[str, str]:
    return ask_in_a_stream(thinking, OPENED, **LONG)


@pytest.mark.parametrize("moment", ["reasoning", "content"])
def test_a_core_crash_does_not_change_the_answer(
    thinking: Server, undisturbed: dict[str, str], moment: str
) -> None:
    assert undisturbed["reasoning"] == THOUGHT and len(json.loads(undisturbed["content"])) >= 25
    victim = thinking.child("core 0")

    def kill(kind: str) -> None:
        if kind == moment and victim.is_running():
            victim.kill()
            victim.wait()

    assert ask_in_a_stream(thinking, OPENED, kill, **LONG) == undisturbed
    assert thinking.child("core 0").pid != victim.pid
    assert_nothing_is_held(thinking)


@pytest.fixture(scope="module")
def marked(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose tokenizer has tokens for the marks of reasoning."""
    path = tmp_path_factory.mktemp("tokenizer")
    original = tokenizer_json_path(default_model())
    shutil.copytree(original.parent, path, dirs_exist_ok=True)
    content = original.read_text().replace('"<repo_name>"', '"<think>"')
    (path / original.name).write_text(content.replace('"<reponame>"', '"</think>"'))
    more = ("--reasoning-parser", "qwen3", "--tokenizer", str(path), "--api-server-count", "2")
    with Server(default_model(), *flags, *more) as server:
        yield server
        assert server.stop() == 0, server.log


@pytest.mark.parametrize("features", [{}, AS_SCHEMA, {"logprobs": True, "n": 2}])
def test_a_client_ends_the_reasoning_of_a_running_answer(
    marked: Server, features: dict[str, Any]
) -> None:
    path = "/v1/chat/completions"
    asked = body(
        "Tell a long story.\n<think>\n",
        ignore_eos=features is not AS_SCHEMA,
        stream=True,
        **features,
    )
    asked |= {"stream_options": {"include_usage": True}, "reasoning_control": True}
    reasoning, content, num_logprobs, usage = "", "", 0, {}
    with httpx.stream("POST", marked.url + path, json=asked, timeout=240) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            usage = chunk.get("usage") or usage
            assert "choices" in chunk, (chunk, marked.log)
            for choice in chunk["choices"]:
                was_reasoning = bool(reasoning)
                reasoning += choice["delta"].get("reasoning") or ""
                content += choice["delta"].get("content") or ""
                num_logprobs += len((choice["logprobs"] or {"content": ()})["content"])
                if reasoning and not was_reasoning:
                    ask = {"id": chunk["id"], "action": "reasoning_end"}
                    assert marked.post(f"{path}/control", ask) == (200, {"success": True})
                    if features is not AS_SCHEMA:
                        # Each connection may reach either API server, of which only one has the answer.
                        late = [marked.post(f"{path}/control", ask)[1] for _ in range(8)]
                        assert all(each.get("message", HAS_ENDED) == HAS_ENDED for each in late)
    assert reasoning and content and "think>" not in reasoning + content
    if features is AS_SCHEMA:
        assert 0 <= json.loads(content)["sum"] <= 99
    if "n" in features:
        assert num_logprobs == usage["completion_tokens"] == 800
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < 200
    for unknown in ("other", "long" * 1000):
        status, late = marked.post(f"{path}/control", {"id": unknown, "action": "reasoning_end"})
        assert status == 200 and late["success"] is False
