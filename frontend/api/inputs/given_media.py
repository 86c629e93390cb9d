"""Read the images, videos and audio clips that dialects send beside a prompt, as content parts of a message."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from ...http.errors import bad_request, expect, expect_text, wrong
from ...media.sources.media_options import DEFAULT_OPTIONS, MediaOptions
from ..logprobs import Json

LLAMA_MARKER: Final = "<__media__>"
"""The text that marks the place of a file in llama.cpp's prompts."""

_URLS: Final = ("http://", "https://", "file:", "data:")
_MAX_PATH: Final = 4096
_SNIFFED_CHARACTERS: Final = 32
_MATROSKA: Final = b"\x1a\x45\xdf\xa3"
_BRANDS: Final = {
    b"M4A": "audio",
    b"M4B": "audio",
    b"avi": "image",
    b"hei": "image",
    b"mif": "image",
}
"""The beginnings of the brands of files of ISO's base media format that are no videos."""


class GivenMedia(NamedTuple):
    """Images, videos and audio clips of a prompt, whose text marks their places.

    Attributes:
        param: The name of the field with all of them in errors.
        parts: The content part for each.
        names: The name of the field of each in errors.
        markers: The text that marks the place of each, unless the text has the model's own tokens there.
        options: The choices of the request.
    """

    param: str
    parts: list[Json]
    names: list[str]
    markers: list[str]
    options: MediaOptions = DEFAULT_OPTIONS


def read_prompt_object(given: Mapping[str, Any], param: str) -> tuple[str, GivenMedia | None]:
    """Return the text and the media of a prompt in llama.cpp's format, with `prompt_string` and `multimodal_data`.

    Raises:
        APIError: The text or a file has the wrong type, or the text has more or fewer markers than there are files
            (400).
    """
    text = str(expect_text(given, "prompt_string", param))
    where = f"{param}.multimodal_data"
    files = given.get("multimodal_data")
    if files is None:
        return text, None
    expect(files, list, where, "an array of files in base64")
    if len(files) != (count := text.count(LLAMA_MARKER)):
        raise bad_request(
            where,
            f"must have a file for each marker {LLAMA_MARKER} in prompt_string: "
            f"it has {len(files)}, and there are {count} markers",
        )
    names = [f"{where}[{i}]" for i in range(len(files))]
    parts = [_file_part(file, name) for file, name in zip(files, names, strict=True)]
    return text, _in_order(where, parts, names)


def read_parts(given: Mapping[str, Any], param: str) -> tuple[str, GivenMedia | None]:
    """Return the text and the media of an input in llama.cpp's format, with the parts of a message in `content`.

    Raises:
        APIError: A part has the wrong type, or a text has the marker of a file (400).
    """
    where = f"{param}.content"
    text, parts, names = "", [], []
    for i, part in enumerate(expect(given["content"], list, where, "an array")):
        name = f"{where}[{i}]"
        kind = expect(part, dict, name, "an object").get("type")
        if expect(kind, str, f"{name}.type", "a string") != "text":
            text += LLAMA_MARKER
            parts.append(part)
            names.append(name)
        elif LLAMA_MARKER in expect_text(part, "text", name):
            raise bad_request(f"{name}.text", f"must not contain {LLAMA_MARKER}")
        else:
            text += part["text"]
    return text, _in_order(where, parts, names)


def _in_order(param: str, parts: list[Json], names: list[str]) -> GivenMedia | None:
    return GivenMedia(param, parts, names, [LLAMA_MARKER] * len(parts)) if parts else None


def _file_part(file: Any, where: str) -> Json:
    """Return the content part for a file in base64, whose first bytes determine the kind."""
    text = str(expect(file, str, where, "a file in base64"))
    if text[:5].lower() == "data:":
        text = text.partition(",")[2]
    kind = _kind_of(text)
    if kind == "audio":
        return {"type": "input_audio", "input_audio": {"data": text}}
    return {"type": f"{kind}_url", f"{kind}_url": {"url": _data_url(text, kind)}}


def _kind_of(text: str) -> str:
    """Return "audio", "video" or otherwise "image" for a file in base64."""
    try:
        head = base64.b64decode(text[:_SNIFFED_CHARACTERS])
    except ValueError:
        return "image"
    is_wave = head[:4] == b"RIFF" and head[8:12] == b"WAVE"
    is_mpeg = head[:1] == b"\xff" and head[1:2] >= b"\xe0"
    if is_wave or is_mpeg or head.startswith((b"ID3", b"fLaC", b"OggS")):
        return "audio"
    if head[4:8] == b"ftyp":
        return _BRANDS.get(head[8:11], "video")
    return "video" if head.startswith(_MATROSKA) else "image"


def url_part(given: Any, kind: str, where: str) -> tuple[Json, str]:
    """Return the content part for a file in SGLang's format, and the name of the field with it.

    Args:
        given: A URL, the path of a file of the server, or a file in base64; or an object that has one of these in
            `url`, and the fields of a content part.
        kind: "image", "video" or "audio".
        where: The name of the field.

    Raises:
        APIError: It is none of these (400).
    """
    fields: Json = {}
    if isinstance(given, dict):
        fields, given, where = given, given.get("url"), f"{where}.url"
    if not isinstance(given, str) or not given:
        raise wrong(where, "a URL, a path or a file in base64", given)
    if not given[:8].lower().startswith(_URLS):
        # Names of files have a dot, which base64 does not contain.
        is_path = len(given) <= _MAX_PATH and "." in given
        given = f"file:{quote(given)}" if is_path else _data_url(given, kind)
    return {"type": f"{kind}_url", f"{kind}_url": {**fields, "url": given}}, where


def _data_url(text: str, kind: str) -> str:
    """Return a data URL. The type of a video must not be that of a list of frames."""
    return f"data:{'video/mp4' if kind == 'video' else kind};base64,{text}"
