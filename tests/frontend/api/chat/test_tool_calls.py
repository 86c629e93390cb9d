"""Tool calls that are truncated, limited to some tools, of custom tools, and of the older functions interface.

The core repeats the last message, so a test says in it what the model writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engine.protocol.grammars.grammar import grammar_text
from llguidance import LLMatcher, LLTokenizer
from support.servers.frontend_process import MODEL, FrontendProcess, sse_events

pytestmark = pytest.mark.slow

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
TIME = {"type": "function", "function": {"name": "get_time"}}
SHELL = {"type": "custom", "custom": {"name": "shell", "description": "Runs a command."}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
ARGUMENTS = '{"city": "Oslo"}'
CALLS = (
    '[{"name": "get_weather", "parameters": {"city": "Oslo"}}, '
    '{"name": "get_time", "parameters": {}}]'
)


def hermes(*calls: tuple[str, dict]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    )


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with FrontendProcess(
        step_s=0.0005, tool_call_parser="hermes", reasoning_parser="qwen3", max_model_len=1024
    ) as process:
        yield process


def ask(frontend: FrontendProcess, text: str, **fields) -> dict:
    """Return the choice for the answer `text`, or for the part of it that `max_tokens` allows."""
    fields.setdefault("max_tokens", len(frontend.tokenizer.encode(text)))
    messages = [{"role": "user", "content": text}]
    response = frontend.post(CHAT, model=MODEL, messages=messages, **fields)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def stream(frontend: FrontendProcess, text: str, **fields) -> list[dict]:
    fields.setdefault("max_tokens", len(frontend.tokenizer.encode(text)))
    messages = [{"role": "user", "content": text}]
    response = frontend.post(CHAT, messages=messages, stream=True, **fields)
    assert response.status_code == 200, response.text
    return [event["choices"][0] for event in sse_events(response.text) if event["choices"]]


def may_write(frontend: FrontendProcess, text: str) -> bool:
    """Return whether the grammar of the last request allows this text."""
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    output = added.requests[0].sampling_params.structured_output
    tokenizer = LLTokenizer(frontend.tokenizer.path.read_text(encoding="utf-8"))
    matcher = LLMatcher(tokenizer, grammar_text(output))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = frontend.tokenizer.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message of a stream, with its calls as in a whole answer."""
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    calls: list[dict[str, Any]] = []
    for piece in (each for choice in choices for each in choice["delta"].get("tool_calls", [])):
        if "id" in piece:
            calls.append({"id": piece["id"], "type": piece["type"], piece["type"]: {}})
        kind = calls[piece["index"]]["type"]
        for name, text in piece[kind].items():
            body = calls[piece["index"]][kind]
            body[name] = body.get(name, "") + text
    return {"content": content, "calls": calls}


def ask_both(frontend: FrontendProcess, text: str, **options: Any) -> dict[str, Any]:
    """Return the choice of a whole answer, after a check that a stream has the same message."""
    choice = ask(frontend, text, **options)
    message = choice["message"]
    streamed = joined(stream(frontend, text, **options))
    assert streamed["content"] == (message["content"] or "")
    shown = [each | {"id": ""} for each in message.get("tool_calls", [])]
    assert [each | {"id": ""} for each in streamed["calls"]] == shown
    return choice


@pytest.mark.parametrize(("choice", "text"), [("required", CALLS), (NAMED, ARGUMENTS)])
def test_truncated_forced_call_has_the_arguments_so_far(
    frontend: FrontendProcess, choice: object, text: str
) -> None:
    options = {"tools": [WEATHER, TIME], "tool_choice": choice}
    token_ids = frontend.tokenizer.encode(text)
    for num_tokens in range(1, len(token_ids)):
        written = frontend.tokenizer.decode(token_ids[:num_tokens])
        cut = ask_both(frontend, text, max_tokens=num_tokens, **options)
        assert cut["finish_reason"] == "length"
        if calls := cut["message"].get("tool_calls", []):
            assert calls[-1]["function"]["arguments"].strip() in written
        else:
            assert cut["message"]["content"] == written.strip()
    whole = ask_both(frontend, text, **options)
    assert whole["message"]["content"] is None and whole["message"]["tool_calls"]


