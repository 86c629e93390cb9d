"""Tool calls in the text of a model: what parsers give.

A parser takes a text in pieces, as they come from the model, and is used once. A whole text is one
piece, so streaming and not give the same calls, wherever the pieces are cut.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of call number `index`: first its id and name, then pieces of its arguments."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class ToolDelta:
    """What a piece of text adds to the message."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.tool_calls)


class ToolParser(Protocol):
    """Of one text, which must be made with its special tokens in it."""

    new_id: Callable[[], str]
    """Makes the ids that the model's template accepts."""

    def feed(self, text: str) -> ToolDelta:
        """Take the next piece. What may be the beginning of a call is held back."""
        ...

    def finish(self) -> ToolDelta:
        """The text has ended: give what was held back."""
        ...


def openai_call_id() -> str:
    return f"call_{random.getrandbits(96):024x}"


def mistral_call_id() -> str:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    return "".join(random.choices(string.ascii_letters + string.digits, k=9))
