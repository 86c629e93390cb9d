"""Reasoning in generated text: the formats of model families and their parsers."""

from .channels import ChannelParser
from .channels_of_families import CHANNEL_PARSERS
from .marked import (
    REASONING_FORMATS,
    MarkedReasoningParser,
    ReasoningFormat,
    WholeTextParser,
    has_special_tokens,
)

__all__ = [
    "CHANNEL_PARSERS",
    "REASONING_FORMATS",
    "ChannelParser",
    "MarkedReasoningParser",
    "ReasoningFormat",
    "WholeTextParser",
    "has_special_tokens",
]