def test_call_truncated_by_a_stop_string_has_the_arguments_so_far(
    frontend: FrontendProcess,
) -> None:
    cut = ask_both(frontend, ARGUMENTS, tools=[WEATHER], tool_choice=NAMED, stop="Os")
    [call] = cut["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "'
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", "Os")


def test_truncated_automatic_call_has_the_arguments_so_far(frontend: FrontendProcess) -> None:
    text = "I look. " + hermes(("get_time", {}), ("get_weather", {"city": "Oslo"}))
    num_tokens = len(frontend.tokenizer.encode(text[: text.index("Oslo")]))
    cut = ask_both(frontend, text, tools=[WEATHER, TIME], max_tokens=num_tokens)
    [time, weather] = [call["function"] for call in cut["message"]["tool_calls"]]
    assert time == {"name": "get_time", "arguments": "{}"}
    assert weather["name"] == "get_weather" and weather["arguments"].startswith('{"city": "')
    assert (cut["message"]["content"].strip(), cut["finish_reason"]) == ("I look.", "length")


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_call_truncated_in_the_reasoning_gives_no_call(
    frontend: FrontendProcess, choice: object
) -> None:
    text = "<think>Let me see.</think>" + (CALLS if choice == "required" else ARGUMENTS)
    options = {"tools": [WEATHER, TIME], "tool_choice": choice}
    for num_tokens in range(1, len(frontend.tokenizer.encode("<think>Let me see.</think>")) + 1):
        message = ask(frontend, text, max_tokens=num_tokens, **options)["message"]
        assert "tool_calls" not in message
        deltas = [c["delta"] for c in stream(frontend, text, max_tokens=num_tokens, **options)]
        assert not any("tool_calls" in delta for delta in deltas)
        for field in ("content", "reasoning"):
            streamed = "".join(delta.get(field) or "" for delta in deltas)
            assert streamed == (message[field] or "")


def test_continuous_usage_counts_what_has_been_sent(frontend: FrontendProcess) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for fields in ({"n": 3}, {"n": 2, "logprobs": True}):
        response = frontend.post(
            CHAT,
            messages=[{"role": "user", "content": "One two three"}],
            max_tokens=5,
            stream=True,
            stream_options=options,
            return_token_ids=True,
            **fields,
        )
        num_sent = 0
        for event in sse_events(response.text):
            for choice in event["choices"]:
                num_sent += len(choice.get("token_ids") or ())
            assert event["usage"]["completion_tokens"] == num_sent
        assert num_sent == 5 * fields["n"]


def allow(mode: str, *names: str) -> dict:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest.mark.slow
def test_only_allowed_tools_may_be_called(frontend: FrontendProcess) -> None:
    tools = [WEATHER, TIME]
    ask(frontend, "a", tools=tools, tool_choice=allow("required", "get_weather"), max_tokens=1)
    assert may_write(frontend, '[{"name": "get_weather", "parameters": {"city": "a"}}]')
    assert not may_write(frontend, CALLS)

    ask(frontend, "a", tools=tools, tool_choice=allow("auto", "get_time"), max_tokens=1)
    for text in ("", "It is 5 < 6.", '{"name": 1}', "<tool_", f"Hm. {hermes(('get_time', {}))}\n!"):
        assert may_write(frontend, text), text
    assert may_write(frontend, f"<think>{hermes(('x', {}))}</think>Yes.")
    weather = ("get_weather", {"city": "a"})
    for calls in ((weather,), (("get_time", {}), weather)):
        assert not may_write(frontend, f"Hm. {hermes(*calls)}"), calls

    responses_api = {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "get_time"}]}
    ask(frontend, "a", tools=tools, tool_choice=responses_api, max_tokens=1)
    assert may_write(frontend, hermes(("get_time", {})))
    assert not may_write(frontend, hermes(weather))
    every = allow("auto", "get_time", "get_weather")
    [call] = ask(frontend, hermes(weather), tools=tools, tool_choice=every)["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("llama3_json", '{"name": "%s", "parameters": {}}'),
        ("mistral", "Hm. [TOOL_CALLS]%s{}"),
        ("granite", '<|tool_call|>[{"name": "%s", "arguments": {}}]'),
    ],
)
def test_only_allowed_tools_may_be_called_in_every_syntax(parser: str, call: str) -> None:
    with FrontendProcess(tool_call_parser=parser) as frontend:
        ask(
            frontend,
            "a",
            tools=[WEATHER, TIME],
            tool_choice=allow("auto", "get_time"),
            max_tokens=1,
        )
        assert may_write(frontend, call % "get_time") and may_write(frontend, " It is [5].")
        assert not may_write(frontend, call % "get_weather")


