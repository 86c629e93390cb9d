"""Translate structured outputs to grammars in llguidance's notation.

The frontend uses the translation to check a request on arrival, and the core to compile its grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ..errors import ParameterError
from ..sampling_params import FreeReasoning, GrammarKind, StructuredOutput
from .large_objects import fold_large_objects

PARAM: Final = "structured_outputs"
"""The name of the request parameter in error messages."""

MAX_SPEC_LENGTH: Final = 1 << 20
"""Maximum characters of a schema, expression or grammar."""

MAX_ERROR_LENGTH: Final = 500
"""Maximum characters of a grammar error that is returned to a client."""

_LONG_WORD: Final = re.compile(r"(\S{100})\S+")

WHITE_SPACE: Final = r" |\n{1,2}[ \t]{0,20}"
"""White space allowed between two elements of JSON: one space, or a line break with indentation.

Without this limit, a model that prefers white space would generate it until `max_tokens`.
"""

_WHITE_SPACE_OPTIONS: Final = ("whitespace_flexible", "whitespace_pattern")

_FREE_TEXT: Final = r"TEXT: /(.|\n)*/"

_ESCAPED: Final = {
    "/": r"\/",
    "\n": r"\n",
    "\r": r"\r",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}
"""Lark's forms of parts of regular expressions. Classes are those of ASCII, as in JSON Schema and in other servers."""


class _TagStructure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _StructuralTag(msgspec.Struct, frozen=True):
    structures: list[_TagStructure]
    triggers: list[str]


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
            return json_expression(_decode(spec, dict[str, Any] | bool))
        case GrammarKind.REGEX:
            return _regex_literal(spec)
        case GrammarKind.CHOICE:
            return _any_of(_decode(spec, list[str]))
        case GrammarKind.LARK | GrammarKind.STRUCTURAL_TAG:
            return None


def bound_white_space(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return the schema with limited white space, unless its own `x-guidance` sets it."""
    if schema is False:
        return schema
    schema = {} if schema is True else schema
    options = schema.get("x-guidance", {})
    if not isinstance(options, dict) or not options.keys().isdisjoint(_WHITE_SPACE_OPTIONS):
        return schema
    return schema | {"x-guidance": {"whitespace_pattern": WHITE_SPACE} | options}


def json_expression(schema: dict[str, Any] | bool) -> str:
    """Return the Lark expression for the JSON values of a schema.

    Raises:
        ParameterError: The schema has an object with too many optional properties.
    """
    return f"%json {json.dumps(_compilable(schema))}"


def _compilable(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return the schema in the form that is compiled, in which large objects are rewritten."""
    if isinstance(schema, dict):
        fold_large_objects(schema, PARAM)
    return bound_white_space(schema)


def _constraint(kind: GrammarKind, spec: str) -> dict[str, object]:
    match kind:
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": bound_white_space({"type": "object"})}
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": _compilable(_decode(spec, dict[str, Any] | bool))}
        case GrammarKind.REGEX:
            return {"lark_grammar": f"start: {_regex_literal(spec)}"}
        case GrammarKind.CHOICE:
            choices = _decode(spec, list[str])
            if not choices:
                raise ParameterError(PARAM, "must offer at least one choice, got []")
            return {"lark_grammar": "start: " + _any_of(choices)}
        case GrammarKind.LARK:
            return {"lark_grammar": _lark(spec)}
        case GrammarKind.STRUCTURAL_TAG:
            return {"lark_grammar": _tags(_decode(spec, _StructuralTag))}


def shorten_error(message: str) -> str:
    """Return a grammar's error without the parser's state, and with long words and long text cut."""
    message = re.split(r"<state>|<non-verbose/>", message)[0].strip()
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
    return "\n".join(
        [
            f"start: {prefix} @answer",
            f"start_mark: {' | '.join(starts)}",
            f"start_text[lazy]: {_any_of(reasoning.starts)}",
            f"reasoning: {' | '.join(ends)}",
            f"text_to_end[lazy]: TEXT ({_any_of(reasoning.ends)})",
            f"limited_text[max_tokens={max(reasoning.max_tokens, 1)}]: TEXT",
            _FREE_TEXT,
        ]
    )


def _any_of(texts: Iterable[str]) -> str:
    return " | ".join(map(json.dumps, texts))


def _tokens(token_ids: Iterable[int]) -> list[str]:
    return [f"<[{token_id}]>" for token_id in token_ids]


def _decode(spec: str, expected: Any) -> Any:
    try:
        return msgspec.json.decode(spec, type=expected)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError(PARAM, f"cannot be read: {error}") from None


def _regex_literal(regex: str) -> str:
    """Return the regular expression between slashes, as Lark writes it."""

    def escape(match: re.Match[str]) -> str:
        return _ESCAPED.get(match[0], match[0])

    return "/" + re.sub(r"\\.|[/\n\r]", escape, regex, flags=re.DOTALL) + "/"


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


def _tags(structural_tag: _StructuralTag) -> str:
    """Return rules for free text in which each occurrence of a trigger starts one of the tags that begin with it."""
    if not structural_tag.structures:
        raise ParameterError(PARAM, "must have at least one entry in structures, got []")
    bodies: dict[str, list[str]] = {}
    for structure in structural_tag.structures:
        matching = [t for t in structural_tag.triggers if t and structure.begin.startswith(t)]
        if not matching:
            raise ParameterError(
                PARAM,
                f"must have a trigger that is a prefix of {structure.begin!r}, got {structural_tag.triggers}",
            )
        trigger = max(matching, key=len)
        rest = structure.begin[len(trigger) :]
        body = [
            json.dumps(rest),
            json_expression(structure.schema),
            json.dumps(structure.end),
        ]
        bodies.setdefault(trigger, []).append(" ".join(body))
    rules = [
        "%llguidance {}",
        f"start: ({' | '.join(f'tag_{i}' for i in range(len(bodies)))})* TEXT",
    ]
    rules.append(_FREE_TEXT)
    for i, (trigger, tags) in enumerate(bodies.items()):
        rules.append(f"trigger_{i}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"tag_{i}: trigger_{i} ({' | '.join(tags)})")
    return "\n".join(rules)
