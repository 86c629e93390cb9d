"""The values that a schema allows for arguments that are written one by one between tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from ....protocol.grammars.json_schema import Schema, all_parts
from .values import types_of

_KEYWORDS: Final = frozenset(
    ("type", "properties", "required", "additionalProperties", "title", "description", "$schema")
)
_DEFINITIONS: Final = ("$defs", "definitions")
_NAME: Final = re.compile(r'[^<>"&\n]{1,128}')


class Value(msgspec.Struct, frozen=True):
    """The values of one argument. Without `choices` and `schema`, it is any text.

    Attributes:
        choices: The texts among which it is one.
        schema: The schema of the JSON that it is.
        is_string: True if it is written as a string, false if as other JSON; None if both may be.
    """

    choices: tuple[str, ...] = ()
    schema: Schema | None = None
    is_string: bool | None = None


def named_properties(schema: Schema) -> dict[str, Value] | None:
    """Return the values of the properties of a closed object; None if the schema says more than these."""
    properties = schema.get("properties")
    if (
        schema.keys() - _KEYWORDS - set(_DEFINITIONS)
        or not isinstance(properties, dict)
        or schema.get("additionalProperties") is not False
        or not all(map(_NAME.fullmatch, properties))
    ):
        return None
    return {name: _value_of(schema, name, value) for name, value in properties.items()}


def _value_of(root: Schema, name: str, schema: Any) -> Value:
    types = types_of(root, name)
    if not types or not isinstance(schema, Mapping):
        return Value()
    if "string" not in types:
        whole = {key: root[key] for key in _DEFINITIONS if key in root} | dict(schema)
        # References to other places would have no target in a schema of the value alone.
        is_whole = all(_is_defined(part.get("$ref")) for part in all_parts(whole))
        return Value(schema=whole if is_whole else None, is_string=False)
    if types != {"string"}:
        return Value()
    choices = schema.get("enum")
    if isinstance(choices, list) and all(
        isinstance(each, str) and each.strip() for each in choices
    ):
        return Value(tuple(choices), is_string=True)
    return Value(is_string=True)


def _is_defined(reference: Any) -> bool:
    return reference is None or str(reference).startswith(
        tuple(f"#/{key}/" for key in _DEFINITIONS)
    )