def strict(parameters: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": "get_weather", "parameters": parameters, "strict": True},
    }


def test_arguments_of_a_strict_tool_match_its_schema(frontend: FrontendProcess) -> None:
    tools = [strict(SCHEMA), TIME]
    ask(frontend, "a", tools=tools, max_tokens=1)
    assert may_write(frontend, "It is 5 < 6.")
    assert may_write(frontend, f"<think>Hm.</think>{hermes(('get_time', {}))}")
    assert may_write(frontend, hermes(("get_weather", {"city": "Oslo"})))
    for wrong in ({}, {"city": 1}, {"city": "Oslo", "day": 1}):
        assert not may_write(frontend, hermes(("get_weather", wrong)))
    form = {"type": "json_object"}
    ask(frontend, "a", tools=tools, response_format=form, max_tokens=1)
    assert may_write(frontend, hermes(("get_weather", {"city": "Oslo"})))
    assert not may_write(frontend, hermes(("get_weather", {"city": 1})))


def test_call_of_a_strict_tool_may_end_the_reasoning() -> None:
    template = "{{ messages[-1]['content'] }}<think>"
    with FrontendProcess(
        tool_call_parser="hermes", reasoning_parser="qwen3", chat_template=template
    ) as frontend:
        ask(frontend, "a", tools=[strict(SCHEMA)], max_tokens=1)
        call = hermes(("get_weather", {"city": "Oslo"}))
        for text in (f"Hm. {call}", f"Hm.</think>{call}", "Hm.</think>It rains."):
            assert may_write(frontend, text), text
        wrong = hermes(("get_weather", {"city": 1}))
        for text in (f"Hm. {wrong}", f"Hm.</think>{wrong}"):
            assert not may_write(frontend, text), text


@pytest.mark.parametrize("choice", [None, "auto", allow("auto", "get_weather"), "required"])
@pytest.mark.parametrize("form", [None, {"type": "json_object"}])
def test_a_strict_tool_needs_a_valid_schema(
    frontend: FrontendProcess, choice: object, form: object
) -> None:
    tools = [TIME, strict({"type": "object", "properties": {"city": {"type": "text"}}})]
    fields = {"tools": tools, "tool_choice": choice, "response_format": form, "max_tokens": 1}
    response = frontend.post(CHAT, messages=[{"role": "user", "content": "a"}], **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert "get_weather is not a json_schema that can be compiled" in error["message"]


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_ids_of_kimi_k2_continue_those_of_the_conversation(choice: object) -> None:
    mark = "<|tool_call_begin|>functions.%s<|tool_call_argument_begin|>{}<|tool_call_end|>"
    written = "".join(mark % call for call in ("get_weather:0", "get_time:1"))
    texts = {"auto": f"<|tool_calls_section_begin|>{written}", "required": CALLS}
    text = texts[choice] if isinstance(choice, str) else ARGUMENTS
    earlier = {"id": "functions.get_weather:0", "type": "function"}
    earlier["function"] = {"name": "get_weather", "arguments": ARGUMENTS}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [earlier]},
        {"role": "tool", "content": "It rains.", "tool_call_id": earlier["id"]},
        {"role": "user", "content": text},
    ]
    wanted = ["functions.get_weather:1", "functions.get_time:2"]
    with FrontendProcess(tool_call_parser="kimi_k2") as frontend:
        fields: dict[str, Any] = {"tools": [WEATHER, TIME], "tool_choice": choice}
        fields["max_tokens"] = len(frontend.tokenizer.encode(text))
        response = frontend.post(CHAT, messages=messages, **fields)
        message = response.json()["choices"][0]["message"]
        ids = [call["id"] for call in message["tool_calls"]]
        assert ids == (wanted if isinstance(choice, str) else wanted[:1])
        response = frontend.post(CHAT, messages=messages, stream=True, **fields)
        pieces = [event["choices"][0]["delta"] for event in sse_events(response.text)]
        calls = [call for piece in pieces for call in piece.get("tool_calls") or ()]
        assert [call["id"] for call in calls if call.get("id")] == ids


