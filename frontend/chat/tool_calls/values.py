"""Convert argument values that models write as plain text to JSON."""

import ast
import json
from collections.abc import Mapping
from functools import reduce
from typing import Any, Final

import msgspec

from .tools import Parameters

_CONSTANTS: Final = {"true": "true", "false": "false", "null": "null", "none": "null"}
_MAX_DEPTH: Final = 8
"""Maximum nesting of alternatives and references in a parameter's schema."""


def json_string(text: str) -> str:
    """Return the text as a JSON string without its quotes. Pieces of a text can be converted separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that has one of the JSON `types`. Text that is not such a value becomes a string.

    An empty set of `types` permits every type.
    """
    source = text.strip()
    value = _as_json(source)
    if value is not None:
        kind = _type_of(value)
        if kind == "string" and types and "string" not in types:
            # Models quote numbers.
            return json_value(msgspec.json.decode(value, type=str), types)
        fits = not types or kind in types or (kind == "integer" and "number" in types)
        if kind != "string" and (fits or "string" not in types):
            return value
    return f'"{json_string(text)}"'


def types_of(parameters: Parameters, name: str) -> frozenset[str]:
    """Return the JSON types that a parameter's schema allows; none if that is unknown."""
    return types_of_schema(schema_of(parameters, name, parameters), parameters)


def types_of_schema(schema: Any, root: Parameters) -> frozenset[str]:
    """Return the JSON types that a schema within `root` allows; none if that is unknown."""
    return _types(schema, root, 0) or frozenset()


def schema_of(schema: Any, name: str | None, root: Parameters) -> Any:
    """Return the schema of an object's property `name`, or of an array's items if that is None.

    Return None if it is unknown. `schema` is within `root`. If there are alternatives, the first one with such a schema
    counts.
    """
    return _schema_of(schema, name, root, 0)


def _schema_of(schema: Any, name: str | None, root: Parameters, depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if name is None and "items" in schema:
        return schema["items"]
    properties = schema.get("properties")
    if name is not None and isinstance(properties, dict) and name in properties:
        return properties[name]
    branches = [
        branch
        for word in ("anyOf", "oneOf", "allOf")
        if isinstance(schema.get(word), list)
        for branch in schema[word]
    ]
    if "$ref" in schema:
        branches.append(_referenced(schema["$ref"], root))
    found = (_schema_of(branch, name, root, depth + 1) for branch in branches)
    return next((each for each in found if each is not None), None)


def _types(schema: Any, root: Parameters, depth: int) -> frozenset[str] | None:
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return None
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset((declared,))
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(_type_of(json.dumps(value)) for value in values)
    for word in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(word), list):
            found = [_types(branch, root, depth + 1) for branch in branches]
            known = [types for types in found if types is not None]
            return frozenset().union(*known) if len(known) == len(found) else None
    if isinstance(parts := schema.get("allOf"), list):
        limits = [_types(part, root, depth + 1) for part in parts]
        return reduce(_common_types, (types for types in limits if types is not None), None)
    return _types(_referenced(schema.get("$ref"), root), root, depth + 1)


def _common_types(first: frozenset[str] | None, second: frozenset[str]) -> frozenset[str]:
    return second if first is None else first & second


def _referenced(reference: Any, root: Parameters) -> Any:
    """Return the schema within `root` to which `$ref` refers; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: Any = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, dict) else None
    return target


def _as_json(source: str) -> str | None:
    """Return JSON for a value in JSON or Python notation, or in JSON whose quotes are escaped; None for others."""
    try:
        msgspec.json.decode(source)
        return source
    except (msgspec.DecodeError, RecursionError):
        pass
    if constant := _CONSTANTS.get(source.lower()):
        return constant
    if source[:1] not in "[{(":
        return None
    try:
        unescaped = msgspec.json.decode(f'"{source}"', type=str)
        msgspec.json.decode(unescaped)
        return unescaped
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        text = json.dumps(ast.literal_eval(source), ensure_ascii=False, allow_nan=False)
        return text.encode(errors="replace").decode()
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return None


def _type_of(value: str) -> str:
    match value[0]:
        case "{":
            return "object"
        case "[":
            return "array"
        case '"':
            return "string"
        case "t" | "f":
            return "boolean"
        case "n":
            return "null"
    return "integer" if value.lstrip("-").isdigit() else "number"
