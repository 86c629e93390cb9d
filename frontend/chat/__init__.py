"""Chats to prompts, and the model's text back to messages: templates, tools, reasoning."""

from .output import ChatOutputParser, MessageDelta
from .reasoning import ReasoningParser, reasoning_parser
from .template import ChatTemplate, ChatTemplateError, load_chat_template
from .tool_parsers import tool_parser
from .tools import ToolCall, ToolCallDelta, ToolParser, parse_tool_calls

__all__ = [
    "ChatOutputParser",
    "ChatTemplate",
    "ChatTemplateError",
    "MessageDelta",
    "ReasoningParser",
    "ToolCall",
    "ToolCallDelta",
    "ToolParser",
    "load_chat_template",
    "parse_tool_calls",
    "reasoning_parser",
    "tool_parser",
]
