"""The results of tool-call parsers, and the interfaces of parsers and readers.

A parser reads one text in pieces. A complete text is parsed as a single piece, so streaming gives the same calls
however the text is split.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any, Protocol

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


def openai_call_id(source: random.Random) -> str:
    """Return an ID in OpenAI's format."""
    return f"call_{source.getrandbits(96):024x}"


def mistral_call_id(source: random.Random) -> str:
    """Return an ID of nine letters and digits, because Mistral's templates reject others."""
    return "".join(source.choices(string.ascii_letters + string.digits, k=9))


class CallIds:
    """Creates the IDs of the calls in one text.

    With a seed, such as the ID of the answer, the same text gets the same IDs wherever it is parsed.
    """

    def __init__(
        self,
        create: Callable[[random.Random], str] = openai_call_id,
        seed: str | None = None,
    ) -> None:
        self._create = create
        self._seed = seed
        self._source: random.Random | None = None

    def __call__(self) -> str:
        """Return the next ID."""
        if self._source is None:
            # Most texts have no calls, and creating a random generator takes some time.
            self._source = random.Random(self._seed)
        return self._create(self._source)
