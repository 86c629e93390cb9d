"""The results of tool-call parsers, and the interfaces of parsers and readers.

A parser reads one text in pieces. A complete text is parsed as a single piece, so streaming gives the same calls
however the text is split.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import msgspec

Parameters = Mapping[str, Any]
"""The JSON schema of a function's parameters."""


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A piece of call number `index`: first its id and name, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class ToolDelta(msgspec.Struct):
    """The content and tool calls that a piece of text adds to a message."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.tool_calls)


class ToolParser(Protocol):
    """A parser of one text. The text must include its special tokens."""

    def feed(self, text: str) -> ToolDelta:
        """Return the content and calls that the next piece adds. A possible beginning of a call is held back."""
        ...

    def finish(self) -> ToolDelta:
        """Return the held-back text at the end."""
        ...


class ArgumentsReader(Protocol):
    """Reads the arguments of one call and translates them to JSON."""

    rest: str | None
    """The text after the arguments, or from where reading failed; None while the arguments are open."""
    failed: bool
    """True if the text is not arguments."""

    def feed(self, text: str) -> str:
        """Return the JSON that the next piece of text adds."""
        ...

    def finish(self) -> str:
        """Return the held-back JSON of arguments that are still open."""
        ...


class CallReader(ArgumentsReader, Protocol):
    """Reads one call: its name and its arguments."""

    name: str | None
    """The name of the function; None until the text is certain to be a call."""
    call_id: str | None
    """The ID that the model writes; None if it writes none."""


NewId: TypeAlias = Callable[[random.Random, str, int], str]
"""Creates an ID from random numbers, the name of the function, and the number of the call in the conversation."""


def openai_call_id(source: random.Random, name: str, number: int) -> str:
    """Return an ID in OpenAI's format."""
    return f"call_{source.getrandbits(96):024x}"


def kimi_call_id(source: random.Random, name: str, number: int) -> str:
    """Return an ID with the function and the number, because templates of Kimi K2 show calls by their IDs only.

    The model itself often begins again with number 0.
    """
    return f"functions.{name}:{number}"


def mistral_call_id(source: random.Random, name: str, number: int) -> str:
    """Return an ID of nine letters and digits, because Mistral's templates reject others."""
    return "".join(source.choices(string.ascii_letters + string.digits, k=9))


class CallIds:
    """Creates the IDs of the calls in one text.

    With a seed, such as the ID of the answer, the same text gets the same IDs wherever it is parsed. `find_earlier`
    returns the IDs of the calls before the text in its conversation, which are not used again.
    """

    def __init__(
        self,
        create: NewId = openai_call_id,
        seed: str | None = None,
        find_earlier: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._create = create
        self._seed = seed
        self._find_earlier = find_earlier
        self._source: random.Random | None = None
        self._used: set[str] = set()

    def next_id(self, name: str, written: str | None = None) -> str:
        """Return the ID of the next call, which is that the model has `written` unless an earlier call has it."""
        if self._source is None:
            # Most texts have no calls, and creating a random generator takes some time.
            self._source = random.Random(self._seed)
            self._used.update(self._find_earlier())
        number, found = len(self._used), written
        while not found or found in self._used:
            found = self._create(self._source, name, number)
            number += 1
        self._used.add(found)
        return found
