"""What a parser reads as tool calls, as rules of a Lark grammar."""

import json
from collections.abc import Sequence

from ..tokenizer import Tokenizer
from .json_tools import JsonFormat

_ARGUMENTS_MARK = "[ARGS]"


def call_rules(
    format: JsonFormat, names: Sequence[str], tokenizer: Tokenizer, *, parallel: bool
) -> str:
    """The rule `calls` and those it needs: one call or, if `parallel`, more, of functions with these names.

    Their arguments are any object, as they are where no grammar holds.
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
        f"one: %json {json.dumps({'anyOf': shapes})}",
        f"list: %json {json.dumps(array)}",
        f"opening: {_any_mark(format.openings, tokenizer)}",
        r"SPACE: /[ \t\r\n]{1,8}/",
    ]
    if format.names_first:
        bodies.append("named")
        rules += [
            f"named: ({_any_text(names)}) arguments_mark? SPACE? arguments",
            f"arguments_mark: {_any_mark([_ARGUMENTS_MARK], tokenizer)}",
            'arguments: %json {"type": "object"}',
        ]
    block = f"opening SPACE? ({' | '.join(bodies)})"
    if format.closing is not None:
        rules.append(f"closing: {_any_mark([format.closing], tokenizer)}")
        block += " (SPACE? closing)?"
    blocks = "SPACE? block (SPACE? block)*" if parallel else "SPACE? block"
    if format.bare:
        blocks += ' | SPACE? one (SPACE? ";" SPACE? one)*' if parallel else " | SPACE? one"
    return "\n".join([f"calls: {blocks}", f"block: {block}", *rules])


def _any_mark(marks: Sequence[str], tokenizer: Tokenizer) -> str:
    """A mark that is one token may not match as text."""
    found = map(tokenizer.token_to_id, marks)
    tokens = [f"<[{token_id}]>" for token_id in found if token_id is not None]
    return " | ".join([_any_text(marks), *tokens])


def _any_text(texts: Sequence[str]) -> str:
    return " | ".join(map(json.dumps, texts))
