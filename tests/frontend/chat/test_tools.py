"""Tool-call parsers find the calls in texts of models, however the texts are split."""

import json
import re

import pytest
from engine.frontend.chat import FORMATS, CallParser
from hypothesis import given
from hypothesis import strategies as st
from support.chat.call_texts import CASES, FUNCTIONS
from support.chat.loose_call_texts import CASES as LOOSE_CASES
from support.suite.examples import examples


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES + LOOSE_CASES)
def test_calls_are_found_in_a_whole_text(parser, text, content, calls) -> None:
    assert stream(parser, [text]) == (content, calls)


def new_parser(name: str) -> CallParser:
    return CallParser(FORMATS[name], FUNCTIONS)


def stream(parser: str, pieces: list[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Join the deltas as a client does, and check their order."""
    reader = new_parser(parser)
    content, calls = "", []
    for delta in [*map(reader.feed, pieces), reader.finish()]:
        content += delta.content
        for piece in delta.tool_calls:
            if piece.index == len(calls):
                assert piece.id and piece.name
                calls.append((piece.name, piece.arguments))
            else:
                assert piece.index == len(calls) - 1
                assert piece.id is None and piece.name is None and piece.arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
    return content or None, calls


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, at, turn = [], 0, 0
    while at < len(text):
        size = sizes[turn % len(sizes)]
        pieces.append(text[at : at + size])
        at, turn = at + size, turn + 1
    return pieces


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES + LOOSE_CASES)
def test_calls_are_found_however_the_text_is_split(parser, text, content, calls) -> None:
    splits = [list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in splits:
        assert stream(parser, pieces) == (content, calls)


FRAGMENTS = {
    name: sorted(
        {f for case in CASES if case[0] == name for f in re.findall(r"<[^<>]*>|\w+|\s+|.", case[1])}
    )
    for name in dict.fromkeys(case[0] for case in CASES)
}
BEGINNINGS = {
    name: ["", *(case[1][: len(case[1]) // 2] for case in CASES if case[0] == name and case[3])]
    for name in FRAGMENTS
}
"""Valid calls that random text continues."""


@examples(80)
@given(data=st.data(), sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4))
@pytest.mark.parametrize("parser", FRAGMENTS)
def test_splits_of_malformed_text_do_not_change_calls(parser: str, data, sizes: list[int]) -> None:
    text = data.draw(st.sampled_from(BEGINNINGS[parser]))
    text += "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[parser]), max_size=14)))
    assert stream(parser, cut(text, sizes)) == stream(parser, [text])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)


@examples(150)
@given(
    arguments=st.dictionaries(st.text(max_size=6), json_values, max_size=4),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
@pytest.mark.parametrize(
    ("parser", "written"),
    [
        ("hermes", '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>'),
        ("llama3_json", '{"name": "f", "parameters": %s}'),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": %s}]'),
        ("mistral", "[TOOL_CALLS]f[ARGS]%s"),
        ("granite", '<|tool_call|>[{"arguments": %s, "name": "f"}]'),
        (
            "kimi_k2",
            "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
        ),
        (
            "deepseek_v3",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n%s\n```<｜tool▁call▁end｜>",
        ),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>%s<｜tool▁call▁end｜>"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>%s<|call|>"),
    ],
)
def test_any_arguments_are_preserved(parser, written, arguments, sizes, indent, ascii_only) -> None:
    source = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    content, [(name, parsed)] = stream(parser, cut(written % source, sizes))
    assert (content, name) == (None, "f")
    assert json.loads(parsed) == arguments


def test_arguments_are_streamed_as_they_arrive() -> None:
    parser = new_parser("hermes")
    parser.feed('<tool_call>{"name": "f", "argu')
    first = parser.feed('ments": {"a"')
    assert [(c.index, c.name, c.arguments) for c in first.tool_calls] == [
        (0, "f", ""),
        (0, None, '{"a"'),
    ]
    assert [c.arguments for c in parser.feed(": 12").tool_calls] == [": 12"]
    assert [c.arguments for c in parser.feed("}}</tool").tool_calls] == ["}"]
    assert not parser.feed("_call>")


def test_text_is_streamed_unless_it_may_start_a_call() -> None:
    parser = new_parser("hermes")
    assert parser.feed("Hello ").content == "Hello"
    assert parser.feed("there <").content == " there"
    assert parser.feed("b>").content == " <b>"


def test_call_ids_are_valid_for_the_templates() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'

    def ids(name: str, text: str) -> list[str]:
        return [d.id for d in new_parser(name).feed(text).tool_calls if d.id is not None]

    first, second = ids("hermes", call * 2)
    assert first != second
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in (first, second))
    [mistral] = ids("mistral", "[TOOL_CALLS]f{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral)


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "number"}, '"12"', 12),
        ({"type": "number"}, "9007199254740993", 9007199254740993),
        ({"type": "integer"}, '"twelve"', "twelve"),
        ({"type": "string"}, '"12"', '"12"'),
        ({"$ref": "#/$defs/a~1b~0c"}, "null", "null"),
        ({"allOf": [{"$ref": "#/$defs/Mode"}], "description": "A mode."}, "true", "true"),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": "integer"}]}, "7", 7),
        ({"allOf": [{"title": "a"}, {"type": "string"}]}, "7", "7"),
    ],
)
def test_values_between_tags_have_the_types_of_their_schemas(
    schema: dict, written: str, value: object
) -> None:
    definitions = {"a/b~c": {"type": "string"}, "Mode": {"enum": ["true", "auto"]}}
    own = {"$defs": definitions, "properties": {"value": schema}}
    text = f"<tool_call>f<arg_key>value</arg_key><arg_value>{written}</arg_value></tool_call>"
    for parameters in (own, {"$defs": definitions, "allOf": [own, {"required": ["value"]}]}):
        for size in (len(text), 1, 7):
            parser = CallParser(FORMATS["glm45"], {"f": parameters})
            deltas = [*map(parser.feed, cut(text, [size])), parser.finish()]
            calls = [call for delta in deltas for call in delta.tool_calls]
            assert json.loads("".join(call.arguments for call in calls)) == {"value": value}
