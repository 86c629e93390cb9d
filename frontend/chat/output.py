"""A model's text as it comes, made into the parts of a message."""

from dataclasses import dataclass, field

from .reasoning import ReasoningParser
from .tools import ToolCallDelta, ToolParser


@dataclass(slots=True)
class MessageDelta:
    """What a piece of text adds to the message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)


class ChatOutputParser:
    """Reasoning first, then tool calls in what is not reasoning. For one text; either may be None."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str, finished: bool = False) -> MessageDelta:
        delta = MessageDelta(content=text)
        if self._reasoning is not None:
            parts = [self._reasoning.feed(text)]
            if finished:
                parts.append(self._reasoning.finish())
            delta.reasoning = "".join(part.reasoning for part in parts)
            delta.content = "".join(part.content for part in parts)
        if self._tools is not None:
            pieces = [self._tools.feed(delta.content)]
            if finished:
                pieces.append(self._tools.finish())
            delta.content = "".join(piece.content for piece in pieces)
            delta.tool_calls = [call for piece in pieces for call in piece.tool_calls]
        return delta
