"""Files in the messages of a chat: texts, images and PDF documents, of which the model reads the text."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any, Final

from ...http.errors import bad_request, expect, wrong
from ...media.documents.pdf import MAX_CHARACTERS
from ..bodies.request_memory import MemoryLease
from ..logprobs import Json
from ..serving import Serving

_PDF_TYPE: Final = "application/pdf"
_PDF_START: Final = "JVBER"
"""The beginning of every PDF document in base64."""


def translate_file(file: Json, where: str) -> Json:
    """Return the content part for a file: a text, an image, or a PDF document that `read_files` replaces.

    Raises:
        APIError: The file has no content, or of another kind (400).
    """
    if file.get("file_data") is None:
        name = next((n for n in ("file_url", "file_id") if file.get(n) is not None), "file_data")
        expected = "left out for file_data, a text, an image or a PDF document in base64"
        raise wrong(f"{where}.{name}", expected, file.get(name))
    place = f"{where}.file_data"
    given = data = str(expect(file["file_data"], str, place, "a string"))
    filename, media_type = file.get("filename"), ""
    if data.startswith("data:"):
        head, _, data = data.partition(",")
        media_type = head.removeprefix("data:").removesuffix(";base64")
        if media_type.startswith("image/"):
            return {"type": "image_url", "image_url": {"url": given}}
    if media_type == _PDF_TYPE or data.startswith(_PDF_START):
        return {"type": "file", "file": {"filename": filename, "file_data": data}}
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, ValueError):
        raise bad_request(
            place, "must be UTF-8 text, an image or a PDF document in base64"
        ) from None
    return _text(filename, text)


async def read_files(
    serving: Serving, messages: list[Json], size: int, lease: MemoryLease
) -> list[Json]:
    """Return messages with texts and images in place of files. The texts of documents are counted in the lease.

    Raises:
        APIError: A file cannot be read (400), or there is no room for the text of a document (503).
        ParameterError: A document cannot be read.
    """
    places = await serving.executor.run(size, lambda: list(_find_files(messages)))
    if not places:
        return messages
    changed = list(messages)
    for i in {i for i, _ in places}:
        changed[i] = changed[i] | {"content": list(changed[i]["content"])}
    num_characters = 0
    for i, j in places:
        where = f"messages[{i}].content[{j}].file"
        file = expect(messages[i]["content"][j].get("file"), dict, where, "an object")
        found = await serving.executor.run(size, translate_file, file, where)
        if found["type"] == "file":
            content, room = found["file"]["file_data"], MAX_CHARACTERS - num_characters
            text = await serving.documents.read(content, f"{where}.file_data", room)
            num_characters += len(text)
            lease.count_media(len(text))
            found = _text(found["file"]["filename"], text)
        changed[i]["content"][j] = found
    return changed


def _find_files(messages: list[Json]) -> Iterator[tuple[int, int]]:
    """Yield the indexes of the message and of its part, for each file."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if isinstance(part, dict) and part.get("type") == "file":
                yield i, j


def _text(filename: Any, text: str) -> Json:
    named = isinstance(filename, str) and filename
    return {"type": "text", "text": f"{filename}\n\n{text}" if named else text}
