"""The output that a client's JSON schema allows."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from engine.frontend.api.schema import ChatCompletionRequest
from engine.frontend.api.structured.constraint import parse_constraint
from engine.frontend.api.structured.json_schema import prepare_schema
from engine.frontend.api.tools.tool_choice import parse_tool_choice
from engine.frontend.http.errors import APIError
from engine.protocol.grammars.grammar import grammar_text
from engine.protocol.sampling_params import StructuredOutput
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from support.chat.grammars import usable, verify_structured_output
from support.servers.engine_fixtures import smollm2_tokenizer

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(smollm2_tokenizer().path.read_text(encoding="utf-8"))


def accepts(tokenizer: LLTokenizer, output: StructuredOutput, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar_text(usable(output)))
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def constraint(**fields: Any) -> StructuredOutput:
    found = parse_constraint(ChatCompletionRequest(**fields))
    assert found is not None
    return found.structured_output


def response_format(schema: dict[str, Any], **fields: Any) -> StructuredOutput:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, **fields}}
    return constraint(response_format=form)


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "good", "invented"),
    [
        (A, {"a": 1}, {"a": 1, "b": 2}),
        (object_of(x=A), {"x": {"a": 1}}, {"x": {"b": 2}}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"b": 1}]),
        ({"type": "object", "additionalProperties": A}, {"k": {"a": 1}}, {"k": {"b": 1}}),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"}, {"a": 1}, {"b": 1}),
        (
            {"$defs": {"A": A}} | object_of(x={"allOf": [{"$ref": "#/$defs/A"}], "title": "X"}),
            {"x": {"a": 1}},
            {"x": {"b": 1}},
        ),
        (object_of(x={"anyOf": [A, B, {"type": "null"}]}), {"x": {"b": 1}}, {"x": {"c": 1}}),
        (object_of(x={"anyOf": [A, B]}), {"x": {"b": 1}}, {"x": {"a": 1, "b": 1}}),
        (A | {"anyOf": [{"required": ["a"]}]}, {"a": 1}, {"a": 1, "b": 1}),
        (object_of(a={}, sub={"$ref": "#"}), {"sub": {"a": 1}}, {"sub": {"b": 1}}),
        (object_of(), {}, {"a": 1}),
    ],
)
def test_unknown_properties_are_not_allowed(
    tokenizer: LLTokenizer, schema: dict[str, Any], good: Any, invented: Any
) -> None:
    before = json.dumps(schema)
    outputs = [
        response_format(schema),
        response_format(schema, strict=True),
        constraint(structured_outputs={"json": schema, "disable_additional_properties": True}),
        constraint(json_schema=before),
    ]
    for output in outputs:
        assert accepts(tokenizer, output, json.dumps(good))
        assert not accepts(tokenizer, output, json.dumps(invented))
    tag = {"begin": "<a>", "schema": schema, "end": "</a>"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["<a>"]}
    content = {"type": "json_schema", "json_schema": schema}
    form = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    for output in (
        constraint(response_format=tags),
        constraint(response_format={"type": "structural_tag", "format": form}),
        constraint(structured_outputs={"structural_tag": json.dumps(tags)}),
    ):
        assert accepts(tokenizer, output, f"<a>{json.dumps(good)}</a>")
        assert not accepts(tokenizer, output, f"<a>{json.dumps(invented)}</a>")
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    ("schema", "good"),
    [
        ({"type": "object"}, {"b": 1}),
        (A | {"additionalProperties": True}, {"a": 1, "b": 1}),
        (A | {"additionalProperties": {"type": "string"}}, {"a": 1, "b": "x"}),
        (A | {"patternProperties": {"^b": {}}}, {"a": 1, "b": 1}),
        (A | {"required": ["b"]}, {"a": 1, "b": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 1}),
        ({"$defs": {"A": A}, "allOf": [{"$ref": "#/$defs/A"}, B]}, {"a": 1, "b": 1}),
        ({"$defs": {"A": A}, "$ref": "#/$defs/A"} | B, {"a": 1, "b": 1}),
        (A | {"anyOf": [B, {"required": ["c"]}]}, {"a": 1, "b": 1}),
        (A | {"oneOf": [{"properties": {"a": {"const": 1}, "b": {}}}]}, {"a": 1, "b": 1}),
        (
            {"$defs": {"A": A}}
            | object_of(x={"$ref": "#/$defs/A"}, y={"allOf": [{"$ref": "#/$defs/A"}, B]}),
            {"x": {}, "y": {"a": 1, "b": 1}},
        ),
        ({"allOf": [object_of(x=A), object_of(x=B, y={})]}, {"x": {"a": 1, "b": 1}, "y": 1}),
        (
            {
                "$id": "https://example.com/a",
                "$ref": "https://example.com/a#/$defs/A",
                "$defs": {"A": A},
            }
            | B,
            {"a": 1, "b": 1},
        ),
    ],
)
def test_open_objects_and_those_of_several_schemas_stay_open(
    tokenizer: LLTokenizer, schema: dict[str, Any], good: Any
) -> None:
    assert accepts(tokenizer, response_format(schema), json.dumps(good))


UNENFORCEABLE = {
    "set": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
    "secret": {"type": "string", "format": "password"},
}


@pytest.mark.parametrize("is_strict", [None, False, True])
def test_schemas_of_pydantic_sets_and_secrets_are_accepted(
    tokenizer: LLTokenizer, is_strict: bool | None
) -> None:
    schema = {"$defs": {"Set": UNENFORCEABLE["set"]}} | object_of(
        set={"$ref": "#/$defs/Set"},
        secret=UNENFORCEABLE["secret"],
        format={"const": {"format": "z"}},
    )
    output = response_format(schema, strict=is_strict)
    good = {"set": [1, 2], "secret": "x", "format": {"format": "z"}}
    assert accepts(tokenizer, output, json.dumps(good))
    for bad in ({"set": ["x"]}, {"secret": 1}, {"format": {}}):
        assert not accepts(tokenizer, output, json.dumps(bad))


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer", "not": {"const": 1}}, 2, "x"),
        (A | {"if": A, "then": {"required": ["a"]}}, {"a": 1}, {"a": "x"}),
        ({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}, [1], ["x"]),
        ({"type": "object", "propertyNames": {"pattern": "^a"}}, {"a": 1}, []),
        (A | {"dependentRequired": {"a": []}}, {"a": 1}, {"a": "x"}),
        ({"type": "object", "unevaluatedProperties": False}, {}, []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1, "x"),
        ({"type": "string", "pattern": "^(?!foo)b"}, "b", 1),
        ({"type": "object", "patternProperties": {"(?=a)": {"type": "integer"}}}, {"a": 1}, []),
    ],
)
def test_unsupported_keywords_are_ignored_unless_strict(
    tokenizer: LLTokenizer, schema: dict[str, Any], good: Any, bad: Any
) -> None:
    for output in (
        response_format(schema),
        constraint(structured_outputs={"json": schema}),
        constraint(response_format={"type": "json_object", "schema": schema}),
    ):
        assert accepts(tokenizer, output, json.dumps(good))
        assert not accepts(tokenizer, output, json.dumps(bad))
    with pytest.raises(ValueError, match="compiled"):
        verify_structured_output(response_format(schema, strict=True))


BAD = {"type": "string", "pattern": "^(?!foo)b"}


def test_invalid_patterns_are_dropped_outside_the_frontends_process(
    tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMatcher, "validate_grammar_with_warnings", None)
    schema = object_of(a=BAD, b={"type": "string", "pattern": "^x$"})
    output = response_format(schema)
    assert "(?!foo)" in output.spec
    assert "(?!foo)" not in usable(output).spec
    monkeypatch.undo()
    assert accepts(tokenizer, output, '{"a": "foob", "b": "x"}')
    assert not accepts(tokenizer, output, '{"a": "foob", "b": "y"}')


@pytest.mark.parametrize("count", [3, 300])
def test_any_number_of_invalid_patterns_is_dropped(count: int) -> None:
    schema = object_of(**{f"p{i}": {"type": "string", "pattern": f"(?={i})"} for i in range(count)})
    assert 'pattern"' not in usable(response_format(schema)).spec


def test_invalid_patterns_of_structural_tags_and_tools_are_dropped(tokenizer: LLTokenizer) -> None:
    tag = {"begin": "<a>", "schema": BAD, "end": "</a>"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["<a>"]}
    assert accepts(tokenizer, constraint(response_format=tags), '<a>"foob"</a>')
    tool = {"name": "f", "parameters": object_of(x=BAD) | {"required": ["x"]}}
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        request = ChatCompletionRequest(
            tools=[{"type": "function", "function": tool}], tool_choice=choice
        )
        calls = parse_tool_choice(request).constraint
        assert calls is not None
        text = '{"x": "foob"}'
        if choice == "required":
            text = f'[{{"name": "f", "parameters": {text}}}]'
        assert accepts(tokenizer, calls.structured_output, text)
        for part in calls.parts:
            assert "(?!foo)" not in usable(part.structured_output).spec


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}}],
    ids=["none", "empty", "object", "no-properties"],
)
def test_a_function_without_parameters_takes_no_arguments(
    tokenizer: LLTokenizer, parameters: object, is_strict: bool
) -> None:
    function = {"name": "f", "parameters": parameters, "strict": is_strict}
    named = {"type": "function", "function": {"name": "f"}}
    for choice, form in ((named, "%s"), ("required", '[{"name": "f", "parameters": %s}]')):
        request = ChatCompletionRequest(
            tools=[{"type": "function", "function": function}], tool_choice=choice
        )
        calls = parse_tool_choice(request).constraint
        assert calls is not None
        assert accepts(tokenizer, calls.structured_output, form % "{}")
        assert not accepts(tokenizer, calls.structured_output, form % '{"city": "Oslo"}')


def test_a_schema_nested_too_deeply_is_rejected() -> None:
    deep = '{"items":' * 100_000 + "{}" + "}" * 100_000
    with pytest.raises(APIError, match="nested too deeply") as error:
        constraint(json_schema=deep)
    assert (error.value.status, error.value.param) == (400, "json_schema")


@pytest.mark.parametrize(
    "target", [object_of(**{f"p{n}": {} for n in range(8000)}), {"required": ["a"] * 12_000}]
)
def test_references_to_a_large_schema_take_linear_time(
    target: dict[str, Any],
) -> None:
    uses = [{"properties": {"a": {}}, "$ref": "#/$defs/A"}] * 5000
    began = time.process_time()
    prepare_schema({"$defs": {"A": target}, "anyOf": uses}, is_strict=True)
    assert time.process_time() - began < 30


def test_a_reference_with_a_huge_index_has_no_target() -> None:
    schema = A | {"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}]}
    assert prepare_schema(schema, is_strict=True) == schema


KEYWORDS = [
    "properties",
    "patternProperties",
    "additionalProperties",
    "required",
    "allOf",
    "anyOf",
    "$ref",
    "$defs",
    "$id",
    "items",
    "contains",
    "then",
    "dependentSchemas",
    "pattern",
    "format",
    "uniqueItems",
    "enum",
    "a",
    "b",
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["a", "(", "#", "#/$defs/a"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
)


@given(st.dictionaries(st.sampled_from(KEYWORDS), values), st.booleans())
def test_any_json_value_can_be_prepared_as_a_schema(
    schema: dict[str, Any], is_strict: bool
) -> None:
    before = json.dumps(schema)
    prepared = prepare_schema(schema, is_strict=is_strict)
    assert json.dumps(schema) == before
    assert prepare_schema(prepared, is_strict=is_strict) == prepared
