"""Tool-call parsers: the calls in texts as models write them, and the same however they are cut."""

import json
import re

import pytest
from engine.frontend.chat import tool_parser
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

NESTED = '{"city": "Köln \\"x\\" {[", "days": [1, {"a": null}], "ok": true}'

CASES = [
    ("hermes", "Just text, 1 < 2.\n", "Just text, 1 < 2.\n", []),
    ("hermes", "", None, []),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": ' + NESTED + "}\n</tool_call>",
        "Let me see.",
        [("f", NESTED)],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "g"}</tool_call>\n',
        None,
        [("f", "{}"), ("g", '{"a": 1}')],
    ),
    ("hermes", '<tool_call>{"name": "now"}</tool_call> done', " done", [("now", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        None,
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": "b',
        None,
        [("f", '{"a": "b')],
    ),
    ("hermes", "<tool_call> not json </tool_call>", "<tool_call> not json </tool_call>", []),
    ("hermes", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("hermes", '<tool_call>{"x": 1}</tool_call>', '<tool_call>{"x": 1}</tool_call>', []),
    ("hermes", "<tool_call>{'name': 'f'}</tool_call>", "<tool_call>{'name': 'f'}</tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": bad, "arguments": {}}</tool_call>',
        '<tool_call>{"name": bad, "arguments": {}}</tool_call>',
        [],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f\\ud800", "arguments": "\\x"}</tool_call>',
        None,
        [("f?", '"\\x"')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', None, [("f", "{}")]),
    ("hermes", "a <tool", "a <tool", []),
    ("hermes", "a <tool_call>", "a <tool_call>", []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}} and more</tool_call>end',
        "end",
        [("f", '{"a": 1}')],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}\n</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {"b": 2}}</tool_call> done',
        " done",
        [("f", '{"a": "</tool_call>"}'), ("g", '{"b": 2}')],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": [1]</tool_call> then '
        '<tool_call>{"name": "g", "arguments": {}}<tool_call>{"name": "h", "arguments": {}}',
        " then",
        [("f", '{"a": [1]'), ("g", "{}"), ("h", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{}"<tool_call>{"name": "g"}</tool_call>',
        None,
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f"</tool_call><tool_call>{"name": "g"}</tool_call>',
        '<tool_call>{"name": "f"</tool_call>',
        [("g", "{}")],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a" < 1}}', None, [("f", '{"a" < 1}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": <', None, [("f", '{"a": <')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\', None, [("f", '{"a": "\\')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": ' + NESTED + "}",
        None,
        [("f", NESTED)],
    ),
    (
        "llama3_json",
        '\n<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": 2}}',
        None,
        [("f", "{}"), ("g", '{"b": 2}')],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}<|python_tag|>{"name": "g", "parameters": {}} end',
        " end",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("llama3_json", '{"answer": 42, "name": "x"}', '{"answer": 42, "name": "x"}', []),
    ("llama3_json", "[a list](of links) { }", "[a list](of links) { }", []),
    ("llama3_json", '{"a": {"name": "f", "parameters": {}}}', '{"a": {"name": "f", "parameters": {}}}', []),
    ("llama3_json", 'Text {"name": "f", "parameters": {}}', 'Text {"name": "f", "parameters": {}}', []),
    ("llama3_json", "  plain", "  plain", []),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "mistral",
        "Sure.[TOOL_CALLS]f{" + '"a": [1]}[TOOL_CALLS]get_it[ARGS]{"b": {}}',
        "Sure.",
        [("f", '{"a": [1]}'), ("get_it", '{"b": {}}')],
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": 1}', None, [("f", '{"a": 1}')]),
    (
        "mistral",
        '[TOOL_CALLS]f{"a": [1, 2[TOOL_CALLS][{"name": "g", "arguments": {"b": []}}]',
        None,
        [("f", '{"a": [1, 2'), ("g", '{"b": []}')],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": [', None, [("f", '{"a": [')]),
    ("mistral", "[TOOL_CALLS] oh no, nothing", "[TOOL_CALLS] oh no, nothing", []),
    ("mistral", "[TOOL_CALLS]" + "x" * 400, "[TOOL_CALLS]" + "x" * 400, []),
    ("mistral", "a [1] list [TOOL", "a [1] list [TOOL", []),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        None,
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    ("granite", '<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', None, [("f", "{}")]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {"a": 1}]<|tool_call|>[{"name": "g"}]</tool_call>.',
        ".",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
    (
        "pythonic",
        "[weather(city='Köln', days=[1, 2], deep={'a': None, 'b': (True, -1.5)}), now()]",
        None,
        [("weather", '{"city": "Köln", "days": [1, 2], "deep": {"a": null, "b": [true, -1.5]}}'),
         ("now", "{}")],
    ),
    ("pythonic", "<|python_start|>[a.b(x=1)]<|python_end|>", None, [("a.b", '{"x": 1}')]),
    ("pythonic", "[f(x='a, b)]\\'', y=\"(\"),]", None, [("f", '{"x": "a, b)]\'", "y": "("}')]),
    (
        "pythonic",
        "[f(a=true, b=[null, {'c': false, null: 'true'}]), true(x=-1)]",
        None,
        [("f", '{"a": true, "b": [null, {"c": false, "null": "true"}]}'), ("true", '{"x": -1}')],
    ),
    ("pythonic", "[f(x=nil)]", "[f(x=nil)]", []),
    ("pythonic", "[f(x=1)] then", "then", [("f", '{"x": 1}')]),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(x=open('a'))]", "[f(x=open('a'))]", []),
    ("pythonic", "[f(x=1), oops]", " oops]", [("f", '{"x": 1}')]),
    ("pythonic", "[f(x=1), g(", None, [("f", '{"x": 1}')]),
    ("pythonic", "[f(x=1", "[f(x=1", []),
    ("pythonic", "[link](url) text ", "[link](url) text ", []),
    ("pythonic", "(a) [b]", "(a) [b]", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
]  # fmt: skip


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_calls_of_a_whole_text(parser, text, content, calls) -> None:
    assert stream(parser, [text]) == (content, calls)


def stream(parser: str, pieces: list[str]) -> tuple[str | None, list[tuple[str, str]]]:
    """Put the deltas together as a client does, checking the order the API promises."""
    reader = tool_parser(parser)()
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


@pytest.mark.parametrize(("parser", "text", "content", "calls"), CASES)
def test_calls_one_character_at_a_time(parser, text, content, calls) -> None:
    assert stream(parser, list(text)) == (content, calls)


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<|tool_call|>",
    "<|python_tag|>",
    "<|python_start|>",
    "<|python_end|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[",
    "]",
    "{",
    "}",
    '"',
    "\\",
    ",",
    ";",
    ":",
    " ",
    "\n",
    "(",
    ")",
    "=",
    "'",
    "text",
    "f(x=1)",
    '"name"',
    '"arguments"',
    '"parameters"',
    '{"name": "f", ',
    '"arguments": {"a": 1}}',
    '"arguments": {"a": [1}',
    '{"name": "g", "parameters": {}}',
    "1",
    "null",
    "bad",
    '"arguments": "\\x"',
    "\\ud800",
    '"name": ',
]


@examples(600)
@given(
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
@pytest.mark.parametrize("parser", ["hermes", "llama3_json", "mistral", "granite", "pythonic"])
def test_cuts_make_no_difference(parser: str, text: str, sizes: list[int]) -> None:
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
    ],
)
def test_any_arguments_come_through(parser, written, arguments, sizes, indent, ascii_only) -> None:
    source = json.dumps(arguments, indent=indent, ensure_ascii=ascii_only)
    content, [(name, parsed)] = stream(parser, cut(written % source, sizes))
    assert (content, name) == (None, "f")
    assert json.loads(parsed) == arguments


def test_arguments_stream_as_they_come() -> None:
    parser = tool_parser("hermes")()
    parser.feed('<tool_call>{"name": "f", "argu')
    first = parser.feed('ments": {"a"')
    assert [(c.index, c.name, c.arguments) for c in first.tool_calls] == [
        (0, "f", ""),
        (0, None, '{"a"'),
    ]
    assert [c.arguments for c in parser.feed(": 12").tool_calls] == [": 12"]
    assert [c.arguments for c in parser.feed("}}</tool").tool_calls] == ["}"]
    assert not parser.feed("_call>")


def test_text_streams_unless_it_may_be_a_call() -> None:
    parser = tool_parser("hermes")()
    assert parser.feed("Hello ").content == "Hello"
    assert parser.feed("there <").content == " there"
    assert parser.feed("b>").content == " <b>"


def test_ids_are_fit_for_the_templates() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'

    def ids(name: str, text: str) -> list[str]:
        return [d.id for d in tool_parser(name)().feed(text).tool_calls if d.id is not None]

    first, second = ids("hermes", call * 2)
    assert first != second
    assert all(re.fullmatch("call_[0-9a-f]{24}", each) for each in (first, second))
    [mistral] = ids("mistral", "[TOOL_CALLS]f{}")
    assert re.fullmatch("[A-Za-z0-9]{9}", mistral)
