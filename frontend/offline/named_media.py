"""Images, videos and audio that prompts for `LLM` name, and that later prompts refer to by the name alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ...protocol.errors import ParameterError
from ..http.shown_values import echo
from ..media.message_parts import is_empty, replace_parts, with_given_fields

MAX_NAMED: Final = 256
"""Maximum number of named media. Those that were used last are kept."""


class NamedMedia:
    """The named media of earlier prompts, by their kind and name."""

    def __init__(self) -> None:
        self._media: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def clear(self) -> None:
        """Drop all named media."""
        self._media.clear()

    def find_all(self, kind: str, given: Sequence[Any], names: Any) -> list[Any]:
        """Return the media of one kind of a prompt, in which None refers to earlier media.

        Args:
            kind: "image", "video" or "audio".
            given: The media; None refers to that with its name.
            names: A name or None for each; None for no names; or the name of the only one.

        Raises:
            ParameterError: The numbers differ, or no media have a name.
        """
        where = f"multi_modal_uuids.{kind}"
        if names is None:
            return list(given)
        listed = names if isinstance(names, list | tuple) else [names]
        if len(listed) != len(given):
            raise ParameterError(
                where,
                f"must have as many names as there are media, {len(given)}; got {len(listed)}",
            )
        return [
            self._find(kind, value, name, where) for value, name in zip(given, listed, strict=True)
        ]

    def fill_in(self, conversation: Sequence[Any]) -> list[Any]:
        """Return a conversation with earlier media in the content parts that have only a `uuid`.

        Raises:
            ParameterError: No media have a name.
        """
        return replace_parts(conversation, self._fill_in)

    def _fill_in(self, part: Any, where: str) -> Any:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in part or part.get("uuid") is None:
            return part
        given = part[kind]
        empty = isinstance(given, Mapping) and is_empty(given)
        value = self._find(kind, None if empty else given, part["uuid"], f"{where}.uuid")
        return part if value is given else {**part, kind: with_given_fields(value, part)}

    def _find(self, kind: str, value: Any, name: Any, where: str) -> Any:
        if name is None:
            return value
        if not isinstance(name, str):
            raise ParameterError(where, f"must be a string or None, got {echo(name)}")
        key = kind, name
        if value is None:
            value = self._media.get(key)
        if value is None:
            raise ParameterError(
                where, f"must name media of type {kind} of an earlier prompt, got {echo(name)}"
            )
        self._media[key] = value
        self._media.move_to_end(key)
        if len(self._media) > MAX_NAMED:
            self._media.popitem(last=False)
        return value
