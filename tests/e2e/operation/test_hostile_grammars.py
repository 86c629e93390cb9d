"""Grammars that overflow stacks, or need all time or memory, fail only their own request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engine.core.structured_output.manager import StructuredOutputManager
from engine.protocol.sampling_params import GrammarKind, StructuredOutput
from support.chat.grammars import SMOLLM2_EOS, verify_structured_output
from support.processes.program import wait_until
from support.servers.engine_fixtures import smollm2_tokenizer

TOKENIZER = smollm2_tokenizer()


def schema(value: object) -> StructuredOutput:
    return StructuredOutput(GrammarKind.JSON_SCHEMA, json.dumps(value))


def lark(text: str) -> StructuredOutput:
    return StructuredOutput(GrammarKind.LARK, text)


def properties(count: int) -> dict[str, Any]:
    return {f"property_{i}": {"type": "string"} for i in range(count)}


def definitions(count: int) -> dict[str, Any]:
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**chain, f"d{count}": {"type": "string"}}}


OVERFLOWING = {
    "chain of rules": lark(
        "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"\n'
    ),
    "chain of references": schema(definitions(3000)),
}
EXHAUSTING = {
    "at least one of many": schema(
        {"minProperties": 1, "properties": properties(1500), "additionalProperties": False}
    ),
    "choice of itself": schema({"anyOf": [{"$ref": "#"}] * 20_000}),
}


@pytest.fixture
def manager() -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(str(TOKENIZER.path), TOKENIZER.vocab_size, (SMOLLM2_EOS,))
    yield manager
    manager.close()


def await_reports(manager: StructuredOutputManager, *keys: object) -> dict[object, str | None]:
    reports: dict[object, str | None] = {}
    wait_until(
        lambda: reports.update(manager.poll()) or reports.keys() >= set(keys),
        what="the grammars are compiled",
        timeout_s=60,
    )
    return reports


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_grammar_that_overflows_the_stack_is_rejected_as_too_deep(name: str) -> None:
    with pytest.raises(ValueError, match="nested too deeply: it needs more than 8 MiB of stack"):
        verify_structured_output(OVERFLOWING[name])
    assert not verify_structured_output(lark('start: "a"')), "the next one is checked"


@pytest.mark.parametrize("name", EXHAUSTING)
def test_a_grammar_over_a_limit_is_rejected_with_the_limit(name: str) -> None:
    with pytest.raises(ValueError, match=r"more than \d+ s|more than 512 MiB|too large"):
        verify_structured_output(EXHAUSTING[name])


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_grammar_that_crashes_its_process_in_the_core_fails_alone(
    manager: StructuredOutputManager, name: str
) -> None:
    grammar = OVERFLOWING[name]
    deeper = StructuredOutput(grammar.kind, grammar.spec, is_isolated=True)
    if name == "chain of rules":
        rules = "".join(f"r{i}: r{i + 1}\n" for i in range(40_000))
        deeper = StructuredOutput(
            GrammarKind.LARK, f'start: r0\n{rules}r40000: "a"\n', is_isolated=True
        )
    manager.compile("good", lark('start: "ab"'))
    manager.compile("bad", deeper)
    reports = await_reports(manager, "good", "bad")
    assert reports["good"] is None
    if name == "chain of rules":
        assert reports["bad"] is not None and "nested too deeply" in reports["bad"]
    assert manager.accept_tokens("good", TOKENIZER.encode("ab", add_special_tokens=False))


def test_a_large_schema_runs_in_its_own_process(manager: StructuredOutputManager) -> None:
    closed = {"type": "object", "properties": properties(1500), "additionalProperties": False}
    large = schema(closed)
    assert verify_structured_output(large)
    apart = StructuredOutput(large.kind, large.spec, is_isolated=True)
    manager.compile(0, apart)
    assert await_reports(manager, 0) == {0: None}
    text = '{"property_7": "x", "property_1400": "y"}'
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        mask = manager.fill_bitmask([0])
        assert mask[token_id // 8] >> token_id % 8 & 1
        assert manager.accept_tokens(0, [token_id])
        assert manager.is_compiling
        assert await_reports(manager, 0) == {0: None}
    assert manager.fill_bitmask([0])[SMOLLM2_EOS // 8] >> SMOLLM2_EOS % 8 & 1
    manager.release(0)
    assert not manager.is_compiling


def test_an_ordinary_schema_does_not_need_its_own_process() -> None:
    assert not verify_structured_output(schema({"type": "object", "properties": properties(3)}))