def test_custom_tools_can_be_called_automatically(frontend: FrontendProcess) -> None:
    command = 'ls "a b"\n'
    text = "Hm. " + hermes(("shell", {"input": command}), ("get_time", {}), ("shell", {"c": "ls"}))
    options = {"tools": [SHELL, TIME]}
    choice = ask(frontend, text, **options)
    calls = [
        {k: v for k, v in call.items() if k != "id"} for call in choice["message"]["tool_calls"]
    ]
    assert calls == [
        {"type": "custom", "custom": {"name": "shell", "input": command}},
        {"type": "function", "function": {"name": "get_time", "arguments": "{}"}},
        {"type": "custom", "custom": {"name": "shell", "input": "ls"}},
    ]
    pieces = [
        piece
        for choice in stream(frontend, text, **options)
        for piece in choice["delta"].get("tool_calls", [])
    ]
    assert [piece["index"] for piece in pieces if "id" in piece] == [0, 1, 2]
    inputs = [piece["custom"]["input"] for piece in pieces if "custom" in piece]
    assert inputs == [command, "ls"]


CUSTOM_CHOICE = {"type": "custom", "custom": {"name": "shell"}}


def test_custom_tools_can_be_forced(frontend: FrontendProcess) -> None:
    text = json.dumps({"input": "ls"})
    [call] = ask(frontend, text, tools=[SHELL], tool_choice=CUSTOM_CHOICE)["message"]["tool_calls"]
    assert call["type"] == "custom" and call["custom"] == {"name": "shell", "input": "ls"}
    assert may_write(frontend, text) and not may_write(frontend, '{"input": 1}')
    text = json.dumps([{"name": "shell", "parameters": {"input": "ls"}}])
    [call] = ask(frontend, text, tools=[SHELL], tool_choice="required")["message"]["tool_calls"]
    assert call["custom"] == {"name": "shell", "input": "ls"}
    for num_tokens in range(1, len(frontend.tokenizer.encode(text))):
        options = {"tool_choice": "required", "max_tokens": num_tokens}
        cut = ask_both(frontend, text, tools=[SHELL], **options)["message"]
        [call] = cut.get("tool_calls") or [None]
        assert call is None or call["custom"]["input"] in ("ls", "l", "")


@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"),
    [
        ("lark", 'start: "go" " " ("left" | "right")', "go left", "go up"),
        ("regex", "go (left|right)", '{"input": "go left"}', '{"input": "go left!"}'),
    ],
)
def test_grammars_of_custom_tools_are_enforced(
    frontend: FrontendProcess, syntax: str, definition: str, good: str, bad: str
) -> None:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = {"type": "custom", "custom": {"name": "shell", "format": grammar}}
    eos = {"stop_token_ids": frontend.tokenizer.encode(good)[-1:]}
    options = {"tools": [tool, TIME], "tool_choice": CUSTOM_CHOICE, **eos}
    options |= {"include_stop_str_in_output": True, "max_tokens": 100}
    if syntax == "regex":
        message = ask(frontend, good, **options)["message"]
        assert message["tool_calls"][0]["custom"] == {"name": "shell", "input": "go left"}
    else:
        [*_, last] = stream(frontend, good, **options)
        assert last["finish_reason"] == "stop"
    assert may_write(frontend, good) and not may_write(frontend, bad)


@pytest.mark.slow
def test_template_sees_custom_tools_as_functions() -> None:
    template = "{{ tools | tojson }}"
    with FrontendProcess(chat_template=template, tool_call_parser="hermes") as frontend:
        grammar = {"syntax": "regex", "definition": "a+"}
        tool = {"type": "custom", "custom": {"name": "shell", "description": "Runs.", "format": {}}}
        tool["custom"]["format"] = {"type": "grammar", "grammar": grammar}
        messages = [{"role": "user", "content": "a"}]
        tokens = frontend.post("/tokenize", messages=messages, tools=[tool]).json()["tokens"]
        [shown] = json.loads(frontend.tokenizer.decode(tokens))
        assert shown["type"] == "function" and shown["function"]["name"] == "shell"
        assert shown["function"]["description"].startswith("Runs.\n\n")
        assert shown["function"]["description"].endswith("regex grammar:\na+")
        assert list(shown["function"]["parameters"]["properties"]) == ["input"]
        answer = frontend.post(
            CHAT, messages=messages, tools=[tool], max_tokens=1, return_token_ids=True
        )
        assert answer.json()["prompt_token_ids"] == tokens


