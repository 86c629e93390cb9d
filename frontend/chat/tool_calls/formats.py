"""The tool-call formats of model families (`--tool-call-parser`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Final, TypeAlias

from ....protocol.config.frontend import ToolCallParserName
from .element_arguments import ElementArguments
from .gemma_arguments import GemmaArguments
from .json_calls import JsonArguments, JsonCall
from .python_calls import PythonCall
from .tagged_arguments import TaggedArguments, Tags
from .tools import ArgumentsReader, CallReader, Parameters, mistral_call_id, openai_call_id

_LONGEST_HEADER: Final = 256


@dataclass(frozen=True)
class JsonObject:
    """The syntax `{"name": NAME, "arguments": {...}}`."""

    needs_arguments: bool = False
    """True if an object without arguments does not count as a call."""
    before: str = ""
    first: str = "{"
    is_only_call: bool = False

    def reader(self, markers: tuple[str, ...], functions: Mapping[str, Parameters]) -> CallReader:
        """Return a reader for one call."""
        return JsonCall(markers, needs_arguments=self.needs_arguments)


@dataclass(frozen=True)
class PythonExpression:
    """The syntax `NAME(key=value, ...)`."""

    before: str = ""
    first: str = ""
    is_only_call: bool = False

    def reader(self, markers: tuple[str, ...], functions: Mapping[str, Parameters]) -> CallReader:
        """Return a reader for one call."""
        return PythonCall()


@dataclass(frozen=True)
class JsonNotation:
    """Arguments that are a JSON object."""

    first: tuple[str, ...] = ("{",)

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return JsonArguments(markers)


@dataclass(frozen=True)
class GemmaNotation:
    """Arguments in Gemma's notation, with strings between two `quote` markers."""

    quote: str
    first: tuple[str, ...] = ("{",)

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return GemmaArguments(self.quote, markers)


@dataclass(frozen=True)
class TaggedNotation:
    """Arguments between tags. They begin with one of the texts in `first`."""

    tags: Tags
    first: tuple[str, ...]

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return TaggedArguments(self.tags, markers, parameters)


@dataclass(frozen=True)
class ElementNotation:
    """Arguments as nested elements. Their tags, and the tag `end`, have `mark` before them."""

    mark: str
    start: str
    end: str

    @property
    def first(self) -> tuple[str, ...]:
        """The text with which the arguments begin."""
        return (self.start,)

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        end = self.mark + self.end
        return ElementArguments(self.mark, self.start, end, markers, parameters)


@dataclass(frozen=True)
class NamedCall:
    """The syntax `before prefix NAME suffix after ARGUMENTS end`.

    Attributes:
        prefix: The text before the name. Models may omit it.
        suffix: A regular expression for text after the name. Models may omit it.
        after: The text between the name and the arguments.
        is_after_optional: True if models may omit `after`.
        ends: The markers after the arguments.
        writes_suffix: True if a call that a grammar forces must have the suffix.
        has_id: True if prefix, name and suffix together are the call's ID.
    """

    arguments: JsonNotation | GemmaNotation | TaggedNotation | ElementNotation = JsonNotation()
    before: str = ""
    prefix: str = ""
    suffix: str = ""
    writes_suffix: bool = False
    after: str = ""
    is_after_optional: bool = False
    ends: tuple[str, ...] = ()
    has_id: bool = False
    first: str = ""

    @property
    def is_only_call(self) -> bool:
        """True if no marker starts the call."""
        return not self.before

    @cached_property
    def header(self) -> re.Pattern[str]:
        """The regular expression for everything before the arguments."""
        prefix = rf"(?:{re.escape(self.prefix.strip())}\s*)?" if self.prefix else ""
        suffix = f"(?:{self.suffix})?" if self.suffix else ""
        after = re.escape(self.after.strip())
        if self.is_after_optional and after:
            after = f"(?:{after})?"
        return re.compile(rf"\s*(?P<id>{prefix}(?P<name>[\w.\-/:]*?[\w.\-/]){suffix})\s*{after}\s*")

    def reader(self, markers: tuple[str, ...], functions: Mapping[str, Parameters]) -> CallReader:
        """Return a reader for one call."""
        return _NamedCallReader(self, markers, functions)


