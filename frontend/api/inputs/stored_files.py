"""Stored files that the messages of a chat refer to by their identifiers."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from ..bodies.request_memory import MemoryLease
from ..files.storage import FileStorage
from ..logprobs import Json
from ..serving import Serving
from .filled_bytes import FilledBytes

_BLOCKS: Final = ("image", "document")
"""Content blocks of Anthropic's API whose source may be a file."""

_URLS: Final = ("image_url", "video_url", "audio_url")
_SCHEME: Final = "vllm-file://"

Fill = Callable[[Json, bytes], None]
"""Function that puts the content of a described file in place of the reference to it."""


async def fill_in_files(
    serving: Serving, messages: Any, size: int, owner: str, lease: MemoryLease
) -> int:
    """Replace all references to stored files in the messages of a body by the content of the files.

    References are OpenAI's `{"type": "file", "file": {"file_id": …}}`, Anthropic's sources `{"type": "file",
    "file_id": …}`, and vLLM's URLs `vllm-file://…` of images, videos and audio.

    Args:
        serving: The state that the endpoints share.
        messages: The messages of the body, which are changed.
        size: The size of the body in bytes.
        owner: The owner of the files that the request may read.
        lease: The lease on which the content is counted.

    Returns:
        The bytes of the content that was filled in.

    Raises:
        APIError: A file does not exist (404), the files are too large in total (400), or there is no room (503).
    """
    places = await serving.executor.run(size, lambda: list(_find_references(messages)))
    if not places:
        return 0
    files = FileStorage(serving.store)
    filled = FilledBytes(serving, lease, "files")
    for identifier, where, fill in places:
        file = await files.get(identifier, owner)
        filled.add(file["bytes"], where)
        content = await files.read(identifier, owner)
        await serving.executor.run(len(content), fill, file, content)
    return filled.total


def media_type_of(filename: str) -> str:
    """Return the media type that the name of a file shows."""
    return mimetypes.guess_type(filename)[0] or "application/octet-stream"


def _find_references(messages: Any, where: str = "messages") -> Iterator[tuple[str, str, Fill]]:
    """Yield the identifiers of files, the places of the references, and the functions that replace these."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            yield from _in_content(message.get("content"), f"{where}[{i}].content")
        else:  # A body with several conversations.
            yield from _find_references(message, f"{where}[{i}]")


def _in_content(content: Any, where: str) -> Iterator[tuple[str, str, Fill]]:
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            continue
        place, kind = f"{where}[{i}]", part.get("type")
        if kind == "tool_result":
            yield from _in_content(part.get("content"), f"{place}.content")
        elif kind == "file" and isinstance(file := part.get("file"), dict):
            if file.get("file_data") is None and isinstance(found := file.get("file_id"), str):
                yield found, f"{place}.file.file_id", partial(_fill_file, file)
        elif kind in _BLOCKS and isinstance(source := part.get("source"), dict):
            if source.get("type") == "file" and isinstance(found := source.get("file_id"), str):
                yield found, f"{place}.source.file_id", partial(_fill_source, source)
        elif kind in _URLS and isinstance(named := part.get(kind), dict):
            url = named.get("url")
            if isinstance(url, str) and url.startswith(_SCHEME):
                yield url.removeprefix(_SCHEME), f"{place}.{kind}.url", partial(_fill_url, named)


def _fill_file(file: Json, stored: Json, content: bytes) -> None:
    """Fill in a file of a content part in OpenAI's format."""
    file["file_data"] = _data_url(stored, content)
    if file.get("filename") is None:
        file["filename"] = stored["filename"]


def _fill_source(source: Json, stored: Json, content: bytes) -> None:
    """Fill in the source of a content block in Anthropic's format."""
    media_type = media_type_of(stored["filename"])
    if media_type.startswith("text/"):
        found = {"type": "text", "data": content.decode(errors="replace")}
    else:
        found = {"type": "base64", "data": base64.b64encode(content).decode()}
    source |= found | {"media_type": media_type}


def _fill_url(part: Json, stored: Json, content: bytes) -> None:
    """Fill in the URL of an image, a video or audio."""
    part["url"] = _data_url(stored, content)


def _data_url(stored: Json, content: bytes) -> str:
    return f"data:{media_type_of(stored['filename'])};base64,{base64.b64encode(content).decode()}"
