"""Chat support: templates, special tokens, tool calls and reasoning."""

from .call_grammar import call_rules, text_or_calls
from .json_tools import JsonToolParser
from .model_templates import ModelTemplates
from .output import ChatOutputParser, MessageDelta
from .reasoning import ReasoningParser, reasoning_parser
from .special_tokens import SpecialTokenGuard
from .template import ChatTemplate, ChatTemplateError, load_chat_template
from .tool_parsers import tool_parser
from .tools import ToolCallDelta, ToolParser, openai_call_id

__all__ = [
    "ChatOutputParser",
    "ChatTemplate",
    "ChatTemplateError",
    "JsonToolParser",
    "MessageDelta",
    "ModelTemplates",
    "ReasoningParser",
    "SpecialTokenGuard",
    "ToolCallDelta",
    "ToolParser",
    "call_rules",
    "load_chat_template",
    "openai_call_id",
    "reasoning_parser",
    "text_or_calls",
    "tool_parser",
]