CallSyntax: TypeAlias = JsonObject | PythonExpression | NamedCall
"""The syntax of one call within a block."""


class _NamedCallReader:
    """Reads the name and then the arguments of one call."""

    def __init__(
        self, syntax: NamedCall, markers: tuple[str, ...], functions: Mapping[str, Parameters]
    ) -> None:
        self.rest: str | None = None
        self.failed = False
        self.name: str | None = None
        self.call_id: str | None = None
        self._syntax = syntax
        self._markers = markers
        self._functions = functions
        self._header = ""
        self._arguments: ArgumentsReader | None = None

    def feed(self, text: str) -> str:
        """Return the part of the arguments that the next piece of text adds."""
        if self._arguments is None:
            self._header += text
            firsts = self._syntax.arguments.first
            starts = [self._header.find(first, 0, _LONGEST_HEADER) for first in firsts]
            start = min((at for at in starts if at >= 0), default=-1)
            if start < 0 and len(self._header) < _LONGEST_HEADER:
                return ""
            header = self._syntax.header.fullmatch(self._header, 0, max(start, 0))
            if header is None:
                self.rest, self.failed = self._header, True
                return ""
            self.name = header["name"]
            self.call_id = header["id"] if self._syntax.has_id else None
            parameters = self._functions.get(self.name, {})
            self._arguments = self._syntax.arguments.reader(self._markers, parameters)
            text = self._header[start:]
        json = self._arguments.feed(text)
        self.rest, self.failed = self._arguments.rest, self._arguments.failed
        return json

    def finish(self) -> str:
        """Return the held-back end of the arguments."""
        return "" if self._arguments is None else self._arguments.finish()


@dataclass(frozen=True)
class CallFormat:
    """A format in which calls are written in blocks `opening call call ... closing`.

    Brackets, commas and whitespace between calls are optional.

    Attributes:
        closing: The end of a block; None if a block has no marker at its end.
        bare: True if a text that starts with a bracket is a block, even without an opening marker; see `openings_with`
            for blocks within a text.
        new_id: Creates IDs, from random numbers, for calls to which the model gives none.
    """

    openings: tuple[str, ...]
    calls: tuple[CallSyntax, ...]
    closing: str | None = None
    bare: bool = False
    new_id: Callable[[Random], str] = field(default=openai_call_id)

    def openings_with(self, functions: Collection[str]) -> tuple[str, ...]:
        """Return the texts that open a block.

        A bare list of Python calls within a text must begin with a call of one of the `functions`.
        """
        if not self.bare or not any(isinstance(call, PythonExpression) for call in self.calls):
            return self.openings
        return (*self.openings, *(f"[{name}(" for name in functions))

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """The markers after arguments, which are ignored."""
        named = (syntax for syntax in self.calls if isinstance(syntax, NamedCall))
        return tuple(end.strip() for syntax in named for end in syntax.ends)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The markers that cannot be part of a call."""
        leads = tuple(syntax.before for syntax in self.calls if syntax.before)
        closings = (self.closing,) if self.closing else ()
        return (*dict.fromkeys((*self.openings, *closings, *leads, *self.ignored)),)


def _sections(opening: str, closing: str, call: NamedCall) -> CallFormat:
    """Return a format whose calls have their own markers. Models may omit the opening of a block."""
    return CallFormat((opening, call.before), (call,), closing)


def _tagged(opening: str, closing: str, before: str, tags: Tags) -> CallFormat:
    """Return a format of blocks with calls `before NAME tagged-arguments`."""
    return _sections(
        opening,
        closing,
        NamedCall(TaggedNotation(tags, (tags.start, *filter(None, (tags.empty,)))), before=before),
    )


def _dsml(block: str) -> CallFormat:
    """Return DeepSeek's format with this name of a block, whose tags have a prefix."""
    tags = Tags(
        '<｜DSML｜parameter name="',
        ">",
        "</｜DSML｜parameter>",
        start='">',
        end="</｜DSML｜invoke>",
        empty='"/>',
        typed=(('" string="true"', True), ('" string="false"', False)),
        may_be_json=True,
    )
    return _tagged(f"<｜DSML｜{block}>", f"</｜DSML｜{block}>", '<｜DSML｜invoke name="', tags)


