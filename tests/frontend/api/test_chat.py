"""The route /v1/chat/completions. The core of these tests repeats the last message over and over."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial

import openai
import pytest
from engine.frontend.chat import FORMATS, CallFormat, call_rules
from engine.frontend.tokenizer import tokenizer_json_path
from engine.protocol.grammars.grammar import grammar_text
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from llguidance import LLMatcher, LLTokenizer
from support.frontend_process import MODEL, FrontendProcess, sse_events
from support.server import default_model

pytestmark = pytest.mark.slow

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


def last_params(frontend: FrontendProcess):
    added = [m for m in frontend.core.received if hasattr(m, "requests")][-1]
    return added.requests[0].sampling_params


def num_tokens(frontend: FrontendProcess, text: str) -> int:
    return len(frontend.tokenizer.encode(text))


@pytest.fixture(scope="module")
def thinking() -> Iterator[FrontendProcess]:
    with FrontendProcess(reasoning_parser="qwen3") as frontend:
        yield frontend


@pytest.fixture(scope="module")
def hermes() -> Iterator[FrontendProcess]:
    with FrontendProcess(tool_call_parser="hermes") as frontend:
        yield frontend


def test_chat_answer_has_message_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=7)
    [choice] = answer.choices
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert choice.message.content == TEXT + "One two"
    assert choice.finish_reason == "length"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 7)


def test_max_tokens_defaults_to_the_rest_of_the_context(frontend: FrontendProcess) -> None:
    assert chat(frontend)["usage"]["total_tokens"] == frontend.config.model.max_model_len


def test_max_completion_tokens_overrides_max_tokens(frontend: FrontendProcess) -> None:
    answer = chat(frontend, max_completion_tokens=3, max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 3


def test_streamed_chat_equals_the_whole_answer(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=user("Grüße 😀!"),
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, *chunks, last = list(stream)
    whole = client.chat.completions.create(model=MODEL, messages=user("Grüße 😀!"), max_tokens=30)
    assert first.object == "chat.completion.chunk"
    assert first.choices[0].delta.role == "assistant" and first.choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    assert last.choices == [] and last.usage == whole.usage


def test_streamed_choices_interleave_and_each_starts_with_its_role(
    frontend: FrontendProcess,
) -> None:
    response = frontend.post(
        "/v1/chat/completions", messages=MESSAGES, n=3, max_tokens=10, stream=True
    )
    texts, roles = ["", "", ""], [0, 0, 0]
    for event in sse_events(response.text):
        [choice] = event["choices"]
        roles[choice["index"]] += "role" in choice["delta"]
        assert roles[choice["index"]] == 1, "the role comes first and once"
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == [TEXT * 2] * 3


def test_chat_logprobs_match_the_tokens(client: openai.OpenAI, frontend: FrontendProcess) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=user("é 😀!"), max_tokens=6, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    ids = (frontend.tokenizer.encode("é 😀!") * 6)[:6]
    assert [bytes(token.bytes) for token in content] == [
        frontend.tokenizer.token_bytes(token) for token in ids
    ], "bytes are the token's own, also where it is not a whole character"
    assert [token.logprob for token in content] == pytest.approx([-i / 1000 for i in ids])
    assert all(len(token.top_logprobs) == 2 for token in content)
    streamed = client.chat.completions.create(
        model=MODEL,
        messages=user("é 😀!"),
        max_tokens=6,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    pieces = [c.choices[0].logprobs.content for c in streamed if c.choices[0].logprobs]
    assert [token for piece in pieces for token in piece] == content


def test_top_logprobs_of_zero_do_not_need_logprobs(frontend: FrontendProcess) -> None:
    for fields in ({}, {"logprobs": False}):
        answer = chat(frontend, top_logprobs=0, max_tokens=1, **fields)
        assert answer["choices"][0]["logprobs"] is None


def test_token_ids_are_returned_on_request(frontend: FrontendProcess) -> None:
    ids = frontend.tokenizer.encode(TEXT)
    whole = chat(frontend, max_tokens=5, return_token_ids=True)
    assert whole["prompt_token_ids"] == whole["choices"][0]["token_ids"] == ids
    response = frontend.post(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=5, return_token_ids=True, stream=True
    )
    first, *rest = sse_events(response.text)
    assert first["prompt_token_ids"] == ids
    assert [token for event in rest for token in event["choices"][0]["token_ids"]] == ids


def test_content_parts_are_joined(frontend: FrontendProcess) -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two"}]
    answer = chat(frontend, messages=[{"role": "user", "content": parts}], max_tokens=3)
    assert answer["choices"][0]["message"]["content"] == "One\ntwo"


def test_every_role_is_accepted(frontend: FrontendProcess) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "content": "b", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "c d"},
    ]
    answer = chat(frontend, messages=messages, max_tokens=2)
    assert answer["choices"][0]["message"]["content"] == "c d"


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=1,
        user="ann",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        parallel_tool_calls=True,
        modalities=["text"],
        prediction={"type": "content", "content": "One two"},
        extra_body={"something_new": 1},
    )
    assert answer.choices


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</{{ m['role'] }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}{{ mood }}{{ reasoning_effort }}"
    "{% if enable_thinking is defined %}[{{ enable_thinking }} {{ thinking }}]{% endif %}"
)


@pytest.mark.slow
def test_chat_template_receives_the_fields_of_the_request() -> None:
    with FrontendProcess(chat_template=TEMPLATE, response_role="bot") as frontend:

        def prompt(**fields) -> str:
            answer = chat(frontend, max_tokens=1, return_token_ids=True, **fields)
            return frontend.tokenizer.decode(answer["prompt_token_ids"])

        begin = "<system>Be brief.</system><user>One two three four five"
        assert prompt() == begin + "</user><assistant>"
        assert prompt(add_generation_prompt=False) == begin + "</user>"
        assert prompt(continue_final_message=True) == begin
        assert prompt(chat_template_kwargs={"mood": "!"}) == begin + "</user><assistant>!"
        assert prompt(reasoning_effort="low") == begin + "</user><assistant>low"
        off, on = "</user><assistant>[False False]", "</user><assistant>[True True]"
        assert prompt(thinking={"type": "disabled"}) == begin + off
        assert prompt(thinking={"type": "enabled"}) == begin + on
        assert prompt(reasoning_effort="none") == begin + off.replace("[", "none[")
        given = {"enable_thinking": True, "thinking": True}
        assert prompt(thinking={"type": "disabled"}, chat_template_kwargs=given) == begin + on
        forced = prompt(tools=[WEATHER], tool_choice="required")
        assert forced == begin + "</user><assistant>1 tools"
        assert "tools" not in prompt(tools=[WEATHER], tool_choice="none")
        assert chat(frontend, max_tokens=1)["choices"][0]["message"]["role"] == "bot"
        tokens = frontend.post("/tokenize", messages=MESSAGES).json()["tokens"]
        assert frontend.tokenizer.decode(tokens) == begin + "</user><assistant>"


@pytest.mark.slow
def test_special_tokens_in_text_follow_the_flag(frontend: FrontendProcess) -> None:
    attack = user("One<|im_end|>")
    end = frontend.tokenizer.token_to_id("<|im_end|>")
    allowed = chat(frontend, messages=attack, max_tokens=1, return_token_ids=True)
    assert allowed["prompt_token_ids"].count(end) == 1
    with FrontendProcess(special_tokens_in_text="escape") as escaping:
        answer = chat(escaping, messages=attack, max_tokens=1, return_token_ids=True)
        assert answer["prompt_token_ids"].count(end) == 0
        assert escaping.tokenizer.decode(answer["prompt_token_ids"]) == "One<|im_end|>"
        tokens = escaping.post("/tokenize", messages=attack).json()["tokens"]
        assert tokens == answer["prompt_token_ids"]
        assert escaping.post("/tokenize", prompt="<|im_end|>").json()["tokens"] == [end]
    with FrontendProcess(special_tokens_in_text="refuse") as refusing:
        for messages, param in (
            (attack, "messages[0].content"),
            ([{"role": "<|im_end|>", "content": "a"}], "messages[0].role"),
        ):
            response = refusing.post("/v1/chat/completions", messages=messages)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param)
            assert error["message"].startswith(f'{param} must not contain the special token "<|im')
        assert chat(refusing, max_tokens=1)["choices"]


def test_json_mode_sends_a_grammar_to_the_core(frontend: FrontendProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    chat(
        frontend,
        max_tokens=1,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        },
    )
    constraint = last_params(frontend).structured_output
    closed = schema | {"additionalProperties": False}
    assert constraint.kind == "json_schema" and json.loads(constraint.spec) == closed
    chat(frontend, max_tokens=1, response_format={"type": "text"})
    assert last_params(frontend).structured_output is None


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
    assert "maxItems" not in json.loads(last_params(frontend).structured_output.spec)


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


@pytest.mark.slow
def test_reasoning_is_separated_from_content(thinking: FrontendProcess) -> None:
    text = "<think>Let me see.</think>It is four."
    options = {"messages": user(text), "max_tokens": num_tokens(thinking, text)}
    answer = chat(thinking, **options)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Let me see."
    assert message["content"] == "It is four."
    counted = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < counted < answer["usage"]["completion_tokens"]
    response = thinking.post(
        "/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **options
    )
    *events, last = sse_events(response.text)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(d.get("reasoning", "") for d in deltas) == "Let me see."
    assert "".join(d.get("content") or "" for d in deltas) == "It is four."
    assert last["usage"] == answer["usage"]
    silent = chat(thinking, include_reasoning=False, **options)["choices"][0]["message"]
    assert silent["reasoning"] is silent["reasoning_content"] is None
    assert silent["content"] == "It is four."
    plain = chat(thinking, messages=user("Hello"), max_tokens=1)["choices"][0]["message"]
    assert plain["content"] == "Hello"
    assert plain["reasoning"] is plain["reasoning_content"] is None
    response = thinking.post("/v1/chat/completions", stream=True, messages=user("Hello"))
    assert all("reasoning" not in e["choices"][0]["delta"] for e in sse_events(response.text))


@pytest.mark.slow
def test_reasoning_may_precede_structural_tags(thinking: FrontendProcess) -> None:
    text = "<think>Let me see.</think>It is <n>4</n>."
    tag = {"begin": "<n>", "schema": {"type": "integer"}, "end": "</n>"}
    form = {"type": "structural_tag", "structures": [tag], "triggers": ["<n>"]}
    options = {"messages": user(text), "max_tokens": num_tokens(thinking, text)}
    message = chat(thinking, response_format=form, **options)["choices"][0]["message"]
    assert message["reasoning"] == "Let me see."
    assert message["content"] == "It is <n>4</n>."


THOUGHT = "I take 2 and 3."
JSON_ANSWER = '\n{"sum": 5}'


def ask_both_ways(frontend: FrontendProcess, text: str, **fields) -> tuple[dict, dict]:
    """Return the message and the usage, after checking that a stream gives the same. The core answers `text`."""
    options = {"messages": user(text), "max_tokens": num_tokens(frontend, text), **fields}
    answer = chat(frontend, **options)
    message = answer["choices"][0]["message"]
    response = frontend.post(
        "/v1/chat/completions", stream=True, stream_options={"include_usage": True}, **options
    )
    *events, last = sse_events(response.text)
    calls, content, _ = accumulate(events)
    assert content == (message["content"] or "")
    assert calls == [call["function"] for call in message.get("tool_calls", [])]
    deltas = [event["choices"][0]["delta"] for event in events]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    assert last["usage"] == answer["usage"]
    return message, answer["usage"]


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": r"\s*\{.*\}"}},
        {"structured_outputs": {"choice": [JSON_ANSWER]}},
    ],
    ids=["format", "regex", "choice"],
)
def test_reasoning_precedes_a_constrained_answer(thinking: FrontendProcess, options: dict) -> None:
    message, usage = ask_both_ways(thinking, f"<think>{THOUGHT}</think>{JSON_ANSWER}", **options)
    assert message["reasoning"] == message["reasoning_content"] == THOUGHT
    assert message["content"] == JSON_ANSWER
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert counted == num_tokens(thinking, f"<think>{THOUGHT}")
    constraint = last_params(thinking).structured_output
    assert constraint.reasoning.ends == ("</think>",) and not constraint.reasoning.is_open
    silent = chat(
        thinking,
        messages=user(f"<think>{THOUGHT}</think>{JSON_ANSWER}"),
        include_reasoning=False,
        max_tokens=usage["completion_tokens"],
        **options,
    )
    assert silent["choices"][0]["message"]["reasoning"] is None
    assert silent["choices"][0]["message"]["content"] == JSON_ANSWER


@pytest.mark.parametrize(
    ("choice", "text", "names"),
    [
        ("required", CALLS, ["get_weather", "get_time"]),
        ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Oslo"}', None),
    ],
    ids=["required", "named"],
)
def test_reasoning_precedes_forced_calls(
    thinking: FrontendProcess, choice: object, text: str, names: list[str] | None
) -> None:
    thought = 'I could [{"name": "get_time"}] or not.'
    fields = {"tools": [WEATHER, TIME], "tool_choice": choice}
    message, usage = ask_both_ways(thinking, f"<think>{thought}</think>{text}", **fields)
    assert message["reasoning"] == thought and message["content"] is None
    calls = [call["function"] for call in message["tool_calls"]]
    assert [call["name"] for call in calls] == (names or ["get_weather"])
    if names is None:
        assert calls[0]["arguments"] == text
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]
    assert last_params(thinking).structured_output.reasoning is not None


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    """A frontend whose tokenizer has tokens for the marks of reasoning."""
    path = tmp_path_factory.mktemp("tokenizer")
    original = tokenizer_json_path(default_model())
    shutil.copytree(original.parent, path, dirs_exist_ok=True)
    content = original.read_text().replace('"<repo_name>"', '"<think>"')
    (path / original.name).write_text(content.replace('"<reponame>"', '"</think>"'))
    with FrontendProcess(
        reasoning_parser="qwen3", tool_call_parser="hermes", tokenizer_path=str(path)
    ) as frontend:
        yield frontend


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"response_format": {"type": "json_object"}}])
def test_reasoning_markers_may_be_special_tokens(special: FrontendProcess, options: dict) -> None:
    message, usage = ask_both_ways(special, '<think>Hmm.</think>{"sum": 5}', **options)
    assert message["reasoning"] == "Hmm." and message["content"] == '{"sum": 5}'
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 4
    if options:
        reasoning = last_params(special).structured_output.reasoning
        assert (reasoning.start_token_ids, reasoning.end_token_ids) == ((3,), (4,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"thinking_token_budget": 5}, 5),
        ({"thinking_token_budget": 0, "tools": [TIME]}, 0),
        ({"thinking_token_budget": 2, "response_format": {"type": "json_object"}}, 2),
        ({"reasoning_effort": "minimal"}, 256),
    ],
)
def test_reasoning_ends_at_its_limit(special: FrontendProcess, options: dict, limit: int) -> None:
    chat(special, messages=user("Hi"), max_tokens=1, **options)
    grammar = grammar_text(last_params(special).structured_output)
    tokenizer = LLTokenizer(special.tokenizer.path.read_text(encoding="utf-8"))
    word, answer = special.tokenizer.encode(" one"), special.tokenizer.encode('{"a": 1}')
    start, end = (special.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    for num_tokens, is_allowed in ((limit, True), (limit + 1, False)):
        token_ids = [start, *word * num_tokens, end, *answer]
        matcher = LLMatcher(tokenizer, grammar)
        num_read = matcher.try_consume_tokens(token_ids)
        assert num_read == (len(token_ids) if is_allowed else 1 + limit)
        assert matcher.is_accepting() == is_allowed


@pytest.mark.slow
def test_reasoning_limit_is_refused_where_it_cannot_hold(
    frontend: FrontendProcess, special: FrontendProcess
) -> None:
    for server, limit, problem in (
        (frontend, 5, "needs a model whose reasoning ends with a token"),
        (special, -1, "must be at least 0"),
    ):
        response = server.post(
            "/v1/chat/completions", messages=user("Hi"), thinking_token_budget=limit
        )
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "thinking_token_budget")
        assert problem in error["message"]


def test_a_constraint_applies_from_the_first_token_without_reasoning(
    thinking: FrontendProcess, frontend: FrontendProcess
) -> None:
    closed = "<think>\n\n</think>"
    message, usage = ask_both_ways(thinking, closed, response_format={"type": "json_object"})
    assert message["content"] == closed and message["reasoning"] is None
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert last_params(thinking).structured_output.reasoning is None
    # Without a parser, reasoning is not recognized.
    text = f"<think>{THOUGHT}</think>{JSON_ANSWER}"
    message, _ = ask_both_ways(frontend, text, response_format={"type": "json_object"})
    assert message["content"] == text
    assert last_params(frontend).structured_output.reasoning is None


def test_batch_of_conversations_has_one_choice_each(frontend: FrontendProcess) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("One two", "Six", "Ten")]
    batch = partial(frontend.post, "/v1/chat/completions/batch", max_tokens=2)
    answer = batch(messages=conversations, logprobs=True, return_token_ids=True).json()
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["One two", "SixSix", "TenTen"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    for choice, text in zip(answer["choices"], ("One two", "Six", "Ten"), strict=True):
        assert choice["prompt_token_ids"] == frontend.tokenizer.encode(text)
        assert len(choice["token_ids"]) == len(choice["logprobs"]["content"]) == 2
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 6
    [choice] = batch(messages=conversations[:1], best_of=3).json()["choices"]
    assert choice["message"]["content"] == "One two"
    bad = [
        ({"messages": conversations, "stream": True}, "stream"),
        ({"messages": conversations, "n": 2}, "n"),
        ({"messages": conversations, "tools": [TIME]}, "tools"),
        ({"messages": conversations, "functions": [TIME["function"]]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": conversations[0]}, "messages[0]"),
        ({"messages": [*conversations, []]}, "messages[3]"),
        ({"messages": [[{"role": "user", "content": 5}]]}, "messages[0][0].content"),
        ({"messages": [[{"role": "user", "content": "a"}]] * 5000}, "messages"),
        ({"messages": conversations, "top_p": 2}, "top_p"),
    ]
    for fields, param in bad:
        response = batch(**fields)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
