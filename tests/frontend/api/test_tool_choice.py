"""What a forced choice among tools lets the model write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from engine.frontend.api.schema import ChatCompletionRequest
from engine.frontend.api.tool_choice import parse_tool_choice
from engine.protocol.grammar import grammar_text
from llguidance import LLMatcher, LLTokenizer
from support.engine_fixtures import smollm2_tokenizer


def tool(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(smollm2_tokenizer().path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("identifier", [{}, {"$id": "https://example.com/a"}])
def test_references_are_those_of_each_tools_own_schema(
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
    assert json.dumps(tools) == before
    assert choice.constraint is not None
    grammar = grammar_text(choice.constraint.structured_output)

    def may_be(name: str, arguments: dict[str, Any]) -> bool:
        matcher = LLMatcher(tokenizer, grammar)
        assert not matcher.is_error(), matcher.get_error()
        text = json.dumps([{"name": name, "parameters": arguments}])
        token_ids = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    assert may_be("a", {"x": 1, "y": 2}) and may_be("b", {"x": "1"})
    assert not may_be("a", {"x": "1"}) and not may_be("a", {"y": "2"}) and not may_be("b", {"x": 1})
    assert may_be("c", {"c": {"c": {}}}) and not may_be("c", {"c": []})
