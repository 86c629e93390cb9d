"""Convert values to the types of a schema. Errors name the field, its value and what was expected."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from ...http.errors import APIError, bad_request, echo
from ...http.shown_values import cut

T = TypeVar("T")

_AT = re.compile(r"^(.*?)(?: - at `(?:key in )?\$(.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_PLAIN_WORDS: Final = {
    r"`str` of length >= 1": "a non-empty string",
    r"\bint\b": "an integer",
    r"\bfloat\b": "a number",
    r"\bstr\b": "a string",
    r"\bbool\b": "a boolean",
    r"\barray\b": "an array",
    r"\bobject\b": "an object",
}
_OUT_OF_RANGE = ("Number out of range", "Integer value out of range")
_NOT_BASE64 = "Invalid base64 encoded string"
_NO_CHOICE: Final = ("Invalid value ", "Invalid enum value ")
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*)`", re.DOTALL)


def read_part(value: Any, kind: type[T], where: str = "") -> T:
    """Return a part of a body, which was decoded without a type, as the struct `kind`.

    Args:
        value: The part.
        kind: The struct, or a union of structs that the field `type` tells apart.
        where: The place of the part in the body, for errors.

    Raises:
        APIError: The part does not fit; the error names the field in it (400).
    """
    try:
        with contextlib.suppress(msgspec.ValidationError):
            return msgspec.convert(value, kind)
        return msgspec.convert(with_integers(value, msgspec.inspect.type_info(kind)), kind)
    except msgspec.ValidationError as error:
        raise invalid_field(str(error), msgspec.json.encode(value), where, kind) from None
    except RecursionError:
        raise bad_request(where, "is nested too deeply") from None


def with_integers(value: Any, wanted: msgspec.inspect.Type) -> Any:
    """Return `value` with integral floats converted to integers where `wanted` has integers."""
    for kind in wanted.types if isinstance(wanted, msgspec.inspect.UnionType) else (wanted,):
        match kind, value:
            case msgspec.inspect.IntType(), float() if value.is_integer():
                return int(value)
            case msgspec.inspect.ListType(), list():
                # Most values of a large body are numbers, so they are handled here without a call.
                has_integers = _has_integers(kind.item_type)
                return [
                    (int(item) if has_integers and item.is_integer() else item)
                    if type(item) is float
                    else item
                    if type(item) is int
                    else with_integers(item, kind.item_type)
                    for item in value
                ]
            case msgspec.inspect.StructType(), dict():
                types = {field.encode_name: field.type for field in kind.fields}
                return {
                    k: with_integers(v, types[k]) if k in types else v for k, v in value.items()
                }
    return value


def _has_integers(kind: msgspec.inspect.Type) -> bool:
    types = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    return any(isinstance(each, msgspec.inspect.IntType) for each in types)


def invalid_field(message: str, body: bytes, where: str = "", kind: Any = None) -> APIError:
    """Rewrite "Expected `int | null`, got `str` - at `$.n`" as "n must be int or null, got "two""."""
    if unknown := _UNKNOWN.search(message):
        # msgspec reports only the name of an unknown field, not its path.
        name = unknown[1][:100]
        return bad_request(name, "is not a known field")
    match = _AT.match(message)
    assert match
    problem, path = match[1], match[2] or ""
    if missing := _MISSING.fullmatch(problem):
        return bad_request(f"{where}{path}.{missing[1]}".removeprefix("."), "is required")
    if not (where or path):
        return APIError(400, f"the request body must be a JSON object: {problem}")
    got, choices = "", list[str]()
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        # The body may be invalid JSON after the invalid field.
        if problem.startswith(_NO_CHOICE) and kind is not None:
            choices = _find_choices(kind, path, body)
        path, raw = _locate(path, problem, body)
        got = f", got {_shown(raw)}"
    param = (where + path).removeprefix(".")
    if problem in _OUT_OF_RANGE:
        return bad_request(param, f"must be a number that fits in 64 bits{got}")
    if problem == _NOT_BASE64:
        return bad_request(param, f"must be base64{got}")
    if choices:
        first = ", ".join(choices[:-1])
        expected = f"{first} or {choices[-1]}" if first else choices[0]
        return bad_request(param, f"must be {expected}{got}")
    expected = problem.split(", got ")[0].removeprefix("Expected ")
    for word, plain in _PLAIN_WORDS.items():
        expected = re.sub(word, plain, expected)
    expected = expected.replace("`", "").replace(" | ", " or ")
    return bad_request(param, f"must be {expected}{got}")


def _find_choices(kind: Any, path: str, body: bytes) -> list[str]:
    """Return the values that the field at `path` may have: those of a literal, or the tags of a union's structs."""
    value = msgspec.json.decode(body)
    types = _alternatives(msgspec.inspect.type_info(kind))
    for key, position in _STEP.findall(path):
        found: list[msgspec.inspect.Type] = []
        for each in types:
            if isinstance(each, msgspec.inspect.ListType):
                found += _alternatives(each.item_type)
            elif isinstance(each, msgspec.inspect.StructType):
                if each.tag_field == key:
                    found.append(msgspec.inspect.LiteralType((each.tag,)))
                elif each.tag_field is None or each.tag == value.get(each.tag_field):
                    for field in each.fields:
                        if field.encode_name == key:
                            found += _alternatives(field.type)
        types, value = found, value[int(position)] if position else value.get(key)
    literals = [each for each in types if isinstance(each, msgspec.inspect.LiteralType)]
    return [f'"{choice}"' for each in literals for choice in each.values if choice]


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _locate(path: str, problem: str, body: bytes) -> tuple[str, msgspec.Raw]:
    """Return the path with the keys that msgspec omits, and the JSON of the value at that path."""
    raw = msgspec.Raw(body)
    exact = ""
    for key, position in _STEP.findall(path):
        if position == "...":
            members = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            wanted = float if "float" in problem else Any
            key = next((k for k, value in members.items() if not _is_valid(value, wanted)), "")
            if not key:
                return f"{exact}[...]", raw
            raw = members[key]
            exact += f"[{cut(key)}]"
        elif key:
            raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[key]
            exact += f".{key}"
        else:
            raw = msgspec.json.decode(raw, type=list[msgspec.Raw])[int(position)]
            exact += f"[{position}]"
    return exact, raw


def _is_valid(raw: msgspec.Raw, wanted: Any) -> bool:
    try:
        msgspec.json.decode(raw, type=wanted)
    except msgspec.ValidationError:
        return False
    return True


def _shown(raw: msgspec.Raw) -> str:
    try:
        return echo(msgspec.json.decode(raw))
    except msgspec.ValidationError:
        # The number is too large for every type.
        return cut(bytes(raw).decode())
