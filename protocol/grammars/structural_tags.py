"""Translate structural tags, which give parts of an answer a form, to grammars.

A tag has a `format` in xgrammar's notation, or `structures` and `triggers`, the notation before it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from ..errors import ParameterError
from .expressions import FREE_TEXT, PARAM, any_of, decode, json_expression, regex_literal

_Empty: TypeAlias = Annotated[list[str], msgspec.Meta(max_length=0)]


class _Form(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of an answer. Fields that must be empty or None are those of xgrammar that no grammar enforces."""


class _Const(_Form, frozen=True, tag="const_string"):
    value: str


class _Schema(_Form, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Literal["json"] = "json"
    any_order: bool = False
    max_whitespace_cnt: None = None
    excludes: _Empty = []


class _Regex(_Form, frozen=True, tag="regex"):
    pattern: str
    excludes: _Empty = []


class _AnyText(_Form, frozen=True, tag="any_text"):
    excludes: _Empty = []
    max_tokens: None = None
    max_chars: None = None


class _Sequence(_Form, frozen=True, tag="sequence"):
    elements: _Forms


class _Or(_Form, frozen=True, tag="or"):
    elements: _Forms


class _Optional(_Form, frozen=True, tag="optional"):
    content: _AnyForm


class _Star(_Form, frozen=True, tag="star"):
    content: _AnyForm


class _Plus(_Form, frozen=True, tag="plus"):
    content: _AnyForm


class _Tag(_Form, frozen=True, tag="tag"):
    begin: str
    content: _AnyForm
    end: str | list[str]


class _Separated(_Form, frozen=True, tag="tags_with_separator"):
    tags: _Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class _Triggered(_Form, frozen=True, tag="triggered_tags"):
    triggers: list[str]
    tags: _Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: _Empty = []


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    schema: dict[str, Any] | bool
    end: str


class _Structures(msgspec.Struct, frozen=True):
    structures: Annotated[list[_Structure], msgspec.Meta(min_length=1)]
    triggers: list[str]
    at_least_one: bool = False


_AnyForm: TypeAlias = (
    _Const
    | _Schema
    | _Regex
    | _AnyText
    | _Sequence
    | _Or
    | _Optional
    | _Star
    | _Plus
    | _Tag
    | _Separated
    | _Triggered
)
_Forms: TypeAlias = Annotated[list[_AnyForm], msgspec.Meta(min_length=1)]
_Tags: TypeAlias = Annotated[list[_Tag], msgspec.Meta(min_length=1)]


class _Formatted(msgspec.Struct, frozen=True):
    format: _AnyForm


_REPEATS = {_Optional: "?", _Star: "*", _Plus: "+"}


def structural_tag_grammar(spec: str) -> str:
    """Return the Lark grammar of a structural tag in JSON. Raise ParameterError if it cannot be read."""
    if "format" in decode(spec, dict[str, Any]):
        form = decode(spec, _Formatted).format
    else:
        old = decode(spec, _Structures)
        tags = [_Tag(each.begin, _Schema(each.schema), each.end) for each in old.structures]
        form = _Triggered(old.triggers, tags, old.at_least_one)
    rules = _Rules()
    try:
        start = rules.until(form, ())
    except RecursionError:
        raise ParameterError(PARAM, "has forms that are nested too deeply") from None
    return "\n".join(["%llguidance {}", f"start: {start}", FREE_TEXT, *rules.lines])


class _Rules:
    """The rules of a grammar, beside `start`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def until(self, form: _AnyForm, ends: Sequence[str]) -> str:
        """Return the expression for a form and one of the ends after it; only free text may be without ends."""
        match form:
            case _AnyText():
                return self._text(ends)
            case _Triggered():
                return self._triggered(form, ends)
            case _Sequence(elements=[*others, last]):
                return " ".join([*map(self._closed, others), self.until(last, ends)])
            case _Or():
                return f"({' | '.join(self.until(each, ends) for each in form.elements)})"
            case _:
                return f"{self._closed(form)} ({any_of(ends or [''])})"

    def _closed(self, form: _AnyForm) -> str:
        """Return the expression for a form whose end does not depend on the text after it."""
        match form:
            case _Const():
                return json.dumps(form.value)
            case _Schema():
                return json_expression(form.json_schema)
            case _Regex():
                return regex_literal(form.pattern)
            case _Tag():
                ends = [form.end] if isinstance(form.end, str) else form.end
                return (
                    f"{json.dumps(form.begin)} {self.until(form.content, [e for e in ends if e])}"
                )
            case _Sequence():
                return f"({' '.join(map(self._closed, form.elements))})"
            case _Or():
                return f"({' | '.join(map(self._closed, form.elements))})"
            case _Optional() | _Star() | _Plus():
                return f"({self._closed(form.content)}){_REPEATS[type(form)]}"
            case _Separated():
                tag = self._rule(" | ".join(map(self._closed, form.tags)))
                more = "" if form.stop_after_first else f" ({json.dumps(form.separator)} {tag})*"
                return f"({tag}{more}){'' if form.at_least_one else '?'}"
            case _AnyText() | _Triggered():
                raise ParameterError(
                    PARAM, "must have free text only at the end or as the content of a tag"
                )

    def _triggered(self, form: _Triggered, ends: Sequence[str]) -> str:
        """Return the expression for free text in which each occurrence of a trigger starts one of its tags."""
        bodies: dict[str, list[str]] = {}
        for tag in form.tags:
            matching = [each for each in form.triggers if each and tag.begin.startswith(each)]
            if not matching:
                raise ParameterError(
                    PARAM,
                    f"must have a trigger that is a prefix of {tag.begin!r}, got {form.triggers}",
                )
            trigger = max(matching, key=len)
            rest = msgspec.structs.replace(tag, begin=tag.begin[len(trigger) :])
            bodies.setdefault(trigger, []).append(self._closed(rest))
        later = " | ".join(
            f"{self._text([trigger])} ({' | '.join(tags)})" for trigger, tags in bodies.items()
        )
        first = f"({' | '.join(map(self._closed, form.tags))})" if form.at_least_one else ""
        if not form.stop_after_first:
            return f"{first} ({later})* {self._text(ends)}"
        end = any_of(ends or [""])
        return f"{first} ({end})" if first else f"(({later}) ({end}) | {self._text(ends)})"

    def _text(self, ends: Sequence[str]) -> str:
        """Return the expression for free text up to the first of the ends, or up to the end of the answer."""
        return self._rule(f"TEXT ({any_of(ends)})", "[lazy]") if ends else "TEXT"

    def _rule(self, body: str, attributes: str = "") -> str:
        name = f"part_{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name
