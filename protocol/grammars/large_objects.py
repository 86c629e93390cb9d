"""Rewrite JSON objects with thousands of optional properties, so that they compile in linear time.

llguidance generates the properties of an object in the order of the schema. Each optional one may be followed by any
later one, so the cost grows with the square of their number.
"""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from ..errors import ParameterError
from .json_schema import Schema, all_parts, mapping_of

MAX_ORDERED_PROPERTIES: Final = 2000
"""Number of optional properties up to which their order is kept; that takes 0.5 s to compile and 15 ms per token."""

MAX_UNFOLDED_PROPERTIES: Final = 4000
"""Maximum optional properties of an object that cannot be folded. So many take about 2 s to compile."""

MAX_FOLDED_SCHEMAS: Final = 64
"""Maximum number of distinct schemas among folded properties.

The cost of folding grows with the square of their number.
"""

_ANNOTATIONS: Final = frozenset(
    {
        "$comment",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_FOLDABLE: Final = _ANNOTATIONS | {
    "$defs",
    "$id",
    "$schema",
    "additionalProperties",
    "definitions",
    "properties",
    "required",
    "type",
    "x-guidance",
}
"""Keywords whose meaning does not change if the properties of their object are folded."""

_SPECIAL: Final = re.compile(r"[\\.+*?()|\[\]{}^$]")
"""Characters with a special meaning in regular expressions."""


def fold_large_objects(root: Schema, param: str) -> None:
    """Replace the optional properties of large closed objects by patterns that match their names.

    Folded properties may come in any order, after the required ones, and more than once.

    Args:
        root: The schema, which is changed.
        param: The parameter that errors name.

    Raises:
        ParameterError: An object has more optional properties than can be compiled.
    """
    parts = list(all_parts(root))
    large = [part for part in parts if len(_optional(part)) > MAX_ORDERED_PROPERTIES]
    if not large:
        return
    # A reference into the object must still find the property there, so keep the property in place.
    is_referred_to = any("/properties/" in str(part.get("$ref", "")) for part in parts)
    for part in large:
        optional = _optional(part)
        groups: dict[bytes, list[str]] = {}
        for name, schema in optional.items():
            groups.setdefault(_identity(schema), []).append(name)
        if (
            not is_referred_to
            and part.get("additionalProperties") is False
            and part.keys() <= _FOLDABLE
            and len(groups) <= MAX_FOLDED_SCHEMAS
        ):
            _fold(part, groups)
        elif len(optional) > MAX_UNFOLDED_PROPERTIES:
            raise ParameterError(
                param,
                f"has an object with {len(optional)} optional properties of {len(groups)} different "
                f"schemas, but at most {MAX_UNFOLDED_PROPERTIES} can be compiled; list them in required, "
                f"or close the object and use at most {MAX_FOLDED_SCHEMAS} different schemas",
            )


def _optional(part: Schema) -> dict[str, Any]:
    """Return the properties of an object that are not required."""
    properties = mapping_of(part.get("properties"))
    if len(properties) <= MAX_ORDERED_PROPERTIES:
        return {}
    required = part.get("required")
    names = set(map(str, required)) if isinstance(required, list) else set()
    return {name: schema for name, schema in properties.items() if name not in names}


def _identity(schema: Any) -> bytes:
    """Return bytes that are equal for schemas that accept the same values."""
    if isinstance(schema, dict):
        schema = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    return msgspec.json.encode(schema, order="deterministic")


def _fold(part: Schema, groups: dict[bytes, list[str]]) -> None:
    properties = part["properties"]
    part["patternProperties"] = {
        f"^({'|'.join(map(_escape, names))})$": properties[names[0]] for names in groups.values()
    }
    for names in groups.values():
        for name in names:
            del properties[name]


def _escape(name: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", name)
