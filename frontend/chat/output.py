"""Split a model's generated text into reasoning, content and tool calls."""

import msgspec

from .detection import ReasoningParser
from .tool_calls import ToolCallDelta, ToolParser


class MessageDelta(msgspec.Struct):
    """The reasoning, content and tool calls that a piece of text adds to a message."""

    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCallDelta] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.tool_calls)

    @property
    def is_content(self) -> bool:
        """True if there is content and nothing else."""
        return bool(self.content) and not (self.reasoning or self.tool_calls)


class ChatOutputParser:
    """Parses one text: first reasoning, then tool calls in the rest. Either parser may be None."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str, finished: bool = False) -> MessageDelta:
        """Return the changes to the message that the next piece of text causes."""
        delta = self._split_reasoning(text, finished)
        self._read_calls(delta, finished)
        return delta

    def _split_reasoning(self, text: str, finished: bool) -> MessageDelta:
        delta = MessageDelta(content=text)
        if self._reasoning is not None:
            parts = [self._reasoning.feed(text)]
            if finished:
                parts.append(self._reasoning.finish())
            delta.reasoning = "".join(part.reasoning for part in parts)
            delta.content = "".join(part.content for part in parts)
        return delta

    def _read_calls(self, delta: MessageDelta, finished: bool) -> None:
        """Parse the content, and move the tool calls in it to `tool_calls`."""
        if self._tools is not None:
            pieces = [self._tools.feed(delta.content)]
            if finished:
                pieces.append(self._tools.finish())
            delta.content = "".join(piece.content for piece in pieces)
            delta.tool_calls = [call for piece in pieces for call in piece.tool_calls]
