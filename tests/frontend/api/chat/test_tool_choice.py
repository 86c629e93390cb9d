"""The output that a forced choice among tools allows."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine.frontend.api.schema import ChatCompletionRequest
from engine.frontend.api.tools.tool_choice import parse_tool_choice
from engine.protocol.grammars.grammar import grammar_text
from llguidance import LLMatcher, LLTokenizer
from support.servers.engine_fixtures import smollm2_tokenizer


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(smollm2_tokenizer().path.read_text(encoding="utf-8"))


def accepts(tokenizer: LLTokenizer, grammar: str, value: object) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(json.dumps(value))
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("identifier", [{}, {"$id": "https://example.com/a"}])
def test_references_are_resolved_in_each_tools_own_schema(
    tokenizer: LLTokenizer, identifier: dict[str, str]
) -> None:
    tools = [
        tool(
            "a",
            **identifier,
            properties={"x": {"$ref": "#/$defs/X"}, "y": {"$ref": "#/properties/x"}},
            **{"$defs": {"X": {"type": "integer"}}},
        ),
        tool("b", properties={"x": {"$ref": "#/$defs/X"}}, **{"$defs": {"X": {"type": "string"}}}),
        tool("c", properties={"c": {"$ref": "#"}}, additionalProperties=False),
    ]
    before = json.dumps(tools)
    choice = parse_tool_choice(ChatCompletionRequest(tools=tools, tool_choice="required"))
    assert choice == parse_tool_choice(ChatCompletionRequest(tools=tools, tool_choice="any"))
    assert json.dumps(tools) == before
    assert choice.constraint is not None
    grammar = grammar_text(choice.constraint.structured_output)

    def may_be(name: str, arguments: dict[str, Any]) -> bool:
        return accepts(tokenizer, grammar, [{"name": name, "parameters": arguments}])

    assert may_be("a", {"x": 1, "y": 2}) and may_be("b", {"x": "1"})
    assert not may_be("a", {"x": "1"}) and not may_be("a", {"y": "2"}) and not may_be("b", {"x": 1})
    assert may_be("c", {"c": {"c": {}}}) and not may_be("c", {"c": []})


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "a"}}], ids=["required", "a"]
)
def test_unsupported_keywords_of_a_tools_schema_are_ignored(
    tokenizer: LLTokenizer, choice: str | dict[str, Any]
) -> None:
    properties = {
        "list": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "secret": {"type": "string", "format": "password"},
        "some": {"type": ["integer", "null"], "not": {"const": 1}},
        "map": {"type": "object", "propertyNames": {"pattern": "^a"}},
    }
    tools = [tool("a", properties=properties), tool("b", type="object")]
    parsed = parse_tool_choice(ChatCompletionRequest(tools=tools, tool_choice=choice))
    assert parsed.constraint is not None
    grammar = grammar_text(parsed.constraint.structured_output)

    def may_be(arguments: dict[str, Any]) -> bool:
        call = [{"name": "a", "parameters": arguments}]
        return accepts(tokenizer, grammar, call if choice == "required" else arguments)

    assert may_be({"list": [1, 2], "secret": "x", "some": None, "map": {"a": 1}})
    assert not may_be({"list": ["x"]}) and not may_be({"secret": 1}) and not may_be({"map": []})
