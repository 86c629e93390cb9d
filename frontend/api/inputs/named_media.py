"""Images, videos and audio that the messages of a chat name with vLLM's `uuid`, or refer to by it alone."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec

from ...http.errors import bad_request, echo
from ...media.message_parts import is_empty, with_given_fields
from ...media.sources.kept_media import KeptMedia
from ..bodies.request_memory import MemoryLease
from ..logprobs import Json
from ..serving import Serving
from .filled_bytes import FilledBytes

_KINDS: Final = (
    "image_url",
    "input_image",
    "image",
    "image_embeds",
    "video_url",
    "input_video",
    "video",
    "audio_url",
    "input_audio",
    "audio",
)
"""Types of content parts with media, which are also the names of their fields."""


async def fill_in_media(
    serving: Serving, messages: Any, size: int, owner: str, lease: MemoryLease
) -> int:
    """Keep the media that have a `uuid`, and fill in those of which only the `uuid` is given.

    Media are kept as they were sent, so a URL is downloaded for each request.

    Args:
        serving: The state that the endpoints share.
        messages: The messages of the body, which are changed.
        size: The size of the body in bytes.
        owner: The owner of the media that the request may read.
        lease: The lease on which the media are counted.

    Returns:
        The bytes of the media that were filled in.

    Raises:
        APIError: No media are kept under a `uuid`, or they are too large in total (400), or there is no room (503).
    """
    if serving.media is None:
        return 0
    parts = await serving.executor.run(size, lambda: list(_find_named(messages)))
    if not parts:
        return 0
    kept = KeptMedia(Path(serving.config.run_dir, "media"))
    filled = FilledBytes(serving, lease, "media")
    in_thread = serving.executor.in_thread
    for part, where in parts:
        kind, name = part["type"], part["uuid"]
        key = sha256(msgspec.json.encode((owner, kind, name))).hexdigest()
        if not is_empty(part.get(kind)):
            await in_thread(_store, kept, key, part[kind])
            continue
        content = await in_thread(kept.load, key)
        if content is None:
            raise bad_request(
                where,
                f"must name media of type {kind} that this server has from an earlier request, got {echo(name)}; "
                "send the content with this uuid again",
            )
        filled.add(len(content), where)
        stored = await in_thread(msgspec.json.decode, content)
        part[kind] = with_given_fields(stored, part)
    return filled.total


def _find_named(messages: Any, where: str = "messages") -> Iterator[tuple[Json, str]]:
    """Yield the content parts with media and a `uuid`, and the names of these fields."""
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict):  # A body with several conversations.
            yield from _find_named(message, f"{where}[{i}]")
            continue
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind not in _KINDS:
                continue
            if isinstance(name := part.get("uuid"), str) and name:
                yield part, f"{where}[{i}].content[{j}].uuid"


def _store(kept: KeptMedia, key: str, value: Any) -> None:
    kept.store(key, msgspec.json.encode(value))