def test_older_functions_interface_is_supported(frontend: FrontendProcess) -> None:
    functions = [WEATHER["function"], TIME["function"]]
    text = "I look. " + hermes(("get_weather", {"city": "Oslo"}), ("get_time", {}))
    with frontend.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            functions=functions,
            max_tokens=len(frontend.tokenizer.encode(text)),
            stop=["</tool_call>\n<tool_call>\n{\"name\": \"get_time"],
        )  # fmt: skip
    [choice] = answer.choices
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Oslo"}
    assert choice.message.tool_calls is None and choice.message.content == "I look."
    assert choice.finish_reason == "function_call"
    choices = stream(frontend, text, functions=functions)
    deltas = [choice["delta"] for choice in choices]
    pieces = [delta["function_call"] for delta in deltas if "function_call" in delta]
    assert [piece["name"] for piece in pieces if "name" in piece] == ["get_weather"]
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Oslo"}
    assert not any("tool_calls" in delta for delta in deltas)
    named = ask(frontend, ARGUMENTS, functions=functions, function_call={"name": "get_weather"})[
        "message"
    ]
    assert named["function_call"] == {"name": "get_weather", "arguments": ARGUMENTS}
    for nothing in ({"functions": []}, {"functions": functions, "function_call": "none"}):
        message = ask(frontend, text, **nothing)["message"]
        assert "function_call" not in message and message["content"] == text


def test_echo_returns_the_last_message_before_the_answer(frontend: FrontendProcess) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "One two"}]
    options = {"messages": messages, "max_tokens": 2, "echo": True}
    for fields in ({}, {"continue_final_message": True}, {"n": 2}):
        choices = frontend.post(CHAT, **options, **fields).json()["choices"]
        assert [c["message"]["content"] for c in choices] == ["One twoOne two"] * len(choices)
        response = frontend.post(CHAT, **options, **fields, stream=True)
        texts = [""] * len(choices)
        for event in sse_events(response.text):
            [choice] = event["choices"]
            texts[choice["index"]] += choice["delta"].get("content") or ""
        assert texts == ["One twoOne two"] * len(choices)
    other = frontend.post(CHAT, **options | {"messages": messages[:1]}).json()
    assert other["choices"][0]["message"]["content"] == "aa"
    silent = frontend.post(CHAT, **options | {"echo": False}).json()
    assert silent["choices"][0]["message"]["content"] == "One two"


@pytest.mark.slow
def test_template_that_ignores_tools_is_reported() -> None:
    with FrontendProcess(tool_call_parser="hermes") as frontend:
        [start] = [line for line in frontend.log.splitlines() if "does not show tools" in line]
        assert "--chat-template" in start and "WARNING" in start.upper()
        for count in (1, 2):
            ask(frontend, "a", tools=[WEATHER, TIME])
            assert frontend.log.count("the model does not see the 2 tools of this request") == count
        ask(frontend, "a", tools=[WEATHER], tool_choice="none")
        ask(frontend, "a")
        assert frontend.log.count("of this request") == 2
    template = "{{ tools | tojson }}"
    with FrontendProcess(tool_call_parser="hermes", chat_template=template) as frontend:
        ask(frontend, "a", tools=[WEATHER])
        assert "show tools" not in frontend.log


@pytest.mark.slow
def test_formats_are_chosen_by_the_template_and_logged() -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}{{ tools | tojson }}<think>"
    )
    call = '</think><tool_call>{"name": "get_time", "arguments": {}}</tool_call>'
    with FrontendProcess(chat_template=template) as frontend:
        assert "chat formats: tool calls: hermes (" in frontend.log
        message = ask(frontend, "Hm." + call, tools=[WEATHER, TIME])["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["tool_calls"][0]["function"]["name"] == "get_time"
    with FrontendProcess(chat_template=template, tool_call_parser="none") as frontend:
        response = frontend.post(CHAT, messages=[{"role": "user", "content": "a"}], tools=[TIME])
        assert response.status_code == 400 and "--tool-call-parser" in response.text


def test_history_may_contain_a_truncated_call(frontend: FrontendProcess) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "failed"},
        {"role": "user", "content": "a"},
    ]
    assert frontend.post(CHAT, messages=messages, max_tokens=1).status_code == 200


@pytest.mark.slow
def test_template_error_is_reported_as_such() -> None:
    template = "{{ raise_exception('messages[0] must be from the user') }}"
    with FrontendProcess(chat_template=template) as frontend, frontend.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                model=MODEL, messages=[{"role": "system", "content": "a"}]
            )
        error = refused.value.body
        assert error["message"] == (
            "the chat template rejected the messages: messages[0] must be from the user"
        )
        assert error["param"] == "messages"
