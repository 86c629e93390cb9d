"""Chat support: chat templates, special tokens in messages, tool calls and reasoning."""

from .detection import (
    ChatFormats,
    ReasoningParser,
    choose_formats,
    prepare_formats,
    reasoning_parser,
)
from .model_templates import ModelTemplates
from .output import ChatOutputParser, MessageDelta
from .pair_template import PairTemplate
from .special_tokens import SpecialTokenGuard
from .template import ChatTemplate, ChatTemplateError, load_chat_template
from .tool_calls import (
    FORMATS,
    CallFormat,
    CallIds,
    CallParser,
    Parameters,
    ToolCallDelta,
    ToolDelta,
    ToolParser,
    call_rules,
    openai_call_id,
    text_or_calls,
)

__all__ = [
    "FORMATS",
    "CallFormat",
    "CallIds",
    "CallParser",
    "ChatFormats",
    "ChatOutputParser",
    "ChatTemplate",
    "ChatTemplateError",
    "MessageDelta",
    "ModelTemplates",
    "PairTemplate",
    "Parameters",
    "ReasoningParser",
    "SpecialTokenGuard",
    "ToolCallDelta",
    "ToolDelta",
    "ToolParser",
    "call_rules",
    "choose_formats",
    "load_chat_template",
    "openai_call_id",
    "prepare_formats",
    "reasoning_parser",
    "text_or_calls",
]
