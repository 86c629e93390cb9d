"""Lark grammars that constrain output to a tool-call format.

Text in a grammar does not match special tokens. So a marker that is a single token of the tokenizer is written both as
text and as that token.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from ....protocol.grammars.expressions import any_of, json_expression
from ....protocol.grammars.json_schema import Schema, relocate_references
from ...tokenizer.tokenizer import Tokenizer
from .json_calls import CallKeys
from .strict_values import Value, named_properties
from .syntax import (
    CallFormat,
    ElementNotation,
    GemmaNotation,
    JsonNotation,
    JsonObject,
    NamedCall,
    PythonExpression,
    TaggedNotation,
)
from .tagged_arguments import Tags

_MARK: Final = re.compile(r"(\]<\]\w+\[>\[|<[^<>\n]+>|\[[A-Z_]+\])")
"""A part of a marker that may be a single token."""

_ANY_ARGUMENTS: Final[Schema] = {"type": "object"}

_NUMBER_ID: Final = {"type": "string", "pattern": "^[0-9]{1,4}$"}

_PYTHON_VALUES: Final = r"""
python_value: PYTHON_STRING | NUMBER | python_list | python_dict | "True" | "False" | "None"
python_list: "[" (python_value ("," " "? python_value)*)? "]"
python_dict: "{" (python_item ("," " "? python_item)*)? "}"
python_item: PYTHON_STRING ":" " "? python_value
PYTHON_STRING: /"([^"\\\n]|\\[\\"'nrt])*"/ | /'([^'\\\n]|\\[\\"'nrt])*'/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
""".strip()


def call_rules(
    format: CallFormat,
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    schemas: Mapping[str, Schema] | None = None,
) -> str:
    """Return the rule `calls` and its dependencies: one call of the named functions, or several if `parallel`.

    The arguments of a function match its schema in `schemas` if the format writes them in JSON. Between tags, they have
    the properties of the schema in its order, and values of their types. All others may be any object.
    """
    return _Rules(names, tokenizer, parallel, schemas or {}).calls(format)


def text_or_calls(
    format: CallFormat,
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    parallel: bool,
    schemas: Mapping[str, Schema] | None = None,
) -> str:
    """Return a grammar for arbitrary text in which every tool call is a call of one of these functions.

    Their arguments are those of `call_rules`.
    """
    # The parser reads a bare object or array as a call, so other text must not begin with one.
    text = r"[ \t\r\n]*([^{\[ \t\r\n](.|\n)*)?" if format.bare else r"(.|\n)*"
    rules = _Rules(names, tokenizer, parallel, schemas or {})
    blocks = _block_openings(format)
    called = [f"({rules.text_to(blocks, 'TEXT')}) rest_of_block"] if blocks else []
    called += [f"({rules.text_to([mark], 'TEXT')}) rest_of_call" for mark in _call_openings(format)]
    calls = f"called{'*' if parallel else '?'} TEXT"
    return "\n".join(
        [
            "%llguidance {}",
            f"start: {calls} | calls TEXT" if format.bare else f"start: {calls}",
            f"called: {' | '.join(called)}",
            f"TEXT: /{text}/",
            rules.calls(format),
        ]
    )


def _call_openings(format: CallFormat) -> list[str]:
    """Return the markers of calls before which the opening of the block may be missing."""
    leads = [syntax.before for syntax in format.calls]
    return [opening for opening in format.openings if opening in leads]


def _block_openings(format: CallFormat) -> list[str]:
    calls = _call_openings(format)
    return [opening for opening in format.openings if opening not in calls]


def _shape(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _copy(schema: Schema) -> Schema:
    copied: Schema = msgspec.json.decode(msgspec.json.encode(schema))
    return copied


class _Rules:
    """The rules of one grammar."""

    def __init__(
        self,
        names: Sequence[str],
        tokenizer: Tokenizer,
        parallel: bool,
        schemas: Mapping[str, Schema],
    ) -> None:
        self._names = list(names)
        self._schemas = schemas
        self._tokenizer = tokenizer
        self._parallel = parallel
        self._rules: list[str] = []
        self._num_ends = 0

    def calls(self, format: CallFormat) -> str:
        """Return the rule `calls` and its dependencies."""
        bodies = []
        for syntax in format.calls:
            match syntax:
                case JsonObject(keys):
                    bodies += self._json_objects(keys, is_bare=format.bare)
                case PythonExpression():
                    bodies += self._python_calls()
                case NamedCall():
                    bodies += self._named_calls(syntax, format.closing)
        rest = f"SPACE? ({' | '.join(bodies)})"
        if format.closing is not None:
            rest += f" (SPACE? {self._mark(format.closing)})?"
        openings = [self._mark(opening) for opening in _block_openings(format)]
        opening = f"({' | '.join(openings)}) " if openings else ""
        blocks = "SPACE? block (SPACE? block)*" if self._parallel else "SPACE? block"
        if format.bare:
            blocks += f" | SPACE? {self._bare(format)}"
        return "\n".join(
            [
                f"calls: {blocks}",
                f"block: {opening}rest_of_block",
                f"rest_of_block: {rest}",
                r"SPACE: /[ \t\r\n]{1,8}/",
                *self._rules,
            ]
        )

    def text_to(self, marks: Sequence[str], text: str = "ANY") -> str:
        """Return an expression for text that matches the terminal `text`, up to the first of the marks."""
        self._num_ends += 1
        rule = f"text_to_mark_{self._num_ends}"
        if self._num_ends == 1:
            self._rules.append(r"ANY: /(.|\n)*/")
        self._rules.append(f"{rule}[lazy]: {text} ({' | '.join(map(json.dumps, marks))})")
        split = [self._token_parts(mark) for mark in marks]
        tokens = [f"{text} {' '.join(parts)}" for parts in split if parts[0].startswith("<[")]
        return " | ".join([rule, *tokens])

    def _bare(self, format: CallFormat) -> str:
        if isinstance(format.calls[0], PythonExpression):
            return "python_calls"
        return 'one (SPACE? ";" SPACE? one)*' if self._parallel else "one"

    def _mark(self, text: str) -> str:
        """Return an expression for a text that may contain marks."""
        parts = self._token_parts(text)
        if parts == [json.dumps(text)]:
            return parts[0]
        return f"({json.dumps(text)} | {' '.join(parts)})"

    def _token_parts(self, text: str) -> list[str]:
        """Return the text in pieces; each mark that is a token is replaced by its ID."""
        parts = []
        for part in filter(None, _MARK.split(text)):
            token_id = self._tokenizer.token_to_id(part) if _MARK.fullmatch(part) else None
            parts.append(json.dumps(part) if token_id is None else f"<[{token_id}]>")
        return parts if any(part.startswith("<[") for part in parts) else [json.dumps(text)]

    def _json_objects(self, keys: CallKeys, *, is_bare: bool) -> list[str]:
        shapes: list[Schema] = []
        for names, schema in self._groups():
            head: dict[str, Any] = {keys.id: _NUMBER_ID} if keys.id else {}
            if keys.name:
                head[keys.name] = {"enum": names}
            for key in keys.arguments if keys.name else names:
                place = f"#/anyOf/{len(shapes)}/properties/{key}"
                own = relocate_references(place, _copy(schema))
                shapes.append(_shape(head | {key: own}))
        listed = [{"$ref": f"#/anyOf/{i}"} for i in range(len(shapes))]
        array = {"type": "array", "items": {"anyOf": listed}, "minItems": 1}
        if not self._parallel:
            array["maxItems"] = 1
        # Not `one | list`: llguidance panics where two JSON grammars may begin after a text with a token limit.
        if is_bare:
            self._rules.append(f"one: {json_expression({'anyOf': shapes})}")
        self._rules.append(f"one_or_list: {json_expression({'anyOf': [*shapes, array]})}")
        return ["one_or_list"]

    def _groups(self) -> Iterator[tuple[list[str], Schema]]:
        """Yield the names of functions with the same rules for arguments, and the schema of these."""
        if free := [name for name in self._names if name not in self._schemas]:
            yield free, _ANY_ARGUMENTS
        for name in self._names:
            if name in self._schemas:
                yield [name], self._schemas[name]

    def _python_calls(self) -> list[str]:
        more = '("," SPACE? python_call)*' if self._parallel else ""
        self._rules += [
            f'python_calls: "[" python_call {more} "]"',
            f'python_call: ({any_of(self._names)}) "(" (python_argument ("," " "? python_argument)*)? ")"',
            'python_argument: NAME "=" python_value',
            _PYTHON_VALUES,
        ]
        return ["python_calls"]

    def _named_calls(self, call: NamedCall, closing: str | None) -> list[str]:
        before = f"{self._mark(call.prefix)} " if call.prefix else ""
        after = f" /{call.suffix}/" if call.writes_suffix else ""
        if call.after:
            after += f" {self._mark(call.after)}" + ("?" if call.is_after_optional else "")
        ends = "".join(f" {self._mark(end)}" for end in call.ends)
        arguments = {"arguments": self._names}
        match call.arguments:
            case JsonNotation():
                groups = list(self._groups())
                arguments = {f"arguments_{i}": names for i, (names, _) in enumerate(groups)}
                for rule, (_, schema) in zip(arguments, groups, strict=True):
                    self._rules.append(f"{rule}: {json_expression(_copy(schema))}")
            case GemmaNotation(quote):
                self._gemma_arguments(quote)
            case TaggedNotation(tags):
                arguments = self._tagged_arguments(tags, closing)
            case ElementNotation() as notation:
                self._elements(notation)
        calls = (
            f"{before}({any_of(names)}){after} SPACE? {rule}{ends}"
            for rule, names in arguments.items()
        )
        self._rules.append(f"rest_of_call: {' | '.join(calls)}")
        if not call.before:
            return ["rest_of_call"]
        self._rules.append(f"named: {self._mark(call.before)} rest_of_call")
        return ["named (SPACE? named)*" if self._parallel else "named"]

    def _gemma_arguments(self, quote: str) -> None:
        mark, end = self._mark(quote), self.text_to([quote])
        self._rules += [
            'arguments: "{" (gemma_item ("," gemma_item)*)? "}"',
            'gemma_item: NAME ":" gemma_value',
            f'gemma_value: {mark} ({end}) | NUMBER | "true" | "false" | "null" | arguments | gemma_list',
            'gemma_list: "[" (gemma_value ("," gemma_value)*)? "]"',
            *_PYTHON_VALUES.splitlines()[-2:],
        ]

    def _tagged_arguments(self, tags: Tags, closing: str | None) -> dict[str, list[str]]:
        """Return the rules of arguments between tags, each with the names of its functions."""
        end = f" SPACE? {self._mark(tags.end)}" if tags.end else ""
        start = f"{self._mark(tags.start)} SPACE? " if tags.start else ""
        text = f"({self.text_to([tags.value_end])})"
        rules: dict[str, list[str]] = {}
        free: list[str] = []
        for names, schema in self._groups():
            if (properties := named_properties(schema)) is None:
                free += names
                continue
            required = schema.get("required") or ()
            items = []
            for name, value in properties.items():
                item = self._tagged_item(tags, json.dumps(name), value, text)
                items.append(f"SPACE? {item}" if name in required else f"(SPACE? {item})?")
            rule = f"arguments_{len(rules)}"
            # Otherwise more arguments could follow as text.
            last = end or (f" SPACE? {self._mark(closing)}" if closing else "")
            self._rules.append(f"{rule}: {start}{' '.join(items)}{last}")
            rules[rule] = names
        if free:
            rules["arguments"] = free
            item = self._tagged_item(tags, "KEY", Value(), text)
            self._rules += [
                f"arguments: {start}(argument (SPACE? argument)*)?{end}",
                f"argument: {item}",
                r'KEY: /[^<>"\n]{1,128}/',
            ]
        return rules

    def _tagged_item(self, tags: Tags, key: str, value: Value, text: str) -> str:
        """Return an expression for one argument. `text` is one for any value with the tag after it."""
        kinds = [
            attribute for attribute, is_string in tags.typed if value.is_string in (None, is_string)
        ]
        attributes = f"({any_of(kinds)}) " if kinds else ""
        before = f"SPACE? {self._mark(tags.value_before)} " if tags.value_before else ""
        if value.choices:
            written = f"({any_of(value.choices)})"
        elif value.schema is not None:
            written = f"value_{len(self._rules)}"
            self._rules.append(f"{written}: {json_expression(_copy(value.schema))}")
        else:
            written = ""
        if written:
            text = f"SPACE? {written} SPACE? {self._mark(tags.value_end)}"
        after = self._mark(tags.key_after)
        return f"{self._mark(tags.key_before)} {key} {attributes}{after} {before}{text}"

    def _elements(self, notation: ElementNotation) -> None:
        mark, text = self._mark(notation.mark), self.text_to([notation.mark])
        self._rules += [
            f"arguments: {json.dumps(notation.start)} (SPACE? element)* SPACE? {mark} {json.dumps(notation.end)}",
            f"element: {mark} rest_of_element",
            # A lexer cannot tell empty text before a mark from no text, so all marks end a text.
            f'rest_of_element: "<" NAME ">" ({text}) ("</" NAME ">" | elements)',
            f'elements: rest_of_element (SPACE? element)* SPACE? {mark} "</" NAME ">"',
            r'NAME: /[^<>"\/\n][^<>"\n]{0,127}/',
        ]
