"""Parse forms with files: multipart/form-data (RFC 7578)."""

from __future__ import annotations

import re
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from starlette.types import Scope

from ...http.errors import APIError, bad_request, wrong
from ..schema.refused import ignored_fields, refused_fields, verify_supported, with_all_fields
from .body import Body
from .conversion import invalid_field

T = TypeVar("T", bound=msgspec.Struct)

MAX_PARTS: Final = 256
"""Maximum fields and files of a form."""

MAX_FIELD_BYTES: Final = 64 * 1024
"""Maximum size of a field that is not a file."""

MAX_HEADER_BYTES: Final = 8 * 1024
"""Maximum size of the headers of a part."""

_BOUNDARY: Final = re.compile(r'multipart/form-data\s*;.*?\bboundary=("?)([^";,\s]{1,70})\1', re.I)
_NAME: Final = re.compile(r';\s*name="((?:[^"\\]|\\.)*)"', re.I)
_FILE: Final = re.compile(r";\s*filename\*?=", re.I)
_FILENAME: Final = re.compile(r';\s*filename="((?:[^"\\]|\\.)*)"', re.I)
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
"""Numbers as people write them, such as `.5`, which is not one in JSON."""
_NESTED: Final = re.compile(r"(.+?)\[(\w+)\]")


class FormFile(NamedTuple):
    """A file of a form. `name` is the file name that the client sent; "" if it sent none."""

    content: memoryview
    filename: str


class Form(NamedTuple):
    """A form: its values by field name, in the order in which they were sent, and its files."""

    values: dict[str, list[str]]
    files: dict[str, FormFile]


def is_json(scope: Scope) -> bool:
    """Return whether a body is JSON, which some routes accept in place of a form."""
    return _content_type(scope).partition(";")[0].strip().lower() == "application/json"


def _content_type(scope: Scope) -> str:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((v for name, v in headers if name == b"content-type"), b"").decode("latin-1")


def find_boundary(scope: Scope) -> bytes:
    """Return the boundary between the parts of a form. Raise APIError 400 if there is no boundary."""
    match = _BOUNDARY.match(_content_type(scope))
    if match is None:
        raise APIError(400, "the Content-Type multipart/form-data needs a boundary")
    return match[2].encode("latin-1")


def parse_form(body: Body, boundary: bytes) -> Form:
    """Return the parts of a form. Files are views of the body.

    Raises:
        APIError: The form is not well-formed, or a field is too large (400).
    """
    data = body.join()
    view = memoryview(data)
    delimiter = b"\r\n--" + boundary
    form = Form({}, {})
    # The body may begin with the first boundary, without a line break before it.
    end = -2 if data.startswith(delimiter[2:]) else data.find(delimiter)
    num_parts = 0
    while end != -1:
        start = end + len(delimiter)
        if data[start : start + 2] == b"--":
            return form
        num_parts += 1
        if num_parts > MAX_PARTS:
            raise APIError(400, f"the form must have at most {MAX_PARTS} parts")
        blank = data.find(b"\r\n\r\n", start, start + MAX_HEADER_BYTES)
        end = data.find(delimiter, max(start, blank))
        if blank < 0 or end < blank:
            break
        _add_part(form, data[start:blank].decode("utf-8", "replace"), view[blank + 4 : end])
    raise APIError(400, "the form is cut off or malformed: it has no final boundary")


def _add_part(form: Form, headers: str, content: memoryview) -> None:
    disposition = next(
        (line for line in headers.split("\r\n") if line.lower().startswith("content-disposition:")),
        "",
    )
    match = _NAME.search(disposition)
    if match is None:
        raise APIError(400, "a part of the form has no name in its Content-Disposition")
    name = _unquote(match[1])
    if _FILE.search(disposition):
        if name in form.files:
            raise bad_request(name, "must be one file, got several")
        filename = _FILENAME.search(disposition)
        form.files[name] = FormFile(content, _unquote(filename[1]) if filename else "")
        return
    if len(content) > MAX_FIELD_BYTES:
        raise bad_request(name, f"must have at most {MAX_FIELD_BYTES} bytes, got {len(content)}")
    try:
        value = bytes(content).decode()
    except UnicodeDecodeError as error:
        raise bad_request(name, f"is not valid UTF-8: {error}") from None
    form.values.setdefault(name, []).append(value)


def _unquote(text: str) -> str:
    return text.replace('\\"', '"')


class FormDecoder(Generic[T]):
    """Converts the values of forms to a schema. With `strict`, unknown fields are refused."""

    def __init__(self, schema: type[T], strict: bool) -> None:
        self._schema = with_all_fields(schema)
        self._strict = strict
        fields = msgspec.structs.fields(self._schema)
        self._names = {field.encode_name for field in fields}
        self._refused = refused_fields(schema)
        self._unread = {*self._refused, *ignored_fields(schema)}
        self._lists = {field.encode_name for field in fields if "list" in str(field.type)}
        self._objects = {field.encode_name for field in fields if "dict" in str(field.type)}
        self._numbers = {field.encode_name for field in fields if "float" in str(field.type)}

    def decode(self, values: dict[str, list[str]]) -> T:
        """Return the values as an instance of the schema. Empty values are ignored.

        Names of lists may end with `[]`. `name[key]` is the entry `key` of an object.

        Raises:
            APIError: A value has a wrong type, or a field has several values but accepts one (400).
        """
        found: dict[str, Any] = {}
        for sent, texts in values.items():
            name = sent.removesuffix("[]")
            nested = _NESTED.fullmatch(name)
            if nested is not None and nested[1] in self._objects and not found.get(nested[1]):
                found[nested[1]] = {}
            if nested is not None and isinstance(entries := found.get(nested[1]), dict):
                entries[nested[2]] = texts[0]
                continue
            if name not in self._names:
                if self._strict:
                    raise bad_request(name, "is not a known field")
                continue
            if name in self._lists:
                found.setdefault(name, []).extend(texts)
            elif len(texts) > 1 and name not in self._unread:
                raise wrong(name, "one value", len(texts))
            elif texts[0]:
                found[name] = texts[0]
                if name in self._numbers and _NUMBER.fullmatch(texts[0]):
                    found[name] = float(texts[0])
        try:
            request = msgspec.convert(found, self._schema, strict=False)
        except msgspec.ValidationError as error:
            raise invalid_field(str(error), msgspec.json.encode(found), kind=self._schema) from None
        verify_supported(request, self._refused)
        return request
