"""The parts of which a format of tool calls consists: blocks, calls and arguments."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Final, TypeAlias

import msgspec

from .element_arguments import ElementArguments
from .gemma_arguments import GemmaArguments
from .json_calls import NAME_AND_ARGUMENTS, CallKeys, JsonArguments, JsonCall
from .python_calls import PythonCall
from .tagged_arguments import TaggedArguments, Tags
from .tools import ArgumentsReader, CallReader, NewId, Parameters, openai_call_id

_LONGEST_HEADER: Final = 256


class JsonObject(msgspec.Struct, frozen=True):
    """The syntax `{"name": NAME, "arguments": {...}}`, with the names of members in `keys`."""

    keys: CallKeys = NAME_AND_ARGUMENTS
    needs_arguments: bool = False
    """True if an object without arguments does not count as a call."""
    before: str = ""
    first: str = "{"
    is_only_call: bool = False

    def reader(self, markers: tuple[str, ...], functions: Mapping[str, Parameters]) -> CallReader:
        """Return a reader for one call."""
        return JsonCall(markers, self.keys, needs_arguments=self.needs_arguments)


class PythonExpression(msgspec.Struct, frozen=True):
    """The syntax `NAME(key=value, ...)`."""

    before: str = ""
    first: str = ""
    is_only_call: bool = False

    def reader(self, markers: tuple[str, ...], functions: Mapping[str, Parameters]) -> CallReader:
        """Return a reader for one call."""
        return PythonCall()


class JsonNotation(msgspec.Struct, frozen=True):
    """Arguments that are a JSON object."""

    first: tuple[str, ...] = ("{",)

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return JsonArguments(markers)


class GemmaNotation(msgspec.Struct, frozen=True):
    """Arguments in Gemma's notation, with strings between two `quote` markers."""

    quote: str
    first: tuple[str, ...] = ("{",)

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return GemmaArguments(self.quote, markers)


class TaggedNotation(msgspec.Struct, frozen=True):
    """Arguments between tags. They begin with one of the texts in `first`."""

    tags: Tags
    first: tuple[str, ...]

    def reader(self, markers: tuple[str, ...], parameters: Parameters) -> ArgumentsReader:
        """Return a reader for the arguments of one call."""
        return TaggedArguments(self.tags, markers, parameters)


class ElementNotation(msgspec.Struct, frozen=True):
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


class NamedCall(msgspec.Struct, frozen=True, dict=True):
    """The syntax `before prefix NAME suffix after ARGUMENTS end`.

    Attributes:
        lead: The text before the prefix. Models may omit it.
        prefix: The text before the name. Models may omit it.
        suffix: A regular expression for text after the name. Models may omit it.
        after: The text between the name and the arguments.
        is_after_optional: True if models may omit `after`.
        ends: The markers after the arguments.
        writes_suffix: True if a call that a grammar forces must have the suffix.
    """

    arguments: JsonNotation | GemmaNotation | TaggedNotation | ElementNotation = JsonNotation()
    before: str = ""
    lead: str = ""
    prefix: str = ""
    suffix: str = ""
    writes_suffix: bool = False
    after: str = ""
    is_after_optional: bool = False
    ends: tuple[str, ...] = ()
    first: str = ""

    @property
    def is_only_call(self) -> bool:
        """True if no marker starts the call."""
        return not self.before

    @cached_property
    def header(self) -> re.Pattern[str]:
        """The regular expression for everything before the arguments."""
        lead = rf"(?:{re.escape(self.lead)}\s*)?" if self.lead else ""
        prefix = rf"(?:{re.escape(self.prefix.strip())}\s*)?" if self.prefix else ""
        if self.prefix.endswith(":"):
            prefix += ":?"
        suffix = f"(?:{self.suffix})?" if self.suffix else ""
        after = re.escape(self.after.strip())
        if self.is_after_optional and after:
            after = f"(?:{after})?"
        return re.compile(rf"\s*{lead}{prefix}(?P<name>[\w.\-/:]*?[\w.\-/]){suffix}\s*{after}\s*")

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
            parameters = self._functions.get(self.name, {})
            self._arguments = self._syntax.arguments.reader(self._markers, parameters)
            text = self._header[start:]
        json = self._arguments.feed(text)
        self.rest, self.failed = self._arguments.rest, self._arguments.failed
        return json

    def finish(self) -> str:
        """Return the held-back end of the arguments."""
        return "" if self._arguments is None else self._arguments.finish()


class CallFormat(msgspec.Struct, frozen=True, dict=True):
    """A format in which calls are written in blocks `opening call call ... closing`.

    Brackets, commas and whitespace between calls are optional.

    Attributes:
        closing: The end of a block; None if a block has no marker at its end.
        bare: True if a text that starts with a bracket is a block, even without an opening marker; see `openings_with`
            for blocks within a text.
        new_id: Creates IDs for calls to which the model gives none.
    """

    openings: tuple[str, ...]
    calls: tuple[CallSyntax, ...]
    closing: str | None = None
    bare: bool = False
    new_id: NewId = msgspec.field(default=openai_call_id)

    def openings_with(self, functions: Collection[str]) -> tuple[str, ...]:
        """Return the texts that open a block.

        Bare calls within a text must begin with the name of one of the `functions`.
        """
        if not self.bare:
            return self.openings
        is_python = any(isinstance(call, PythonExpression) for call in self.calls)
        bare = "[{}(" if is_python else '{{"name": "{}"'
        return (*self.openings, *(bare.format(name) for name in functions))

    @cached_property
    def ignored(self) -> tuple[str, ...]:
        """The markers that may follow the arguments of a call, and that are ignored."""
        named = (syntax for syntax in self.calls if isinstance(syntax, NamedCall))
        return tuple(end.strip() for syntax in named for end in syntax.ends)

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """The markers that cannot be part of a call."""
        leads = tuple(syntax.before for syntax in self.calls if syntax.before)
        closings = (self.closing,) if self.closing else ()
        return (*dict.fromkeys((*self.openings, *closings, *leads, *self.ignored)),)
