"""Grammars of tool calls accept what models write and reject calls of other functions."""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
from engine.frontend.chat import FORMATS, CallParser, call_rules, reasoning_parser, text_or_calls
from engine.frontend.chat.tool_calls.syntax import NamedCall, TaggedNotation
from engine.protocol.grammars.grammar import grammar_text
from engine.protocol.grammars.json_schema import Schema
from engine.protocol.sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from llguidance import LLMatcher, LLTokenizer
from support.chat.call_texts import PLAMO
from support.servers.engine_fixtures import smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()
LL_TOKENIZER = LLTokenizer(TOKENIZER.path.read_text(encoding="utf-8"))

CALLS = {
    "hermes": '<tool_call>\n{"name": "%s", "arguments": {"a": "b"}}\n</tool_call>',
    "granite": '<|tool_call|>[{"name": "%s", "arguments": {}}]',
    "llama3_json": '{"name": "%s", "parameters": {}}',
    "mistral": '[TOOL_CALLS]%s[ARGS]{"a": [1]}',
    "pythonic": "[%s(a='x', b=[1, {\"c\": None}])]",
    "lfm2": "<|tool_call_start|>[%s(a=-1.5)]<|tool_call_end|>",
    "qwen3_coder": "<tool_call>\n<function=%s>\n<parameter=a>\nx </para\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call><function=%s></function></seed:tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="%s">\n<parameter name="a">b</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="%s">]<]minimax[>[<a>]<]minimax[>[<item>b '
    "</c>]<]minimax[>[</item>]<]minimax[>[</a>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
    "glm45": "<tool_call>%s\n<arg_key>a</arg_key>\n<arg_value>b</arg_value>\n</tool_call>",
    "k2_horizon": "<ifm|tool_calls><ifm|tool_call>%s\n<ifm|arg_key>a</ifm|arg_key>\n"
    "<ifm|arg_value>b</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.%s:0<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="%s" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>'
    "b <|open|><|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>%s<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="%s">\n<｜DSML｜parameter name="a" '
    'string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="%s">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "gemma4": '<|tool_call>call:%s{a:<|"|>x<|"|>,b:[1,true],c:{d:null}}<tool_call|>',
    "functiongemma": "<start_function_call>call:%s{a:<escape>x<escape>}<end_function_call>",
    "hunyuan_a13b": '<tool_calls>[{"name": "%s", "arguments": {"a": 1}}]</tool_calls>',
    "longcat": '<longcat_tool_call>\n{"name": "%s", "arguments": {}}\n</longcat_tool_call>',
    "nemotron_json": '<TOOLCALL>[{"name": "%s", "arguments": {"a": 1}}]</TOOLCALL>',
    "phi4_mini_json": 'functools[{"name": "%s", "arguments": {"a": 1}}]',
    "internlm": '<|action_start|><|plugin|>{"name": "%s", "arguments": {"a": 1}}<|action_end|>',
    "granite-20b-fc": '<function_call>{"name": "%s", "arguments": {"a": 1}}',
    "gigachat3": '<|function_call|>{"name": "%s", "arguments": {"a": 1}}<|message_sep|>',
    "xlam": '{"name": "%s", "arguments": {"a": 1}}',
    "olmo3": "<function_calls>[%s(a='x')]</function_calls>",
    "step3": '<｜tool_calls_begin｜><｜tool_call_begin｜><steptml:invoke name="%s"><steptml:parameter name="a">x'
    "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
    "hy_v3": "<tool_calls><tool_call>%s<tool_sep><arg_key>a</arg_key><arg_value>x</arg_value></tool_call></tool_calls>",
    "hy_v4": "<tool_calls><tool_call>%s<arg_key>a</arg_key><arg_value>x</arg_value></tool_call></tool_calls>",
    "apertus": '<|tools_prefix|>[{"%s": {"a": 1}}]<|tools_suffix|>',
    "cohere_command": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "%s", "parameters": {}}]<|END_ACTION|>',
    "dots": '<dots_function_call>\n<invoke name="%s">\n<parameter name="a">b</parameter>\n</invoke>\n'
    "</dots_function_call>",
    "inkling": '<|content_invoke_tool_json|>{"name": "%s", "args": {"a": 1}}<|end_message|>',
    "iquest_q1": "<iquest_tool_call>%s<arg_key>a</arg_key><arg_value>x</arg_value></iquest_tool_call>",
    "minicpm5": '<function name="%s"><param name="a">x</param></function>',
    "muse": '<atem:function_calls>\n<atem:invoke name="%s">\n<atem:parameter name="a">x</atem:parameter>\n'
    "</atem:invoke>\n</atem:function_calls>",
    "plamo3": PLAMO % ("%s", '{"a": 1}'),
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="%s">\n<｜DSML｜ parameter name="a" string="true">x'
    "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>",
    "gigachat35": '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="%s">\n<｜GCML｜parameter name="a" string="true">x'
    "</｜GCML｜parameter>\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>",
    "openai": '<|channel|>commentary to=functions.%s<|message|>{"a": 1}<|call|>',
}


