"""Replace the parts of messages that are images, videos or audio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ...protocol.errors import ParameterError

_CONTENT: Final = ("url", "data", "image_embeds")
"""The fields that contain media."""

_CHOICES: Final = ("fps", "num_frames")
"""The fields that choose frames, which a part may have itself."""


def is_empty(value: Any) -> bool:
    """Return whether the field of a part has no media."""
    return not value or (isinstance(value, Mapping) and not any(map(value.get, _CONTENT)))


def with_given_fields(stored: Any, part: Mapping[str, Any]) -> Any:
    """Return the named media to which a part refers, with the other fields of the part, such as its rate of frames."""
    if not isinstance(stored, Mapping):
        return stored
    given = part.get(part["type"])
    own = {name: part.get(name) for name in _CHOICES}
    fields = {**own, **given} if isinstance(given, Mapping) else own
    fields = {name: value for name, value in fields.items() if value not in (None, "")}
    kept = dict(stored)
    if any(name in fields for name in _CHOICES):
        # A rate replaces a number of frames, and the other way round.
        kept = {name: value for name, value in kept.items() if name not in _CHOICES}
    return kept | fields


def replace_parts(messages: Sequence[Any], take: Callable[[Any, str], Any]) -> list[Any]:
    """Return the messages with each part replaced by `take(part, place)`. Changed messages are copied."""
    replaced: list[Any] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            parts = [take(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
            if any(new is not old for new, old in zip(parts, content, strict=True)):
                message = {**message, "content": parts}
        replaced.append(message)
    return replaced


def verify_count(name: str, count: int, most: int) -> None:
    """Raise ParameterError if messages have more than `most` images, videos or audio clips."""
    if count > most:
        raise ParameterError(
            "messages",
            f"have {count} {name}, but at most {most} are allowed (--limit-mm-per-prompt)",
        )
