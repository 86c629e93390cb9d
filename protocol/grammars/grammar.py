"""Translate structured outputs to grammars in llguidance's notation.

The frontend uses the translation to check a request on arrival, and the core to compile its grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

from ..errors import ParameterError
from ..sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from .expressions import (
    FREE_TEXT,
    PARAM,
    any_of,
    bound_white_space,
    compilable,
    decode,
    json_expression,
    regex_literal,
)
from .structural_tags import structural_tag_grammar

MAX_SPEC_LENGTH: Final = 1 << 20
"""Maximum characters of a schema, expression or grammar."""

MAX_ERROR_LENGTH: Final = 500
"""Maximum characters of a grammar error that is returned to a client."""

_LONG_WORD: Final = re.compile(r"(\S{100})\S+")


def grammar_text(structured_output: StructuredOutput) -> str:
    """Return the grammar in llguidance's notation. Raise ParameterError if the specification cannot be read."""
    spec = structured_output.spec
    if len(spec) > MAX_SPEC_LENGTH:
        raise ParameterError(
            PARAM, f"must have at most {MAX_SPEC_LENGTH} characters, got {len(spec)}"
        )
    answer = _constraint(structured_output.kind, spec)
    if structured_output.reasoning is None:
        return json.dumps({"grammars": [answer]})
    whole = _after_reasoning(structured_output.reasoning)
    return json.dumps({"grammars": [{"lark_grammar": whole}, {"name": "answer", **answer}]})


def lark_expression(structured_output: StructuredOutput) -> str | None:
    """Return one Lark expression for the structured output, or None if it needs more than one rule."""
    spec = structured_output.spec
    match structured_output.kind:
        case GrammarKind.JSON_OBJECT:
            return json_expression({"type": "object"})
        case GrammarKind.JSON_SCHEMA:
            return json_expression(decode(spec, dict[str, Any] | bool))
        case GrammarKind.REGEX:
            return regex_literal(spec)
        case GrammarKind.CHOICE:
            return any_of(decode(spec, list[str]))
        case GrammarKind.LARK | GrammarKind.STRUCTURAL_TAG:
            return None


def _constraint(kind: GrammarKind, spec: str) -> dict[str, object]:
    match kind:
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": bound_white_space({"type": "object"})}
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": compilable(decode(spec, dict[str, Any] | bool))}
        case GrammarKind.REGEX:
            return {"lark_grammar": f"start: {regex_literal(spec)}"}
        case GrammarKind.CHOICE:
            choices = decode(spec, list[str])
            if not choices:
                raise ParameterError(PARAM, "must offer at least one choice, got []")
            return {"lark_grammar": "start: " + any_of(choices)}
        case GrammarKind.LARK:
            return {"lark_grammar": _lark(spec)}
        case GrammarKind.STRUCTURAL_TAG:
            return {"lark_grammar": structural_tag_grammar(spec)}


def shorten_error(message: str) -> str:
    """Return a grammar's error without the parser's state or stack, and with long words and long text cut."""
    message = re.split(r"<state>|<non-verbose/>|<backtrace>", message)[0].strip()
    if message == "NoExtensionBias":
        # llguidance's name for a grammar that allows no first token.
        return "no text matches it; it may refer only to itself"
    message = re.sub(r" {9,}", " ", _LONG_WORD.sub(r"\1…", message))
    if len(message) <= MAX_ERROR_LENGTH:
        return message
    return message[: MAX_ERROR_LENGTH - 1] + "…"


def _after_reasoning(reasoning: FreeReasoning) -> str:
    """Return rules for free text up to the first end mark, followed by the answer.

    A mark that is one token, as <think> usually is, may not match as text, so it is matched by its id as well. Marks
    are lazy, so that the end of a mark is not confused with the beginning of an answer.
    """
    if reasoning.grammar:
        return reasoning.grammar
    starts = ["start_text", *_tokens(reasoning.start_token_ids)]
    end_tokens = _tokens(reasoning.end_token_ids)
    if reasoning.max_tokens == 0:
        ends = end_tokens
    elif reasoning.max_tokens > 0:
        ends = [f"limited_text {token}" for token in end_tokens]
    else:
        ends = ["text_to_end", *(f"TEXT {token}" for token in end_tokens)]
    prefix = "start_mark? reasoning" if reasoning.is_open else "(start_mark reasoning)?"
    if reasoning.is_open and reasoning.is_optional:
        prefix = f"({prefix})?"
    return "\n".join(
        [
            f"start: {prefix} @answer",
            f"start_mark: {' | '.join(starts)}",
            f"start_text[lazy]: {any_of(reasoning.starts)}",
            f"reasoning: {' | '.join(ends)}",
            f"text_to_end[lazy]: TEXT ({any_of(reasoning.ends)})",
            f"limited_text[max_tokens={max(reasoning.max_tokens, 1)}]: TEXT",
            FREE_TEXT,
        ]
    )


def _tokens(token_ids: Iterable[int]) -> list[str]:
    return [f"<[{token_id}]>" for token_id in token_ids]


def _lark(grammar: str) -> str:
    """Return a Lark grammar unchanged, and a GBNF one (`root ::= …`) converted to Lark."""
    if "::=" not in grammar or grammar.startswith("%llguidance"):
        return grammar
    # Imported here so that only processes that use grammars load the library.
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return any_to_lark(grammar)
    except Exception as error:  # The converter raises errors of many types.
        raise ParameterError(PARAM, shorten_error(f"cannot be read as GBNF: {error}")) from None
