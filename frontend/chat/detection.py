"""Choose the formats of tool calls and reasoning, from the options or from what the chat template shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Generic, TypeAlias, TypeVar

import msgspec

from ...protocol.config.frontend import (
    FrontendConfig,
    ReasoningParserName,
    ReasoningParserOption,
    ToolCallParserName,
    ToolCallParserOption,
)
from .model_templates import ModelTemplates
from .reasoning import (
    CHANNEL_PARSERS,
    REASONING_FORMATS,
    ChannelParser,
    MarkedReasoningParser,
    ReasoningFormat,
    WholeTextParser,
)
from .template import ChatTemplate
from .tool_calls import FORMATS, CallFormat, CallParser, hy_v4_format

ReasoningParser: TypeAlias = ChannelParser | MarkedReasoningParser
"""A parser that splits one text, fed in pieces, into reasoning and content."""
ReasoningParserFactory: TypeAlias = Callable[..., ReasoningParser]
"""Creates a parser for the answer to a rendered prompt, given `constrained` if a grammar applies to the answer."""

_Name = TypeVar("_Name", bound=str)
_QUESTION: Final = "9f27e"
_NAME: Final = "call_probe"
_VALUE: Final = "probe"
_SUFFIX: Final = re.compile(r"<(?:tool_calls?|think|arg_key)(:[^\s<>{}]+)>")

TOOL_MARKERS: Final[Sequence[tuple[str, ToolCallParserName]]] = (
    ("<|channel|>", "openai"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|START_ACTION|>", "cohere_command"),
    ("<|content_invoke_tool_json|>", "inkling"),
    ("<atem:", "muse"),
    ("<|tools_prefix|>", "apertus"),
    ("<|plamo:begin_tool_requests:plamo|>", "plamo3"),
    ("<dots_function_call>", "dots"),
    ('<param name=\\"', "minicpm5"),
    ('<param name="', "minicpm5"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("]<]minimax[>[", "minimax_m3"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<ifm|arg_key>", "k2_horizon"),
    ("<arg_key:", "hy_v4"),
    ("<parameter=", "qwen3_coder"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<|python_start|>", "llama4_pythonic"),
    ('{"name": function name, "parameters":', "llama3_json"),
    ("<|tool_call|>", "granite"),
    ("<start_function_call>", "functiongemma"),
    ("List of tools: [", "lfm2"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<tool_calls>[", "hunyuan_a13b"),
    ('<tool_call>\\n{\\"name\\"', "hermes"),
    ('<tool_call>\n{"name"', "hermes"),
)
"""Markers of formats whose calls cannot be found in a rendered chat -> the format, in the order of precedence."""

REASONING_MARKERS: Final[Sequence[tuple[str, ReasoningParserName]]] = (
    ("<|channel|>", "openai_gptoss"),
    ("<|open|>", "kimi_k3"),
    ("<|START_TEXT|>", "cohere_command4"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<|content_thinking|>", "inkling"),
    ("<atem:", "muse"),
    ("<|plamo:begin_think:plamo|>", "plamo3"),
    ("<|channel>", "gemma4"),
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi_vl"),
    ("<seed:think>", "seed_oss"),
    ("<mm:think>", "minimax_m3"),
    ("<ifm|think", "k2_horizon"),
    ("Here is my thought process:", "granite"),
    ("<think>", "qwen3"),
    ("<think:", "qwen3"),
)


class Choice(msgspec.Struct, Generic[_Name], frozen=True):
    """The name of a chosen format (None if there is none), and the reason for the choice."""

    name: _Name | None
    reason: str


class ChatFormats(msgspec.Struct, frozen=True):
    """The formats in which a model writes tool calls and reasoning.

    Attributes:
        suffix: The end of the tags of Hunyuan 4 in this checkpoint, such as ":6124c78e".
    """

    tool_calls: Choice[ToolCallParserName]
    reasoning: Choice[ReasoningParserName]
    suffix: str = ""

    @property
    def call_format(self) -> CallFormat | None:
        """The format of tool calls; None if they are not parsed."""
        if self.suffix and self.tool_calls.name == "hy_v4":
            return hy_v4_format(self.suffix)
        return FORMATS[self.tool_calls.name] if self.tool_calls.name else None

    @property
    def describes_tools(self) -> bool:
        """True if the server explains tools and their format to the model, because the chat template does not."""
        return self.tool_calls.name == "generic"

    @property
    def reasoning_parser(self) -> ReasoningParserFactory | None:
        """A factory for parsers of the reasoning; None if it is not separated."""
        if self.suffix and self.reasoning.name == "qwen3":
            format = ReasoningFormat(
                (f"<think{self.suffix}>",),
                (f"</think{self.suffix}>",),
                calls=(f"<tool_calls{self.suffix}>",),
            )
            return partial(MarkedReasoningParser, format)
        return reasoning_parser(self.reasoning.name) if self.reasoning.name else None

    def __str__(self) -> str:
        tools, reasoning = self.tool_calls, self.reasoning
        return (
            f"tool calls: {tools.name or 'none'} ({tools.reason}); "
            f"reasoning: {reasoning.name or 'none'} ({reasoning.reason})"
        )


def reasoning_parser(name: ReasoningParserName) -> ReasoningParserFactory:
    """Return a factory for the parsers of `--reasoning-parser NAME`."""
    if name in CHANNEL_PARSERS:
        return CHANNEL_PARSERS[name]
    if name == "minimax_m2_append_think":
        return partial(WholeTextParser, REASONING_FORMATS["minimax_m2"])
    return partial(MarkedReasoningParser, REASONING_FORMATS[name])


def prepare_formats(config: FrontendConfig, templates: ModelTemplates) -> ChatFormats:
    """Return the formats of a model, and make its templates describe tools if they do not show them."""
    formats = choose_formats(config, templates.choose(with_tools=True))
    if formats.describes_tools:
        templates.describe_tools()
    return formats


def choose_formats(config: FrontendConfig, template: ChatTemplate | None) -> ChatFormats:
    """Return the configured formats; "auto" means the formats that the template shows."""
    return ChatFormats(
        _choose_tool_calls(config.tool_call_parser, template),
        _choose_reasoning(config.reasoning_parser, template),
        suffix[1] if template and (suffix := _SUFFIX.search(template.source)) else "",
    )


def _choose_tool_calls(
    option: ToolCallParserOption, template: ChatTemplate | None
) -> Choice[ToolCallParserName]:
    if option == "none":
        return Choice(None, "--tool-call-parser none")
    if option != "auto":
        return Choice(option, "--tool-call-parser")
    if template is None:
        return Choice(None, "the model has no chat template")
    if not template.shows_tools:
        return Choice("generic", "the chat template shows no tools")
    name = _format_of_rendered_call(template)
    if name is not None:
        return Choice(name, "the chat template writes calls in this format")
    for marker, named in TOOL_MARKERS:
        if marker in template.source:
            return Choice(named, f"the chat template contains {marker}")
    return Choice("generic", "the chat template shows no known format")


def _choose_reasoning(
    option: ReasoningParserOption, template: ChatTemplate | None
) -> Choice[ReasoningParserName]:
    if option == "none":
        return Choice(None, "--reasoning-parser none")
    if option != "auto":
        return Choice(option, "--reasoning-parser")
    if template is None:
        return Choice(None, "the model has no chat template")
    for marker, named in REASONING_MARKERS:
        if marker in template.source:
            return Choice(named, f"the chat template contains {marker}")
    return Choice(None, "the chat template shows no known format")


def _format_of_rendered_call(template: ChatTemplate) -> ToolCallParserName | None:
    """Return the format whose parser finds the tool call in a chat rendered by the template."""
    rendered = template.render_call(_QUESTION, _NAME, {"text": _VALUE})
    _, question, text = rendered.rpartition(_QUESTION)
    if not question:
        return None
    for name, format in FORMATS.items():
        if format.openings[0] not in text:
            continue
        parser = CallParser(format, {_NAME: {"properties": {"text": {"type": "string"}}}})
        deltas = parser.feed(text).tool_calls + parser.finish().tool_calls
        arguments = "".join(delta.arguments for delta in deltas).replace(" ", "")
        if [d.name for d in deltas if d.name] == [_NAME] and arguments == f'{{"text":"{_VALUE}"}}':
            return name
    return None
