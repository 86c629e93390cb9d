"""Lark expressions in llguidance's notation for parts of grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from ..errors import ParameterError
from .large_objects import fold_large_objects

PARAM: Final = "structured_outputs"
"""The name of the request parameter in error messages."""

WHITE_SPACE: Final = r" |\n{1,2}[ \t]{0,20}"
"""White space allowed between two elements of JSON: one space, or a line break with indentation.

Without this limit, a model that prefers white space would generate it until `max_tokens`.
"""

_WHITE_SPACE_OPTIONS: Final = ("whitespace_flexible", "whitespace_pattern")

FREE_TEXT: Final = r"TEXT: /(.|\n)*/"

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
    return f"%json {json.dumps(compilable(schema))}"


def compilable(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """Return the schema in the form that is compiled, in which large objects are rewritten."""
    if isinstance(schema, dict):
        fold_large_objects(schema, PARAM)
    return bound_white_space(schema)


def regex_literal(regex: str) -> str:
    """Return the regular expression between slashes, as Lark writes it."""

    def escape(match: re.Match[str]) -> str:
        return _ESCAPED.get(match[0], match[0])

    return "/" + re.sub(r"\\.|[/\n\r]", escape, regex, flags=re.DOTALL) + "/"


def any_of(texts: Iterable[str]) -> str:
    """Return the Lark expression for one of several texts."""
    return " | ".join(map(json.dumps, texts))


def decode(spec: str, expected: Any) -> Any:
    """Return the decoded JSON of a type. Raise ParameterError if the text is not valid."""
    try:
        return msgspec.json.decode(spec, type=expected)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ParameterError(PARAM, f"cannot be read: {error}") from None
