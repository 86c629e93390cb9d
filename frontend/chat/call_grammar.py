"""Lark grammars for the tool-call formats that the parsers read."""

import json
from collections.abc import Sequence

from ...protocol.grammars.grammar import json_expression
from ..tokenizer import Tokenizer
from .json_tools import JsonFormat

_ARGUMENTS_MARK = "[ARGS]"


def call_rules(
    format: JsonFormat, names: Sequence[str], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """Return the rule `calls` and its dependencies: one call of the named functions, or several if `parallel`.

    The arguments may be any object.
    """
    shapes = [
        {
            "type": "object",
            "properties": {"name": {"enum": list(names)}, key: {"type": "object"}},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for key in ("arguments", "parameters")
    ]
    array = {"type": "array", "items": {"anyOf": shapes}, "minItems": 1}
    if not parallel:
        array["maxItems"] = 1
    bodies = ["one", "list"]
    rules = [
        f"one: {json_expression({'anyOf': shapes})}",
        f"list: {json_expression(array)}",
        f"opening: {_any_mark(format.openings, tokenizer)}",
        r"SPACE: /[ \t\r\n]{1,8}/",
    ]
    if format.names_first:
        bodies.append("named")
        rules += [
            f"named: ({_any_text(names)}) arguments_mark? SPACE? arguments",
            f"arguments_mark: {_any_mark([_ARGUMENTS_MARK], tokenizer)}",
            f"arguments: {json_expression({'type': 'object'})}",
        ]
    rest = f"SPACE? ({' | '.join(bodies)})"
    if format.closing is not None:
        rules.append(f"closing: {_any_mark([format.closing], tokenizer)}")
        rest += " (SPACE? closing)?"
    blocks = "SPACE? block (SPACE? block)*" if parallel else "SPACE? block"
    if format.bare:
        blocks += ' | SPACE? one (SPACE? ";" SPACE? one)*' if parallel else " | SPACE? one"
    return "\n".join(
        [f"calls: {blocks}", "block: opening rest_of_block", f"rest_of_block: {rest}", *rules]
    )


def text_or_calls(
    format: JsonFormat, names: Sequence[str], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """Return a grammar of arbitrary text in which every tool call is a call of one of these functions."""
    # The parser reads a bare object or array as a call, so no text may begin with one.
    text = r"[ \t\r\n]*([^{\[ \t\r\n](.|\n)*)?" if format.bare else r"(.|\n)*"
    openings = ["text_to_opening", *(f"TEXT {t}" for t in _tokens(format.openings, tokenizer))]
    calls = f"called{'*' if parallel else '?'} TEXT"
    return "\n".join(
        [
            "%llguidance {}",
            f"start: {calls} | calls TEXT" if format.bare else f"start: {calls}",
            f"called: ({' | '.join(openings)}) rest_of_block",
            f"text_to_opening[lazy]: TEXT ({_any_text(format.openings)})",
            f"TEXT: /{text}/",
            call_rules(format, names, tokenizer, parallel=parallel),
        ]
    )


def _any_mark(marks: Sequence[str], tokenizer: Tokenizer) -> str:
    """Return an expression for the marks. A mark that is a single token must not match as text."""
    return " | ".join([_any_text(marks), *_tokens(marks, tokenizer)])


def _tokens(marks: Sequence[str], tokenizer: Tokenizer) -> list[str]:
    found = map(tokenizer.token_to_id, marks)
    return [f"<[{token_id}]>" for token_id in found if token_id is not None]


def _any_text(texts: Sequence[str]) -> str:
    return " | ".join(map(json.dumps, texts))
