"""The tool-call parsers by name."""

from collections.abc import Callable

from ...protocol.config.frontend import ToolCallParserName
from . import json_tools
from .pythonic_tools import PythonicToolParser
from .tools import ToolParser

_PARSERS: dict[ToolCallParserName, Callable[[], ToolParser]] = {
    "hermes": json_tools.hermes,
    "qwen3": json_tools.hermes,
    "llama3_json": json_tools.llama3_json,
    "llama4_json": json_tools.llama3_json,
    "mistral": json_tools.mistral,
    "granite": json_tools.granite,
    "pythonic": PythonicToolParser,
    "llama4_pythonic": PythonicToolParser,
}


def tool_parser(name: ToolCallParserName) -> Callable[[], ToolParser]:
    """Return a factory for the parsers of `--tool-call-parser NAME`."""
    return _PARSERS[name]
