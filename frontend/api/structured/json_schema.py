"""Converts a client's JSON schema to one that a grammar can enforce and that models can complete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import msgspec

from ....protocol.grammars.grammar import MAX_SPEC_LENGTH
from ....protocol.grammars.json_schema import Schema, all_parts, items_of, schemas_of

_OPENNESS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_OTHER_PARTS = (*_OPENNESS, "items", "prefixItems", "contains")
_PARTS = ("properties", "required", *_OTHER_PARTS)
"""Keywords that describe the contents of an object or an array."""
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def prepare_schema(schema: Schema, *, is_strict: bool) -> Schema:
    """Return a copy with closed objects, without keywords that only narrow it and cannot be enforced.

    A strict schema loses unknown formats and `uniqueItems`, which client libraries add automatically. For any other
    schema, `lenient` makes the compiler ignore what it cannot enforce.

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
        document = _Document(root)
    except LookupError:
        return
    closed: dict[int, Schema] = {}
    kept_open: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    queue = [(root, True)]
    while queue:
        part, is_alone = queue.pop()
        if (id(part), is_alone) in seen:
            continue
        seen.add((id(part), is_alone))
        own = dict(items_of(part.get("properties")))
        groups = document.groups[id(part)]
        describing = [any(id(member) in document.describing for member in g) for g in groups]
        members = {
            id(member): member
            for group, describes in zip(groups, describing, strict=True)
            if describes
            for member in group
        }
        # Members that only narrow or require the object's own properties do not conflict with closing it.
        is_sole = is_alone and all(
            not document.groups[key] and _is_within(member, own) for key, member in members.items()
        )
        shared: set[str] = set()
        if is_sole:
            shared.update(*(dict(items_of(m.get("properties"))) for m in members.values()))
        if is_sole and _may_close(part, own):
            closed[id(part)] = part
        else:
            kept_open.add(id(part))
        num_describing = sum(describing)
        is_bare = is_alone and not _describes(part)
        for group, describes in zip(groups, describing, strict=True):
            is_only = is_bare and num_describing == describes
            queue += [(member, is_only) for member in group]
        for name, child in _children(part):
            queue.append((child, is_sole and name is not None and name not in shared))
    for key, part in closed.items():
        if key not in kept_open:
            part["additionalProperties"] = False


class _Document:
    """All parts of a schema that describe a value.

    Raises LookupError for references that cannot be followed.

    Attributes:
        groups: By part id, the parts that apply to the same value. At least one part of each group applies.
        describing: The ids of parts that describe the contents of an object or array, themselves or through other
            parts.
    """

    def __init__(self, root: Schema) -> None:
        self.groups: dict[int, list[list[Schema]]] = {}
        self.describing: set[int] = set()
        owners: dict[int, list[Schema]] = {}
        describing: list[Schema] = []
        parts = [root]
        while parts:
            part = parts.pop()
            if id(part) in self.groups:
                continue
            if part is not root and "$id" in part:
                raise LookupError
            self.groups[id(part)] = groups = [group for group in _groups(part, root) if group]
            for group in groups:
                for member in group:
                    owners.setdefault(id(member), []).append(part)
                parts += group
            parts += [child for _, child in _children(part)]
            if _describes(part):
                describing.append(part)
        while describing:
            part = describing.pop()
            if id(part) not in self.describing:
                self.describing.add(id(part))
                describing += owners.get(id(part), ())


def _groups(part: Schema, root: Schema) -> Iterator[list[Schema]]:
    if "$dynamicRef" in part or "$recursiveRef" in part:
        raise LookupError
    if isinstance(reference := part.get("$ref"), str):
        yield schemas_of(_resolve(reference, root))
    for member in schemas_of(part.get("allOf")):
        yield [member]
    yield schemas_of(part.get("anyOf"))
    yield schemas_of(part.get("oneOf"))
    yield [*schemas_of(part.get("then")), *schemas_of(part.get("else"))]
    for _, member in items_of(part.get("dependentSchemas")):
        yield schemas_of(member)


def _children(part: Schema) -> Iterator[tuple[str | None, Schema]]:
    """Yield the parts that describe the contents of a value, each with its property name.

    The name is "" for contents without one, and None if other parts may describe the same contents.
    """
    patterns = dict(items_of(part.get("patternProperties")))
    for name, child in items_of(part.get("properties")):
        yield from ((None if patterns else name, schema) for schema in schemas_of(child))
    is_only_pattern = len(patterns) == 1 and "properties" not in part
    for child in patterns.values():
        yield from (("" if is_only_pattern else None, schema) for schema in schemas_of(child))
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        yield from (("", schema) for schema in schemas_of(part.get(keyword)))
    for keyword in ("items", "prefixItems", "additionalItems", "unevaluatedItems"):
        place = None if "contains" in part else ""
        yield from ((place, schema) for schema in schemas_of(part.get(keyword)))


def _describes(part: Schema) -> bool:
    return any(part.get(keyword, []) != [] for keyword in _PARTS)


def _is_within(part: Schema, own: Schema) -> bool:
    """Return whether `part` constrains only the `own` properties of an object."""
    named, required = dict(items_of(part.get("properties"))), _required(part)
    return (
        not any(keyword in part for keyword in _OTHER_PARTS)
        and own.keys() >= named.keys()
        and own.keys() >= required
    )


def _may_close(part: Schema, own: Schema) -> bool:
    return (
        isinstance(part.get("properties"), dict)
        and not any(keyword in part for keyword in (*_OPENNESS, "const", "enum", "minProperties"))
        and own.keys() >= _required(part)
    )


def _required(part: Schema) -> set[str]:
    required = part.get("required")
    if not isinstance(required, list):
        return set()
    return {name for name in required if isinstance(name, str)}


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
            if not key.isdecimal():
                raise LookupError
            value = value[int(key)]
        elif isinstance(value, dict):
            value = value[key]
        else:
            raise LookupError
    return value