def may_write(grammar: str, text: str) -> bool:
    return accepts(StructuredOutput(GrammarKind.LARK, grammar), text)


def accepts(output: StructuredOutput, text: str) -> bool:
    matcher = LLMatcher(LL_TOKENIZER, grammar_text(output))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = TOKENIZER.encode(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def test_every_format_has_an_example() -> None:
    assert {id(FORMATS[name]) for name in CALLS} == {id(format) for format in FORMATS.values()}


@pytest.mark.parametrize("name", CALLS)
def test_grammar_allows_only_calls_of_the_given_functions(name: str) -> None:
    format, call = FORMATS[name], CALLS[name]
    wanted, other = call % "get_time", call % "get_weather"
    rules = call_rules(format, ["get_time"], TOKENIZER, parallel=False)
    forced = f"%llguidance {{}}\nstart: calls\n{rules}"
    free = text_or_calls(format, ["get_time"], TOKENIZER, parallel=True)
    assert may_write(forced, wanted) and not may_write(forced, other)
    assert not may_write(forced, "Hello.") and not may_write(forced, wanted + wanted)
    assert may_write(free, "Hello [5] <b>.") and may_write(free, wanted)
    assert not may_write(free, other)
    if not format.bare:
        assert may_write(free, f"Look: {wanted}{wanted}") and not may_write(free, "Look: " + other)
    parsed = CallParser(format).feed(wanted)
    assert parsed.tool_calls[0].name == "get_time" and not parsed.content


ANALYSIS = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


def test_constraint_applies_to_the_final_channel() -> None:
    parser = reasoning_parser("openai_gptoss")("<|start|>assistant")
    output = parser.allow_reasoning_before(StructuredOutput(GrammarKind.JSON_OBJECT), TOKENIZER)
    for text in (ANALYSIS + FINAL, FINAL, ANALYSIS + ANALYSIS + FINAL):
        assert accepts(output, text + '{"a": 1}') and not accepts(output, text + "a")
    assert not accepts(output, ANALYSIS + '{"a": 1}')
    started = reasoning_parser("openai_gptoss")("<|start|>assistant" + FINAL)
    assert started.allow_reasoning_before(output, TOKENIZER) == output


def test_calls_may_replace_the_final_channel() -> None:
    grammar = text_or_calls(FORMATS["openai"], ["get_time"], TOKENIZER, parallel=True)
    parser = reasoning_parser("openai_gptoss")("<|start|>assistant")
    output = parser.allow_reasoning_before(StructuredOutput(GrammarKind.LARK, grammar), TOKENIZER)
    assert accepts(output, ANALYSIS + FINAL + "Hello.")
    assert accepts(output, ANALYSIS + CALLS["openai"] % "get_time")
    assert not accepts(output, ANALYSIS + CALLS["openai"] % "get_weather")


THINK = "<|open|>message<|sep|><|open|>think<|sep|>"
RESPONSE = "<|open|>response<|sep|>"


def test_constraint_applies_to_the_response_channel() -> None:
    thinks = reasoning_parser("kimi_k3")(THINK)
    output = thinks.allow_reasoning_before(StructuredOutput(GrammarKind.JSON_OBJECT), TOKENIZER)
    thought = f"Hm {{.<|close|>think<|sep|>{RESPONSE}"
    assert accepts(output, thought + '{"a": 1}') and not accepts(output, thought + "a")
    assert accepts(output, thought + "{}<|close|>response<|sep|><|close|>message<|sep|>")
    assert not accepts(output, "Hm {}") and not accepts(output, "{}")
    answers = reasoning_parser("kimi_k3")("<|open|>message<|sep|>" + RESPONSE)
    assert answers.allow_reasoning_before(output, TOKENIZER) == output
    unknown = reasoning_parser("kimi_k3")("")
    output = unknown.allow_reasoning_before(StructuredOutput(GrammarKind.JSON_OBJECT), TOKENIZER)
    assert accepts(output, RESPONSE + "{}") and accepts(
        output, f"<|open|>think<|sep|>{thought}{{}}"
    )


@pytest.mark.parametrize("prompt", [THINK, "<|open|>message<|sep|>" + RESPONSE])
def test_calls_may_follow_the_response_channel(prompt: str) -> None:
    grammar = text_or_calls(FORMATS["kimi_k3"], ["get_time"], TOKENIZER, parallel=True)
    parser = reasoning_parser("kimi_k3")(prompt)
    output = parser.allow_reasoning_before(StructuredOutput(GrammarKind.LARK, grammar), TOKENIZER)
    thought = "Hm.<|close|>think<|sep|>" if prompt == THINK else ""
    opened = RESPONSE if prompt == THINK else ""
    text = f"{thought}{opened}Hello.<|close|>response<|sep|>"
    assert accepts(output, text)
    assert accepts(output, text + CALLS["kimi_k3"] % "get_time" + "<|close|>message<|sep|>")
    assert not accepts(output, text + CALLS["kimi_k3"] % "get_weather")


@pytest.mark.parametrize(
    ("name", "prompt", "before", "call"),
    [
        (
            "cohere_command3",
            "<|CHATBOT_TOKEN|>",
            "<|START_THINKING|>Hm {<|END_THINKING|><|START_RESPONSE|>",
            "cohere_command",
        ),
        (
            "cohere_command4",
            "<|CHATBOT_TOKEN|><|START_THINKING|>",
            "Hm {<|END_THINKING|><|START_TEXT|>",
            "cohere_command",
        ),
        (
            "inkling",
            "<|message_model|>",
            "<|content_thinking|>Hm {<|end_message|><|message_model|><|content_text|>",
            "inkling",
        ),
        (
            "muse",
            "<|start|>assistant",
            " to=self<|message|>Hm {<|eom|><|start|>assistant to=user<|message|>",
            "muse",
        ),
    ],
)
def test_constraint_applies_to_the_answer_of_channels(
    name: str, prompt: str, before: str, call: str
) -> None:
    parser = reasoning_parser(name)(prompt)
    output = parser.allow_reasoning_before(StructuredOutput(GrammarKind.JSON_OBJECT), TOKENIZER)
    assert accepts(output, before + '{"a": 1}') and not accepts(output, before + "a")
    assert accepts(parser.allow_reasoning_before(output, TOKENIZER), before + "{}")
    assert parser.feed(parser.answer_start + "{}").content == "{}"
    thought = (
        before[: before.rindex("<|", 0, -2)] if name != "muse" else before[: before.rindex(" to")]
    )
    grammar = text_or_calls(FORMATS[call], ["get_time"], TOKENIZER, parallel=True)
    output = parser.allow_reasoning_before(StructuredOutput(GrammarKind.LARK, grammar), TOKENIZER)
    assert accepts(output, thought + CALLS[call] % "get_time")
    assert not accepts(output, thought + CALLS[call] % "get_weather")


@pytest.mark.parametrize("name", ["hermes", "granite", "cohere_command", "apertus"])
def test_json_calls_after_long_white_space_may_follow_a_reasoning_with_a_token_limit(
    name: str,
) -> None:
    rules = call_rules(FORMATS[name], ["f", "g"], TOKENIZER, parallel=True)
    limited = FreeReasoning(("<think>",), ("</think>",), (), (4,), is_open=True, max_tokens=1)
    output = StructuredOutput(GrammarKind.LARK, f"start: calls\n{rules}", limited)
    matcher = LLMatcher(LL_TOKENIZER, grammar_text(output))
    before, call = re.split(r"\s*(?=[\[{])", CALLS[name] % "f", maxsplit=1)
    texts = ["a", before, *" " * 8, call]
    token_ids = [LL_TOKENIZER.tokenize_str(text) for text in texts]
    for token_id in chain(token_ids[0], [4], *token_ids[1:]):
        matcher.compute_bitmask()
        assert matcher.consume_token(token_id), (token_id, matcher.get_error()[:200])


STRICT: Schema = {
    "type": "object",
    "properties": {"day": {"$ref": "#/$defs/Day"}, "hour": {"type": "integer"}},
    "required": ["day", "hour"],
    "additionalProperties": False,
    "$defs": {"Day": {"enum": ["today", "tomorrow"]}},
}
IN_JSON = [name for name, call in CALLS.items() if re.search(r'{}|{"a"', call)]


@pytest.mark.parametrize("name", [name for name in IN_JSON if name != "pythonic"])
def test_arguments_in_json_match_the_schema_of_their_function(name: str) -> None:
    format, names = FORMATS[name], ["get_weather", "get_time", "get_time_zone"]
    schemas = {"get_time": STRICT, "get_time_zone": STRICT}

    def write(function: str, arguments: str) -> str:
        return re.sub(r'{}|{"a".*?}', lambda _: arguments, CALLS[name] % function, count=1)

    options: Any = {"parallel": True, "schemas": schemas}
    forced = "start: calls\n" + call_rules(format, names, TOKENIZER, **options)
    free = text_or_calls(format, names, TOKENIZER, **options)
    for grammar in (forced, free):
        for function in schemas:
            assert may_write(grammar, write(function, '{"day": "today", "hour": 5}'))
            assert not may_write(grammar, write(function, '{"day": "today"}'))
            assert not may_write(grammar, write(function, '{"day": "monday", "hour": 5}'))
        assert may_write(grammar, write("get_weather", '{"day": 1}'))


def of_properties(*required: str, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        "$defs": {"Count": {"type": "integer", "minimum": 1}},
    }


TAGGED = [
    name
    for name in CALLS
    if isinstance(call := FORMATS[name].calls[0], NamedCall)
    and isinstance(call.arguments, TaggedNotation)
    and name not in ("seed_oss", "deepseek_v4")  # Their examples have no arguments.
]
ENUM = {"type": "string", "enum": ["b", "x", "other"]}


@pytest.mark.parametrize("name", TAGGED)
def test_arguments_between_tags_have_the_properties_of_the_schema(name: str) -> None:
    text, string = CALLS[name] % "f", {"type": "string"}

    def allows(schema: Schema) -> bool:
        options: Any = {"parallel": True, "schemas": {"f": schema}}
        grammar = text_or_calls(FORMATS[name], ["f", "g"], TOKENIZER, **options)
        assert may_write(grammar, CALLS[name] % "g")
        return may_write(grammar, text)

    assert allows(of_properties("a", a=string)) and allows(of_properties(b=string, a=string))
    assert not allows(of_properties("b", b=string)) and not allows(of_properties())
    assert not allows(of_properties("a", "b", a=string, b=string))
    assert not allows(of_properties("a", a={"$ref": "#/$defs/Count"}))
    # The examples of these two have other text around the value.
    if name not in ("qwen3_coder", "kimi_k3"):
        assert allows(of_properties("a", a=ENUM))
    assert not allows(of_properties("a", a={"type": "string", "enum": ["c"]}))
    assert allows(of_properties("a", a={"anyOf": [string, {"type": "null"}]}))


CODER = "<tool_call>\n<function=f>\n<parameter=%s>\n%s\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("call", "is_allowed"),
    [
        (CODER % ("n", "5"), True),
        (CODER % ("n", "0"), False),
        (CODER % ("n", "five"), False),
        (CODER % ("n", '5\n</parameter>\n<parameter=list>\n["a",\n "b"]'), True),
        (CODER % ("n", '5\n</parameter>\n<parameter=list>\n["c"]'), False),
        (CODER % ("list", '["a"]'), False),
        (CODER % ("n", "5\n</parameter>\n<parameter=day>\ntomorrow"), True),
        (CODER % ("n", "5\n</parameter>\n<parameter=day>\nmonday"), False),
    ],
)
def test_values_between_tags_match_their_schemas(call: str, is_allowed: bool) -> None:
    days = {"type": "string", "enum": ["today", "tomorrow"]}
    items = {"type": "array", "items": {"enum": ["a", "b"]}}
    schema = of_properties("n", n={"$ref": "#/$defs/Count"}, list=items, day=days)
    format = FORMATS["qwen3_coder"]
    rules = call_rules(format, ["f"], TOKENIZER, parallel=True, schemas={"f": schema})
    assert may_write(f"start: calls\n{rules}", call) == is_allowed
