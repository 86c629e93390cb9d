"""Tool calls in generated text: the formats of model families, their parser and their grammars."""

from .formats import FORMATS, hy_v4_format
from .grammar import call_rules, text_or_calls
from .parser import CallParser
from .syntax import CallFormat
from .tools import CallIds, Parameters, ToolCallDelta, ToolDelta, ToolParser, openai_call_id

__all__ = [
    "FORMATS",
    "CallFormat",
    "CallIds",
    "CallParser",
    "Parameters",
    "ToolCallDelta",
    "ToolDelta",
    "ToolParser",
    "call_rules",
    "hy_v4_format",
    "openai_call_id",
    "text_or_calls",
]
