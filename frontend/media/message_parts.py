"""Replace the parts of messages that are images, videos or audio."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...protocol.errors import ParameterError


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
