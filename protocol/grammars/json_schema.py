"""Walk through JSON schemas, and remove from lenient schemas what cannot be enforced."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, TypeAlias

import msgspec

from ..sampling_params import GrammarKind, StructuredOutput

Schema: TypeAlias = dict[str, Any]

_MAPS: Final = frozenset(
    ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
)
ARRAY_ITEMS: Final = ("items", "prefixItems", "additionalItems", "unevaluatedItems")
OTHER_PROPERTIES: Final = ("additionalProperties", "unevaluatedProperties")
_LOGIC: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_NESTED: Final = frozenset((*ARRAY_ITEMS, *OTHER_PROPERTIES, *_LOGIC, "contains", "propertyNames"))


def all_parts(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas nested in it."""
    parts = [root]
    while parts:
        part = parts.pop()
        yield part
        for keyword, value in part.items():
            if keyword in _NESTED:
                parts += schemas_of(value)
            elif keyword in _MAPS:
                parts += [s for child in mapping_of(value).values() for s in schemas_of(child)]


def mapping_of(value: object) -> dict[str, Any]:
    """Return the value if it is a JSON object, else an empty object."""
    return value if isinstance(value, dict) else {}


def schemas_of(value: object) -> list[Schema]:
    """Return the schemas (JSON objects) among a single value or a list of values."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, dict)]


def relocate_references(place: str, schema: Schema) -> Schema:
    """Return `schema` with its references rewritten for its new place in a larger document."""
    parts: list[Any] = [schema]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict) and not isinstance(part.get("$id"), str):
            # References in a part with its own $id are relative to that part and stay valid.
            reference = part.get("$ref")
            if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
                part["$ref"] = place + reference[1:]
            parts += part.values()
    return schema


def tag_schemas(tag: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the objects within a structural tag that have a JSON schema, and the name of the field with it."""
    if isinstance(tag, list):
        for each in tag:
            yield from tag_schemas(each)
    elif isinstance(tag, dict):
        for name in ("structures", "format", "elements", "tags", "content"):
            yield from tag_schemas(tag.get(name))
        for name in ("schema", "json_schema"):
            if isinstance(tag.get(name), dict):
                yield tag, name


def lenient(schema: Schema) -> Schema:
    """Return the schema marked as lenient: parts of it that cannot be enforced are ignored instead of refused."""
    return schema | {"x-guidance": {"lenient": True} | mapping_of(schema.get("x-guidance"))}


def _is_lenient(schema: object) -> bool:
    options = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get("lenient") is True


def drop_bad_patterns(structured_output: StructuredOutput) -> StructuredOutput | None:
    """Return a constraint without the patterns of lenient schemas that cannot be compiled; None if there are none.

    Compiling a pattern can take any time and memory, so call this only in disposable processes.
    """
    match structured_output.kind:
        case GrammarKind.JSON_SCHEMA:
            document = msgspec.json.decode(structured_output.spec)
            schemas = [document]
        case GrammarKind.STRUCTURAL_TAG:
            document = msgspec.json.decode(structured_output.spec)
            schemas = [holder[name] for holder, name in tag_schemas(document)]
        case _:
            return None
    is_bad = cache(lambda pattern: not _compiles(pattern))
    has_changed = [_drop(schema, is_bad) for schema in schemas if _is_lenient(schema)]
    if not any(has_changed):
        return None
    spec = msgspec.json.encode(document).decode()
    return msgspec.structs.replace(structured_output, spec=spec)


def _drop(root: Schema, is_bad: Callable[[str], bool]) -> bool:
    """Remove the bad patterns from a schema. Return whether there were any."""
    has_changed = False
    for part in all_parts(root):
        pattern = part.get("pattern")
        if isinstance(pattern, str) and is_bad(pattern):
            del part["pattern"]
            has_changed = True
        by_pattern = part.get("patternProperties")
        if isinstance(by_pattern, dict) and any(map(is_bad, by_pattern)):
            # It is unknown to which properties the bad patterns apply, so allow any property.
            del part["patternProperties"]
            part["additionalProperties"] = True
            has_changed = True
    return has_changed


def _compiles(pattern: str) -> bool:
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not is_error
