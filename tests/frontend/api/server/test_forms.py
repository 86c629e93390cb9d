"""Forms with files."""

from __future__ import annotations

import pytest
from engine.frontend.api.bodies.body import Body
from engine.frontend.api.bodies.form import FormDecoder, find_boundary, parse_form
from engine.frontend.api.schema.audio import TranscriptionRequest
from engine.frontend.http.errors import APIError

FILE = b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'


def field(name: str, value: str) -> bytes:
    return f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


def form(*parts: bytes, before: bytes = b"", end: bytes = b"--\r\n") -> bytes:
    return before + b"".join(b"--xyz\r\n" + part + b"\r\n" for part in parts) + b"--xyz" + end


def test_form_parser_separates_fields_and_files() -> None:
    content = b"\r\n--xy\0\r\n\r\n--not\r\n"
    data = form(
        field("model", "tiny"), field("include[]", "a"), FILE + content, before=b"ignored\r\n"
    )
    for parts in ([data], [data[:10], data[10:90], data[90:]]):
        found = parse_form(Body(parts, len(data)), b"xyz")
        assert found.values == {"model": ["tiny"], "include[]": ["a"]}
        assert {name: bytes(file.content) for name, file in found.files.items()} == {
            "file": content
        }


def test_form_values_are_converted_to_the_types_of_the_schema() -> None:
    decoder = FormDecoder(TranscriptionRequest, strict=True)
    request = decoder.decode(
        {
            "temperature": ["0.5"],
            "stream": ["true"],
            "language": [""],
            "timestamp_granularities[]": ["word", "segment"],
            "chunking_strategy[type]": ["server_vad"],
            "chunking_strategy[threshold]": ["0.5"],
        }
    )
    assert request.temperature == 0.5
    assert decoder.decode({"temperature": [".5"]}).temperature == 0.5
    assert request.stream is True
    assert request.language is None
    assert request.timestamp_granularities == ["word", "segment"]
    assert request.chunking_strategy == {"type": "server_vad", "threshold": "0.5"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cut off or malformed"),
        (form(field("model", "a"), end=b""), "cut off or malformed"),
        (form(FILE + b"data")[:-20], "cut off or malformed"),
        (form(b"no headers"), "cut off or malformed"),
        (form(b"content-type: text/plain\r\n\r\nvalue"), "has no name"),
        (form(FILE + b"1", FILE + b"2"), "file must be one file"),
        (form(*[field("a", "b")] * 300), "at most 256 parts"),
        (form(field("prompt", "a" * 70_000)), "prompt must have at most 65536 bytes, got 70000"),
        (form(b'Content-Disposition: form-data; name="a"\r\n\r\n\xff'), "a is not valid UTF-8"),
    ],
    ids=lambda value: str(value)[-30:],
)
def test_malformed_forms_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(APIError, match=message) as caught:
        parse_form(Body([data], len(data)), b"xyz")
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": ["hot"]}, "temperature must be a number or null, got"),
        ({"stream": ["perhaps"]}, "stream must be a boolean or null, got"),
        ({"model": ["a", "b"]}, "model must be one value, got 2"),
        ({"colour": ["red"]}, "colour is not a known field"),
    ],
)
def test_invalid_form_value_names_its_field(values: dict[str, list[str]], message: str) -> None:
    with pytest.raises(APIError, match=message) as caught:
        FormDecoder(TranscriptionRequest, strict=True).decode(values)
    assert caught.value.param == next(iter(values))


@pytest.mark.parametrize(
    ("content_type", "boundary"),
    [
        ("multipart/form-data; boundary=xyz", b"xyz"),
        ('multipart/form-data; charset=utf-8; boundary="x y"', None),
        ('Multipart/Form-Data;boundary="x-y"', b"x-y"),
        ("multipart/form-data", None),
    ],
)
def test_boundaries_are_read_from_the_content_type(
    content_type: str, boundary: bytes | None
) -> None:
    scope = {"headers": [(b"content-type", content_type.encode())]}
    if boundary is not None:
        assert find_boundary(scope) == boundary
        return
    with pytest.raises(APIError, match="multipart/form-data") as caught:
        find_boundary(scope)
    assert caught.value.status == 400
