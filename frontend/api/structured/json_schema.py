"""Convert a client's JSON schema to one that a grammar can enforce and that models can complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from ....protocol.grammars.grammar import MAX_SPEC_LENGTH
from ....protocol.grammars.json_schema import (
    ARRAY_ITEMS,
    OTHER_PROPERTIES,
    Schema,
    all_parts,
    mapping_of,
    schemas_of,
)
from ..numbers import parse_number

_OPENNESS = (*OTHER_PROPERTIES, "patternProperties")
_OTHER_PARTS = (*_OPENNESS, "items", "prefixItems", "contains")
_PARTS = ("properties", "required", *_OTHER_PARTS)
"""Keywords that describe the contents of an object or an array."""
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "then", "else", "dependentSchemas")
"""Keywords that apply other schemas to the same value."""
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def prepare_schema(schema: Schema, *, is_strict: bool) -> Schema:
    """Return a copy of a schema whose objects allow no other properties, without keywords that cannot be enforced.

    A strict schema loses unknown formats and `uniqueItems`, which client libraries add automatically. For any other
    schema, `lenient` makes the compiler ignore keywords that it cannot enforce.

    Raises:
        RecursionError: The schema is nested too deeply.
    """
    text = msgspec.json.encode(schema)
    prepared: Schema = msgspec.json.decode(text)
    if len(text) > MAX_SPEC_LENGTH:
        return prepared  # Too long; it is rejected when it is compiled.
    _close_objects(prepared)
    if is_strict:
        for part in all_parts(prepared):
            part.pop("uniqueItems", None)
            kind = part.get("format")
            if isinstance(kind, str) and kind not in _KNOWN_FORMATS:
                del part["format"]
    return prepared


def _close_objects(root: Schema) -> None:
    """Add `additionalProperties: false` to objects that list their properties and do not say whether there are more.

    By the JSON Schema specification there may be more, but a model that may invent properties does not stop.

    An object, and everything in it, stays open if other schemas describe the same value (allOf, siblings of $ref or
    anyOf): closed schemas could contradict each other. Nothing is closed if a reference leaves the document or its
    resource.
    """
    try:
        closed = _find_closed(root)
    except LookupError:
        return
    for part in closed:
        part["additionalProperties"] = False


def _find_closed(root: Schema) -> list[Schema]:
    """Return the parts to close, in time proportional to the size of the schema.

    Raises:
        LookupError: A reference cannot be followed.
    """
    closed: dict[int, Schema] = {}
    kept_open: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    queue = [(root, True)]
    while queue:
        # `is_alone` means that no other schema applies to the same value.
        part, is_alone = queue.pop()
        if (id(part), is_alone) in seen:
            continue
        seen.add((id(part), is_alone))
        if part is not root and "$id" in part:
            raise LookupError
        own = _properties(part)
        groups = list(_groups(part, root))
        describing = [group for group in groups if any(map(_says_something, group))]
        members = [member for group in describing for member in group]
        # Members that only narrow or require the object's own properties do not conflict with closing it.
        is_sole = is_alone and all(_is_within(member, own) for member in members)
        if is_sole and _may_close(part, own):
            closed[id(part)] = part
        else:
            kept_open.add(id(part))
        is_bare = is_alone and not _describes(part)
        for group in groups:
            is_only = is_bare and all(other is group for other in describing[:2])
            queue += [(member, is_only) for member in group]
        shared = {name for member in members for name in _properties(member)} if is_sole else set()
        for name, child in _children(part):
            queue.append((child, is_sole and name is not None and name not in shared))
    return [part for key, part in closed.items() if key not in kept_open]


def _groups(part: Schema, root: Schema) -> Iterator[list[Schema]]:
    """Yield groups of other parts that apply to the same value. At least one part of each group applies.

    Raises:
        LookupError: A reference cannot be followed.
    """
    if "$dynamicRef" in part or "$recursiveRef" in part:
        raise LookupError
    if isinstance(reference := part.get("$ref"), str):
        target = _resolve(reference, root)
        yield [target] if isinstance(target, dict) else []
    for member in schemas_of(part.get("allOf")):
        yield [member]
    yield schemas_of(part.get("anyOf"))
    yield schemas_of(part.get("oneOf"))
    yield [*schemas_of(part.get("then")), *schemas_of(part.get("else"))]
    for member in mapping_of(part.get("dependentSchemas")).values():
        yield schemas_of(member)


def _children(part: Schema) -> Iterator[tuple[str | None, Schema]]:
    """Yield the parts that describe the contents of a value, each with its property name.

    The name is "" for contents without one, and None if other parts may describe the same contents.
    """
    patterns = mapping_of(part.get("patternProperties"))
    for name, child in _properties(part).items():
        yield from ((None if patterns else name, schema) for schema in schemas_of(child))
    is_only_pattern = len(patterns) == 1 and "properties" not in part
    for child in patterns.values():
        yield from (("" if is_only_pattern else None, schema) for schema in schemas_of(child))
    for keyword in OTHER_PROPERTIES:
        yield from (("", schema) for schema in schemas_of(part.get(keyword)))
    for keyword in ARRAY_ITEMS:
        place = None if "contains" in part else ""
        yield from ((place, schema) for schema in schemas_of(part.get(keyword)))


def _describes(part: Schema) -> bool:
    return any(part.get(keyword, []) != [] for keyword in _PARTS)


def _says_something(part: Schema) -> bool:
    """Return whether a part describes contents, or combines other parts that may."""
    return _describes(part) or any(keyword in part for keyword in _COMBINING)


def _is_within(part: Schema, own: Schema) -> bool:
    """Return whether `part` constrains only the `own` properties of an object."""
    return (
        not any(keyword in part for keyword in (*_OTHER_PARTS, *_COMBINING))
        and own.keys() >= _properties(part).keys()
        and _requires_only(part, own)
    )


def _may_close(part: Schema, own: Schema) -> bool:
    return (
        isinstance(part.get("properties"), dict)
        and not any(keyword in part for keyword in (*_OPENNESS, "const", "enum", "minProperties"))
        and _requires_only(part, own)
    )


def _requires_only(part: Schema, own: Schema) -> bool:
    """Return whether `part` requires `own` properties only. The names in `required` must be distinct."""
    required = part.get("required")
    if not isinstance(required, list):
        return True
    return len(required) <= len(own) and all(
        name in own for name in required if isinstance(name, str)
    )


def _properties(part: Schema) -> dict[str, Any]:
    return mapping_of(part.get("properties"))


def _resolve(reference: str, root: Schema) -> Any:
    """Return the target of a JSON pointer in the document.

    Raises:
        LookupError: It is another kind of reference, or has no target.
    """
    if reference == "#":
        return root
    if not reference.startswith("#/"):
        raise LookupError
    value: Any = root
    for step in unquote(reference[2:]).split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            if (position := parse_number(key)) is None:
                raise LookupError
            value = value[position]
        elif isinstance(value, dict):
            value = value[key]
        else:
            raise LookupError
    return value
