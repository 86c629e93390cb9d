"""Chats to prompts, and the model's text back to messages: templates, tools, reasoning."""

from .call_grammar import call_rules
from .json_tools import JsonToolParser
from .model_templates import ModelTemplates
from .output import ChatOutputParser, MessageDelta
from .reasoning import ReasoningParser, reasoning_parser
from .template import ChatTemplate, ChatTemplateError, ContentFormat, load_chat_template
from .tool_parsers import tool_parser
from .tools import ToolCallDelta, ToolParser, openai_call_id

__all__ = [
    "ChatOutputParser",
    "ChatTemplate",
    "ChatTemplateError",
    "ContentFormat",
    "JsonToolParser",
    "MessageDelta",
    "ModelTemplates",
    "ReasoningParser",
    "ToolCallDelta",
    "ToolParser",
    "call_rules",
    "load_chat_template",
    "openai_call_id",
    "reasoning_parser",
    "tool_parser",
]
