"""Objects with thousands of properties."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine.protocol.grammars.large_objects import (
    MAX_FOLDED_SCHEMAS,
    MAX_ORDERED_PROPERTIES,
    MAX_UNFOLDED_PROPERTIES,
)
from engine.protocol.grammars.matcher import (
    compile_grammar,
    isolated_limits,
    load_grammar_tokenizer,
)
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from llguidance import LLTokenizer
from support.chat.grammars import SMOLLM2_EOS, verify_structured_output
from support.servers.engine_fixtures import smollm2_tokenizer

pytestmark = pytest.mark.slow

MANY = MAX_ORDERED_PROPERTIES + 1


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    known = smollm2_tokenizer()
    return load_grammar_tokenizer(str(known.path), known.vocab_size, [SMOLLM2_EOS])


def closed(properties: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **fields,
    }


def numbered(count: int, schema: Any = None) -> dict[str, Any]:
    return {f"p{i}": schema or {"type": "integer"} for i in range(count)}


def output(schema: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def accepts(tokenizer: LLTokenizer, schema: dict[str, Any], text: str) -> bool:
    matcher = compile_grammar(tokenizer, output(schema), isolated_limits())
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("count", [2000, 10_000])
@pytest.mark.parametrize("num_required", ["none", "half", "all"])
def test_an_object_may_have_thousands_of_properties(count: int, num_required: str) -> None:
    names = list(numbered(count))
    required = {"none": [], "half": names[::2], "all": names}[num_required]
    verify_structured_output(output(closed(numbered(count), required=required)))


def test_properties_of_a_large_object_keep_their_schemas(tokenizer: LLTokenizer) -> None:
    schema = closed(
        numbered(MANY)
        | {
            "text": {"type": "string", "description": "a text"},
            "other": {"type": "string", "description": "another"},
            "last": {"type": "boolean"},
        },
        required=["last", "p5"],
    )
    for good in (
        '{"p5": 1, "last": true}',
        '{"p5": 1, "last": true, "p2000": 3, "text": "x", "p0": 4, "other": "y"}',
    ):
        assert accepts(tokenizer, schema, good)
    for bad in (
        "{}",
        '{"p5": 1}',
        '{"p5": 1, "last": true, "p0": "x"}',
        '{"p5": 1, "last": true, "text": 1}',
        '{"p5": 1, "last": true, "p9999": 1}',
        '{"p5": 1, "last": true, "xp0": 1}',
        '{"p5": 1, "last": true, "p00": 1}',
    ):
        assert not accepts(tokenizer, schema, bad)


@pytest.mark.parametrize("name", ["a.b", "a|b", "(x", "[y]", "^$", "\\d", 'q"q', "é", "x-y z", ""])
def test_property_names_of_a_large_object_are_not_patterns(
    tokenizer: LLTokenizer, name: str
) -> None:
    schema = closed(numbered(MANY) | {name: {"type": "integer"}})
    assert accepts(tokenizer, schema, json.dumps({name: 1}, ensure_ascii=False))
    assert not accepts(tokenizer, schema, '{"zzz": 1}')
    assert not accepts(tokenizer, schema, '{"aXb": 1}')


def test_a_nested_large_object_is_folded() -> None:
    inner = closed(numbered(10_000))
    verify_structured_output(output(closed({"x": {"type": "array", "items": inner}})))
    tag = {"begin": "<a>", "schema": inner, "end": "</a>"}
    tags = {"type": "structural_tag", "structures": [tag], "triggers": ["<a>"]}
    verify_structured_output(StructuredOutput(GrammarKind.STRUCTURAL_TAG, json.dumps(tags)))


def test_references_into_a_large_object_are_followed(tokenizer: LLTokenizer) -> None:
    schema = closed(numbered(MANY) | {"q": {"$ref": "#/properties/p7"}})
    assert accepts(tokenizer, schema, '{"q": 1}')
    assert not accepts(tokenizer, schema, '{"q": "x"}')


@pytest.mark.parametrize(
    "schema",
    [
        closed({f"p{i}": {"const": i} for i in range(10_000)}),
        {"type": "object", "properties": numbered(10_000)},
        closed(numbered(10_000), maxProperties=3),
    ],
    ids=["different schemas", "open", "limited"],
)
def test_an_object_with_too_many_properties_is_rejected_with_the_limit(
    schema: dict[str, Any],
) -> None:
    problem = rf"has an object with 10000 optional .* at most {MAX_UNFOLDED_PROPERTIES} can be"
    with pytest.raises(ValueError, match=problem):
        verify_structured_output(output(schema))


def test_objects_are_folded_up_to_the_limit_of_different_schemas() -> None:
    schemas = {f"p{i}": {"const": i % MAX_FOLDED_SCHEMAS} for i in range(10_000)}
    verify_structured_output(output(closed(schemas)))
