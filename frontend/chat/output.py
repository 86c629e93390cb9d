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
    def is_text(self) -> bool:
        """True if there is either content or reasoning, and nothing else."""
        return bool(self.content) != bool(self.reasoning) and not self.tool_calls


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
        if self._reasoning is None:
            return MessageDelta(content=text)
        part = self._reasoning.feed(text)
        delta = MessageDelta(part.reasoning, part.content)
        if finished:
            rest = self._reasoning.finish()
            delta.reasoning += rest.reasoning
            delta.content += rest.content
        return delta

    def _read_calls(self, delta: MessageDelta, finished: bool) -> None:
        """Parse the content, and move the tool calls in it to `tool_calls`."""
        if self._tools is None:
            return
        part = self._tools.feed(delta.content)
        delta.content, delta.tool_calls = part.content, part.tool_calls
        if finished:
            rest = self._tools.finish()
            delta.content += rest.content
            delta.tool_calls = [*part.tool_calls, *rest.tool_calls]
