"""Tools and formats of answers at /v1/chat/completions, whose core repeats the last message."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import openai
import pytest
from engine.frontend.chat import FORMATS, CallFormat, call_rules
from engine.protocol.grammars.grammar import grammar_text
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from llguidance import LLMatcher, LLTokenizer
from support.requests.chats import (
    CALLS,
    MESSAGES,
    TEXT,
    TIME,
    WEATHER,
    accumulate,
    chat,
    last_params,
    num_tokens,
    user,
)
from support.servers.frontend_process import MODEL, FrontendProcess, sound_frontend, sse_events

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def frontend() -> Iterator[FrontendProcess]:
    with sound_frontend(step_s=0.0005, tool_call_parser="hermes") as process:
        yield process


@pytest.fixture(scope="module")
def hermes(frontend: FrontendProcess) -> FrontendProcess:
    return frontend


NAMED = {"type": "function", "function": {"name": "get_weather"}}


def test_named_tool_is_called(client: openai.OpenAI, frontend: FrontendProcess) -> None:
    arguments = '{"city": "Oslo"}'
    options = {
        "model": MODEL,
        "messages": user(arguments),
        "tools": [WEATHER, TIME],
        "tool_choice": NAMED,
        "max_tokens": num_tokens(frontend, arguments),
        "extra_body": {"stop_token_ids": frontend.tokenizer.encode(arguments)[-1:]},
    }
    options["extra_body"]["include_stop_str_in_output"] = True
    [choice] = client.chat.completions.create(**options).choices
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather") and call.id
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    assert choice.message.content is None and choice.finish_reason == "stop"
    constraint = last_params(frontend).structured_output
    assert constraint.kind == "json_schema"
    assert WEATHER["function"]["parameters"].items() <= json.loads(constraint.spec).items()


def test_required_tools_are_called(frontend: FrontendProcess) -> None:
    last = frontend.tokenizer.encode(CALLS)[-1]
    options = {
        "messages": user(CALLS),
        "tools": [WEATHER, TIME],
        "tool_choice": "required",
        "stop_token_ids": [last],
        "include_stop_str_in_output": True,
    }
    choice = chat(frontend, **options)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    whole = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [call["name"] for call in whole] == ["get_weather", "get_time"]
    assert json.loads(whole[0]["arguments"]) == {"city": 'O"s]lo'}
    response = frontend.post("/v1/chat/completions", stream=True, **options)
    calls, content, reason = accumulate(sse_events(response.text))
    assert (calls, content, reason) == (whole, "", "tool_calls")


@pytest.mark.slow
def test_forced_calls_have_ids_that_the_models_template_accepts() -> None:
    with FrontendProcess(tool_call_parser="mistral") as frontend:
        for choice, text in (("required", CALLS), (NAMED, '{"city": "Oslo"}')):
            answer = chat(
                frontend,
                messages=user(text),
                tools=[WEATHER, TIME],
                tool_choice=choice,
                max_tokens=num_tokens(frontend, text),
            )
            ids = [call["id"] for call in answer["choices"][0]["message"]["tool_calls"]]
            assert ids and all(re.fullmatch("[A-Za-z0-9]{9}", each) for each in ids), ids


def test_required_tools_send_a_grammar_to_the_core(frontend: FrontendProcess) -> None:
    options = {"tools": [WEATHER, TIME], "tool_choice": "required", "max_tokens": 1}
    chat(frontend, **options, parallel_tool_calls=False)
    schema = json.loads(last_params(frontend).structured_output.spec)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    names = [s["properties"]["name"]["const"] for s in schema["items"]["anyOf"]]
    assert names == ["get_weather", "get_time"]
    chat(frontend, **options)
    sent = last_params(frontend).structured_output
    assert "maxItems" not in json.loads(sent.spec)
    # A format of the text has no effect, because there is no text.
    form = {"response_format": {"type": "json_object"}}
    chat(frontend, **options, **form)
    assert last_params(frontend).structured_output == sent


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_forced_tools_with_unsupported_schemas_are_still_called(
    frontend: FrontendProcess, choice: object
) -> None:
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    function = {"name": "get_weather", "parameters": {"properties": {"tags": tags}}}
    tools = [{"type": "function", "function": function}, TIME]
    chat(frontend, tools=tools, tool_choice=choice, messages=user("[{}]"), max_tokens=1)
    assert last_params(frontend).structured_output.kind == "json_schema"


def test_auto_tool_choice_without_tools_is_none(frontend: FrontendProcess) -> None:
    answer = chat(frontend, tools=[], tool_choice="auto", max_tokens=5)["choices"][0]
    assert answer["message"]["content"] == TEXT and "tool_calls" not in answer["message"]
    assert last_params(frontend).structured_output is None


@pytest.mark.slow
def test_auto_tool_choice_parses_calls(hermes: FrontendProcess) -> None:
    text = (
        'I look. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    )
    last = hermes.tokenizer.encode(text)[-1]
    options = {
        "messages": user(text),
        "tools": [WEATHER],
        "max_tokens": num_tokens(hermes, text),
        "stop_token_ids": [last],
        "include_stop_str_in_output": True,
        "min_tokens": num_tokens(hermes, text) - 1,
    }
    choice = chat(hermes, **options)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    [call] = choice["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Oslo"}
    response = hermes.post("/v1/chat/completions", stream=True, **options)
    calls, content, reason = accumulate(sse_events(response.text))
    assert calls == [call["function"]]
    assert (content, reason) == ("I look.", "tool_calls")
    plain = chat(hermes, messages=user("Hello"), tools=[WEATHER], max_tokens=3)
    assert plain["choices"][0]["message"].get("tool_calls") is None
    assert plain["choices"][0]["finish_reason"] == "length"
    none = chat(hermes, **options | {"tool_choice": "none"})["choices"][0]
    assert none["message"]["content"].startswith("I look. <tool_call>")
    assert none["finish_reason"] == "stop"


@pytest.mark.slow
def test_tool_parser_receives_markers_that_are_special_tokens(hermes: FrontendProcess) -> None:
    text = "Look:<|im_start|> there"
    options = {"messages": user(text), "max_tokens": num_tokens(hermes, text)}
    with_tools = chat(hermes, tools=[WEATHER], **options)["choices"][0]
    assert with_tools["message"]["content"] == text
    for without in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = chat(hermes, **options, **without)["choices"][0]
        assert choice["message"]["content"] == "Look: there"


CALL_SYNTAXES = {
    "hermes": '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Oslo"}}, '
    '{"name": "get_time", "arguments": {}}]',
    "llama3_json": '{"name": "get_weather", "parameters": {"city": "Oslo"}}; '
    '{"name": "get_time", "parameters": {}}',
    "mistral": '[TOOL_CALLS] get_weather[ARGS]{"city": "Oslo"}[TOOL_CALLS]get_time{}',
}


@pytest.mark.slow
@pytest.mark.parametrize("parser", CALL_SYNTAXES)
def test_response_format_constrains_the_answer_but_allows_calls(parser: str) -> None:
    schema = {"type": "object", "properties": {"sum ::=": {"type": "integer"}}}
    schema["required"] = ["sum ::="]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    calls = CALL_SYNTAXES[parser]
    with FrontendProcess(tool_call_parser=parser) as frontend:
        options = {"tools": [WEATHER, TIME], "response_format": form}
        tokenizer = LLTokenizer(frontend.tokenizer.path.read_text(encoding="utf-8"))

        def may_be(text: str, **fields) -> bool:
            chat(frontend, max_tokens=1, **options | fields)
            matcher = LLMatcher(tokenizer, grammar_text(last_params(frontend).structured_output))
            assert not matcher.is_error(), matcher.get_error()
            token_ids = frontend.tokenizer.encode(text)
            num_consumed = matcher.try_consume_tokens(token_ids)
            return num_consumed == len(token_ids) and matcher.is_accepting()

        assert may_be(calls) and not may_be(calls, parallel_tool_calls=False)
        assert may_be('{"sum ::=": 5}') and not may_be('{"sum ::=": "5"}')
        assert not may_be("It is 5.") and not may_be(calls.replace("get_time", "get_money"))
        assert not may_be(calls, tools=[WEATHER])
        choices = {"response_format": None, "structured_outputs": {"choice": ["yes ::= no"]}}
        assert may_be(calls, **choices) and may_be("yes ::= no", **choices)
        assert not may_be("yes", **choices) and not may_be(calls, **choices, tool_choice="none")
        text = {"messages": user(calls), "max_tokens": num_tokens(frontend, calls)}
        message = chat(frontend, **options | text)["choices"][0]["message"]
        made = [call["function"] for call in message["tool_calls"]]
        assert [call["name"] for call in made] == ["get_weather", "get_time"]
        assert [json.loads(call["arguments"]) for call in made] == [{"city": "Oslo"}, {}]
        wrong = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}}
        response = frontend.post("/v1/chat/completions", messages=MESSAGES, **options | wrong)
        assert response.status_code == 400
        assert response.json()["error"]["message"].startswith(
            "response_format is not a json_schema that can be compiled: "
        )


def test_call_markers_may_be_special_tokens(frontend: FrontendProcess) -> None:
    format = CallFormat(("<|im_start|>",), FORMATS["hermes"].calls)
    rules = call_rules(format, ["get_time"], frontend.tokenizer, parallel=True)
    output = StructuredOutput(GrammarKind.LARK, f"%llguidance {{}}\nstart: calls\n{rules}")
    tokenizer = LLTokenizer(frontend.tokenizer.path.read_text(encoding="utf-8"))
    matcher = LLMatcher(tokenizer, grammar_text(output))
    text = '<|im_start|>{"name": "get_time", "arguments": {}}'
    token_ids = frontend.tokenizer.encode(text)
    assert token_ids[0] in frontend.tokenizer.special_ids
    assert matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.slow
def test_calls_or_a_constrained_answer_follow_the_reasoning() -> None:
    with FrontendProcess(tool_call_parser="hermes", reasoning_parser="qwen3") as frontend:
        chat(frontend, max_tokens=1, tools=[TIME], response_format={"type": "json_object"})
        output = last_params(frontend).structured_output
        tokenizer = LLTokenizer(frontend.tokenizer.path.read_text(encoding="utf-8"))
        for answer in ('{"a": 1}', '<tool_call>{"name": "get_time", "arguments": {}}</tool_call>'):
            matcher = LLMatcher(tokenizer, grammar_text(output))
            token_ids = frontend.tokenizer.encode(f"<think>Let me see.</think>{answer}")
            assert matcher.try_consume_tokens(token_ids) == len(token_ids)
            assert matcher.is_accepting()


@pytest.mark.slow
def test_parallel_tool_calls_off_allows_only_one_call(hermes: FrontendProcess) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    text = f"I look. {call}\n{call}"
    options = {
        "messages": user(text),
        "tools": [TIME],
        "max_tokens": num_tokens(hermes, text),
    }
    for wanted, count in ((True, 2), (False, 1)):
        options["parallel_tool_calls"] = wanted
        message = chat(hermes, **options)["choices"][0]["message"]
        assert message["content"] == "I look." and len(message["tool_calls"]) == count
        response = hermes.post("/v1/chat/completions", stream=True, **options)
        calls, content, _ = accumulate(sse_events(response.text))
        assert calls == [made["function"] for made in message["tool_calls"]]
        assert content == "I look."
