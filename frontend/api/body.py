"""Request bodies: read up to a limit, decoded into a schema, refused with the field that is wrong."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any, Final, Generic, TypeVar

import msgspec
import msgspec.inspect
from starlette.types import Receive, Scope

from .errors import APIError, bad_request, echo
from .schema import NO_OP_VALUES, REFUSED

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)

MAX_NAMED_FIELDS: Final = 100
"""Unknown fields that are named in the log; who sends more makes them up."""

_AT = re.compile(r"^(.*?)(?: - at `(?:key in )?\$(.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_PLAIN_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)


class ClientDisconnected(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole request body. Raises APIError 413 as soon as it exceeds `limit` bytes, 415 if it is encoded."""
    for name, value in scope["headers"]:
        if name == b"content-length" and int(value) > limit:
            raise _too_large(limit, int(value))
        if name == b"content-encoding" and value.lower() not in (b"", b"identity"):
            encoding = echo(value.decode("latin-1"))
            raise APIError(
                415,
                f"the request body must not be compressed, got Content-Encoding {encoding}",
                headers={"accept-encoding": "identity"},
            )
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit, size)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _too_large(limit: int, size: int) -> APIError:
    return APIError(413, f"the request body must have at most {limit} bytes, got at least {size}")


class BodyDecoder(Generic[T]):
    """Decodes bodies into one schema. `strict` refuses fields that it does not know; else each is logged once."""

    def __init__(self, schema: type[T], strict: bool) -> None:
        known: Any = msgspec.defstruct(
            schema.__name__, [], bases=(schema,), forbid_unknown_fields=True
        )
        self._strict = strict
        self._schema = known if strict else schema
        self._decode = msgspec.json.Decoder(self._schema).decode
        self._decode_known = msgspec.json.Decoder(known).decode
        self._names = {field.encode_name for field in msgspec.structs.fields(schema)}
        self._unknown: set[str] = set()
        self._type = msgspec.inspect.type_info(self._schema)
        self._refused = [name for name in REFUSED if _is_refused(schema, name)]

    def decode(self, body: bytes) -> T:
        """Raises APIError 400 that names the field, its value and what was expected."""
        try:
            request = self._decode_fields(body)
        except RecursionError:
            raise bad_request(None, "the request body is nested too deeply") from None
        except (msgspec.DecodeError, ValueError) as error:
            raise bad_request(None, f"the request body is not valid JSON: {error}") from None
        for name in self._refused:
            value = getattr(request, name)
            if value is not None and value not in NO_OP_VALUES.get(name, ()):
                raise bad_request(name, f"{name} {REFUSED[name]}, got {echo(value)}")
        return request

    def _decode_fields(self, body: bytes) -> T:
        try:
            request: T = self._decode_known(body)
            return request
        except msgspec.ValidationError as error:
            if self._strict:
                return self._decode_doubles(body, error)
        if len(self._unknown) < MAX_NAMED_FIELDS:
            self._log_unknown(body)
        try:
            return self._decode(body)
        except msgspec.ValidationError as error:
            return self._decode_doubles(body, error)

    def _log_unknown(self, body: bytes) -> None:
        with contextlib.suppress(msgspec.MsgspecError):
            names = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).keys()
            for name in sorted(names - self._names - self._unknown):
                if len(self._unknown) < MAX_NAMED_FIELDS:
                    self._unknown.add(name)
                    logger.info("requests have the unknown field %s, which is ignored", echo(name))

    def _decode_doubles(self, body: bytes, error: msgspec.ValidationError) -> T:
        """Clients that know only doubles write integers as `100.0`, which is the `error` if they do."""
        try:
            meant = _with_integers(msgspec.json.decode(body), self._type)
            request: T = msgspec.convert(meant, self._schema)
        except msgspec.ValidationError as other:
            raise _invalid(str(other), body) from None
        except (msgspec.DecodeError, ValueError, RecursionError):
            # Beyond the wrong field the body may not even be JSON.
            raise _invalid(str(error), body) from None
        return request


def _with_integers(value: Any, wanted: msgspec.inspect.Type) -> Any:
    """`value` with integers for integral floats, but only where `wanted` has integers."""
    for kind in wanted.types if isinstance(wanted, msgspec.inspect.UnionType) else (wanted,):
        match kind, value:
            case msgspec.inspect.IntType(), float() if value.is_integer():
                return int(value)
            case msgspec.inspect.ListType(), list():
                return [_with_integers(item, kind.item_type) for item in value]
            case msgspec.inspect.StructType(), dict():
                types = {field.encode_name: field.type for field in kind.fields}
                return {
                    k: _with_integers(v, types[k]) if k in types else v for k, v in value.items()
                }
    return value


def _is_refused(schema: type[msgspec.Struct], name: str) -> bool:
    """Only fields of type Any are refused: `echo` means something to completions."""
    return any(f.name == name and f.type is Any for f in msgspec.structs.fields(schema))


def _invalid(message: str, body: bytes) -> APIError:
    """Rewrite "Expected `int | null`, got `str` - at `$.n`" as "n must be int or null, got "two""."""
    if unknown := _UNKNOWN.search(message):
        # Where an unknown field sits is not said; only its own name is certain.
        name = unknown[1][:100]
        return bad_request(name, f"{name} is not a known field")
    match = _AT.match(message)
    assert match
    problem, path = match[1], match[2]
    if not path:
        return bad_request(None, f"the request body must be a JSON object: {problem}")
    param = path.removeprefix(".")
    expected = problem.split(", got ")[0].removeprefix("Expected ").replace("`", "")
    for word, plain in _PLAIN_WORDS.items():
        expected = re.sub(rf"\b{word}\b", plain, expected)
    message = f"{param} must be {expected.replace(' | ', ' or ')}"
    # Beyond the wrong field the body may not even be JSON.
    with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
        message += f", got {echo(_value_at(path, body))}"
    return bad_request(param, message)


def _value_at(path: str, body: bytes) -> Any:
    value: Any = msgspec.json.decode(body)
    for key, position in _STEP.findall(path):
        if position == "...":
            break
        value = value[key] if key else value[int(position)]
    return value
