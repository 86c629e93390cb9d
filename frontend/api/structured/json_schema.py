"""Converts a client's JSON schema to one that a grammar can enforce and that models can complete."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final, TypeAlias
from urllib.parse import unquote

import msgspec

from ....protocol.grammars.grammar import MAX_SPEC_LENGTH

Schema: TypeAlias = dict[str, Any]

MAX_PATTERNS: Final = 256
"""Maximum patterns of a schema that are test-compiled; a bad one after these is an error."""

_MAPS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_NESTED = (
    "allOf",
    "anyOf",
    "oneOf",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "not",
    "if",
    "then",
    "else",
)
_OPENNESS = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_OTHER_PARTS = (*_OPENNESS, "items", "prefixItems", "contains")
_PARTS = ("properties", "required", *_OTHER_PARTS)
"""Keywords that describe the contents of an object or an array."""
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)


def prepare_schema(schema: Schema, *, is_strict: bool) -> Schema:
    """Return a copy with closed objects, without keywords that only narrow it and cannot be enforced.

    A strict schema loses unknown formats and `uniqueItems`, which client libraries add automatically. Any other schema
    loses patterns that cannot be compiled; `lenient` makes the compiler ignore the rest.

    Raises:
        RecursionError: The schema is nested too deeply.
    """
    text = msgspec.json.encode(schema)
    prepared: Schema = msgspec.json.decode(text)
    if len(text) > MAX_SPEC_LENGTH:
        return prepared  # Too long; it is rejected when it is compiled.
    _close_objects(prepared)
    if is_strict:
        for part in _all_parts(prepared):
            part.pop("uniqueItems", None)
            kind = part.get("format")
            if isinstance(kind, str) and kind not in _KNOWN_FORMATS:
                del part["format"]
    else:
        _drop_bad_patterns(prepared)
    return prepared


def lenient(schema: Schema) -> Schema:
    """Return a whole document, marked so that the compiler ignores what it cannot enforce."""
    given = schema.get("x-guidance")
    options = given if isinstance(given, dict) else {}
    return schema | {"x-guidance": {"lenient": True} | options}


def _all_parts(root: Schema) -> Iterator[Schema]:
    parts = [root]
    while parts:
        part = parts.pop()
        yield part
        for keyword in _MAPS:
            parts += [s for _, child in _items(part.get(keyword)) for s in _schemas(child)]
        for keyword in _NESTED:
            parts += _schemas(part.get(keyword))


def _drop_bad_patterns(root: Schema) -> None:
    verdicts: dict[str, bool] = {}

    def is_bad(pattern: object) -> bool:
        if not isinstance(pattern, str):
            return False
        if pattern not in verdicts:
            verdicts[pattern] = len(verdicts) < MAX_PATTERNS and not _compiles(pattern)
        return verdicts[pattern]

    for part in _all_parts(root):
        if is_bad(part.get("pattern")):
            del part["pattern"]
        by_pattern = part.get("patternProperties")
        if isinstance(by_pattern, dict) and any(map(is_bad, by_pattern)):
            # It is unknown which properties the bad patterns match, so all are allowed.
            del part["patternProperties"]
            part["additionalProperties"] = True


def _compiles(pattern: str) -> bool:
    from llguidance import LLMatcher

    schema = {"type": "string", "pattern": pattern}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not is_error


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
        own = dict(_items(part.get("properties")))
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
            shared.update(*(dict(_items(m.get("properties"))) for m in members.values()))
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
        yield _schemas(_resolve(reference, root))
    for member in _schemas(part.get("allOf")):
        yield [member]
    yield _schemas(part.get("anyOf"))
    yield _schemas(part.get("oneOf"))
    yield [*_schemas(part.get("then")), *_schemas(part.get("else"))]
    for _, member in _items(part.get("dependentSchemas")):
        yield _schemas(member)


def _children(part: Schema) -> Iterator[tuple[str | None, Schema]]:
    """Yield the parts that describe the contents of a value, each with its property name.

    The name is "" for contents without one, and None if other parts may describe the same contents.
    """
    patterns = dict(_items(part.get("patternProperties")))
    for name, child in _items(part.get("properties")):
        yield from ((None if patterns else name, schema) for schema in _schemas(child))
    is_only_pattern = len(patterns) == 1 and "properties" not in part
    for child in patterns.values():
        yield from (("" if is_only_pattern else None, schema) for schema in _schemas(child))
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        yield from (("", schema) for schema in _schemas(part.get(keyword)))
    for keyword in ("items", "prefixItems", "additionalItems", "unevaluatedItems"):
        place = None if "contains" in part else ""
        yield from ((place, schema) for schema in _schemas(part.get(keyword)))


def _describes(part: Schema) -> bool:
    return any(part.get(keyword, []) != [] for keyword in _PARTS)


def _is_within(part: Schema, own: Schema) -> bool:
    """Return whether `part` constrains only the `own` properties of an object."""
    named, required = dict(_items(part.get("properties"))), _required(part)
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


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _schemas(value: object) -> list[Schema]:
    """Return the objects in `value`, which is a schema or a list of schemas."""
    entries = value if isinstance(value, list) else [value]
    return [entry for entry in entries if isinstance(entry, dict)]


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