_HERMES: Final = CallFormat(("<tool_call>",), (JsonObject(),), "</tool_call>")
_LLAMA3_JSON: Final = CallFormat(
    ("<|python_tag|>",), (JsonObject(needs_arguments=True),), bare=True
)
_PYTHONIC: Final = CallFormat(
    ("<|python_start|>",), (PythonExpression(),), "<|python_end|>", bare=True
)
_QWEN3_CODER: Final = _tagged(
    "<tool_call>",
    "</tool_call>",
    "<function=",
    Tags("<parameter=", ">", "</parameter>", start=">", end="</function>", has_newlines=True),
)
_GLM: Final = CallFormat(
    ("<tool_call>",),
    (
        NamedCall(
            TaggedNotation(
                Tags("<arg_key>", "</arg_key>", "</arg_value>", value_before="<arg_value>"),
                first=("<arg_key>", "</tool_call>"),
            )
        ),
    ),
    "</tool_call>",
)

_MINIMAX_MARK: Final = "]<]minimax[>["

FORMATS: Final[dict[ToolCallParserName, CallFormat]] = {
    "hermes": _HERMES,
    "qwen3": _HERMES,
    "granite4": _HERMES,
    "granite": CallFormat(("<|tool_call|>", "<tool_call>"), (JsonObject(),), "</tool_call>"),
    "llama3_json": _LLAMA3_JSON,
    "llama4_json": _LLAMA3_JSON,
    "hunyuan_a13b": CallFormat(("<tool_calls>",), (JsonObject(),), "</tool_calls>"),
    "longcat": CallFormat(("<longcat_tool_call>",), (JsonObject(),), "</longcat_tool_call>"),
    "nemotron_json": CallFormat(("<TOOLCALL>",), (JsonObject(),), "</TOOLCALL>"),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        (
            JsonObject(),
            NamedCall(suffix=r"\s*\[CALL_ID\]\s*\w+", after="[ARGS]", is_after_optional=True),
        ),
        new_id=mistral_call_id,
    ),
    "pythonic": _PYTHONIC,
    "llama4_pythonic": _PYTHONIC,
    "lfm2": CallFormat(
        ("<|tool_call_start|>",), (JsonObject(), PythonExpression()), "<|tool_call_end|>"
    ),
    "qwen3_coder": _QWEN3_CODER,
    "qwen3_xml": _QWEN3_CODER,
    "seed_oss": _tagged(
        "<seed:tool_call>",
        "</seed:tool_call>",
        "<function=",
        Tags("<parameter=", ">", "</parameter>", start=">", end="</function>"),
    ),
    "minimax_m2": _tagged(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        '<invoke name="',
        Tags('<parameter name="', '">', "</parameter>", start='">', end="</invoke>"),
    ),
    "minimax_m3": _sections(
        f"{_MINIMAX_MARK}<tool_call>",
        f"{_MINIMAX_MARK}</tool_call>",
        NamedCall(
            ElementNotation(_MINIMAX_MARK, '">', "</invoke>"),
            before=f'{_MINIMAX_MARK}<invoke name="',
        ),
    ),
    "glm45": _GLM,
    "glm47": _GLM,
    "k2_horizon": _sections(
        "<ifm|tool_calls>",
        "</ifm|tool_calls>",
        NamedCall(
            TaggedNotation(
                Tags(
                    "<ifm|arg_key>",
                    "</ifm|arg_key>",
                    "</ifm|arg_value>",
                    value_before="<ifm|arg_value>",
                    end="</ifm|tool_call>",
                ),
                first=("<ifm|arg_key>", "</ifm|tool_call>"),
            ),
            before="<ifm|tool_call>",
        ),
    ),
    "kimi_k2": _sections(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        NamedCall(
            before="<|tool_call_begin|>",
            prefix="functions.",
            suffix=r":\d+",
            writes_suffix=True,
            after="<|tool_call_argument_begin|>",
            ends=("<|tool_call_end|>",),
            has_id=True,
        ),
    ),
    "kimi_k3": _sections(
        "<|open|>tools<|sep|>",
        "<|close|>tools<|sep|>",
        NamedCall(
            TaggedNotation(
                Tags(
                    '<|open|>argument key="',
                    "<|sep|>",
                    "<|close|>argument<|sep|>",
                    end="<|close|>call<|sep|>",
                    typed=tuple(
                        (f'" type="{name}"', name == "string")
                        for name in ("string", "number", "boolean", "null", "object", "array")
                    ),
                    is_escaped=True,
                ),
                first=('<|open|>argument key="', "<|close|>call<|sep|>"),
            ),
            before='<|open|>call tool="',
            suffix=r'" index="\d+"',
            writes_suffix=True,
            after="<|sep|>",
        ),
    ),
    "deepseek_v3": _sections(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall(
            before="<｜tool▁call▁begin｜>",
            prefix="function<｜tool▁sep｜>",
            after="\n```json\n",
            is_after_optional=True,
            ends=("\n```", "<｜tool▁call▁end｜>"),
        ),
    ),
    "deepseek_v31": _sections(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        NamedCall(
            before="<｜tool▁call▁begin｜>",
            after="<｜tool▁sep｜>",
            ends=("<｜tool▁call▁end｜>",),
        ),
    ),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "gemma4": CallFormat(
        ("<|tool_call>",),
        (NamedCall(GemmaNotation('<|"|>'), prefix="call:"),),
        "<tool_call|>",
    ),
    "functiongemma": CallFormat(
        ("<start_function_call>",),
        (NamedCall(GemmaNotation("<escape>"), prefix="call:"),),
        "<end_function_call>",
    ),
    "openai": CallFormat(
        ("<|channel|>commentary to=functions.",),
        (NamedCall(suffix=r"\s*<\|constrain\|>\s*\w+|\s+\w+", after="<|message|>"),),
        "<|call|>",
    ),
    "phi4_mini_json": CallFormat(("functools",), (JsonObject(),)),
    "internlm": CallFormat(("<|action_start|><|plugin|>",), (JsonObject(),), "<|action_end|>"),
    "granite-20b-fc": CallFormat(("<function_call>",), (JsonObject(),)),
    "gigachat3": CallFormat(
        ("<|function_call|>", "function call<|role_sep|>"), (JsonObject(),), "<|message_sep|>"
    ),
    "xlam": CallFormat(
        ("<tool_call>", "[TOOL_CALLS]"),
        (JsonObject(needs_arguments=True),),
        "</tool_call>",
        bare=True,
    ),
    "olmo3": CallFormat(("<function_calls>",), (PythonExpression(),), "</function_calls>"),
    "step3": _sections(
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_end｜>",
        NamedCall(
            TaggedNotation(
                Tags(
                    '<steptml:parameter name="',
                    '">',
                    "</steptml:parameter>",
                    start='">',
                    end="</steptml:invoke>",
                ),
                first=('">',),
            ),
            before="<｜tool_call_begin｜>",
            prefix='<steptml:invoke name="',
            ends=("<｜tool_call_end｜>",),
        ),
    ),
    "hy_v3": _sections(
        "<tool_calls>",
        "</tool_calls>",
        NamedCall(
            TaggedNotation(
                Tags(
                    "<arg_key>",
                    "</arg_key>",
                    "</arg_value>",
                    value_before="<arg_value>",
                    start="<tool_sep>",
                    end="</tool_call>",
                ),
                first=("<tool_sep>",),
            ),
            before="<tool_call>",
        ),
    ),
    "generic": _HERMES,
}
"""Name of `--tool-call-parser` -> the format."""
