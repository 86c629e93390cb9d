"""Parses constraints on the response: `response_format`, `structured_outputs` and other servers' fields."""

from __future__ import annotations

from typing import Any

import msgspec

from ....protocol.grammars.grammar import lark_expression
from ....protocol.grammars.json_schema import lenient, mapping_of, tag_schemas
from ....protocol.sampling_params import GrammarKind, StructuredOutput
from ...http.errors import bad_request, reject_deep_nesting, wrong
from ...http.shown_values import cut
from ..schema import GenerationRequest
from .json_schema import prepare_schema

_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_WHITE_SPACE = "whitespace_pattern"
_NO_WHITE_SPACE = "disable_any_whitespace"
_OPTIONS = ("disable_fallback", "disable_additional_properties", _WHITE_SPACE, _NO_WHITE_SPACE)
_FIELDS = {
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""Field of another server or an earlier release of vLLM -> its name in `structured_outputs`."""

_encode = msgspec.json.Encoder().encode


class Constraint(msgspec.Struct, frozen=True):
    """A constraint on an answer, and the request field that sets it.

    `owner` is the tool that the field belongs to. Each of `parts` is checked separately first, so that an error names
    the part.
    """

    param: str
    structured_output: StructuredOutput
    owner: str = ""
    parts: tuple[Constraint, ...] = ()


def parse_constraint(request: GenerationRequest) -> Constraint | None:
    """Return the constraint of a request; None if it has none.

    Raises:
        APIError: The constraint is invalid, or there are several (400).
    """
    response_format = request.response_format and _from_response_format(request.response_format)
    wanted = {k: v for k, v in (request.structured_outputs or {}).items() if v is not None}
    structured_outputs = parse_structured_outputs(wanted) if wanted else None
    found = {"response_format": response_format, "structured_outputs": structured_outputs}
    for field, name in _FIELDS.items():
        value = getattr(request, field)
        # Clients send "" if they want no constraint.
        found[field] = None if value is None or value == "" else _constraint(name, value, field)
    constraints = [Constraint(field, output) for field, output in found.items() if output]
    if len(constraints) > 1:
        first, second = (constraint.param for constraint in constraints[:2])
        raise bad_request(second, f"cannot be combined with {first}")
    if not constraints:
        return None
    [constraint] = constraints
    pattern, param = request.guided_whitespace_pattern, "guided_whitespace_pattern"
    return Constraint(constraint.param, _with_pattern(constraint.structured_output, pattern, param))


def allow_calls(
    constraint: Constraint, call_rules: str, parts: tuple[Constraint, ...] = ()
) -> Constraint:
    """Return a constraint that also permits tool calls, whose own constraints are `parts`.

    A grammar that the client wrote is returned unchanged, because it can describe calls itself.
    """
    answer = lark_expression(constraint.structured_output)
    if answer is None:
        return constraint
    grammar = f"%llguidance {{}}\nstart: answer | calls\nanswer: {answer}\n{call_rules}"
    output = StructuredOutput(GrammarKind.LARK, grammar)
    return Constraint(constraint.param, output, parts=parts)


def json_schema(schema: object, param: str, *, is_strict: bool = False) -> StructuredOutput:
    """Return the constraint for a JSON schema, given as an object, a boolean, or a string that contains one.

    Raises:
        APIError: The value is not a schema (400).
    """
    with reject_deep_nesting(param):
        if isinstance(schema, str):
            schema = _decode(schema, param)
        if not isinstance(schema, dict | bool):
            raise wrong(param, "a JSON schema (an object)", schema)
        if isinstance(schema, dict):
            schema = prepare_schema(schema, is_strict=is_strict)
            schema = schema if is_strict else lenient(schema)
        return StructuredOutput(GrammarKind.JSON_SCHEMA, _encode(schema).decode())


def _decode(text: str | bytes, param: str) -> Any:
    """Return the decoded JSON. Raise APIError 400 if the text is not valid JSON."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise bad_request(param, f"is not valid JSON: {error}") from None


def _structural_tag(value: dict[str, Any] | str, param: str) -> StructuredOutput:
    """Return the constraint for a structural tag, with its schemas prepared.

    Its format is checked when it is compiled.
    """
    with reject_deep_nesting(param):
        # A copy, because the schemas belong to the request.
        tag = _decode(value if isinstance(value, str) else _encode(value), param)
        for holder, name in tag_schemas(tag):
            holder[name] = lenient(prepare_schema(holder[name], is_strict=False))
        return StructuredOutput(GrammarKind.STRUCTURAL_TAG, _encode(tag).decode())


def _from_response_format(response_format: dict[str, Any]) -> StructuredOutput | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        # llama.cpp's clients send a `schema`, and TGI's a `value`. Without one, any object is valid.
        for name in ("schema", "value"):
            if schema := response_format.get(name):
                return json_schema(schema, f"response_format.{name}")
        return StructuredOutput(GrammarKind.JSON_OBJECT)
    if kind == "json_schema":
        named = response_format.get("json_schema")
        if named is None and "schema" in response_format:
            # The form of SGLang's and llama.cpp's clients.
            is_strict = response_format.get("strict") is True
            return json_schema(
                response_format["schema"], "response_format.schema", is_strict=is_strict
            )
        if not isinstance(named, dict):
            raise wrong("response_format.json_schema", "an object", named)
        if "schema" not in named:
            raise bad_request(
                "response_format.json_schema.schema",
                "is required",
            )
        return json_schema(
            named["schema"],
            "response_format.json_schema.schema",
            is_strict=named.get("strict") is True,
        )
    if kind == "structural_tag":
        return _structural_tag(response_format, "response_format")
    raise wrong("response_format.type", f"one of {', '.join(_FORMATS)}", kind)


def parse_structured_outputs(constraints: dict[str, Any]) -> StructuredOutput | None:
    """Return the constraint of the field `structured_outputs`; None if it has none.

    Raises:
        APIError: The constraint is invalid, or there are several (400).
    """
    for name in constraints:
        if name not in _KINDS and name not in _OPTIONS:
            param = f"structured_outputs.{cut(name)}"
            raise bad_request(param, f"is unknown; use one of {', '.join(_KINDS)}")
    given = [k for k in _KINDS if k in constraints and constraints[k] is not False]
    if len(given) > 1:
        raise bad_request(
            "structured_outputs",
            f"must have exactly one constraint, got {' and '.join(given)}",
        )
    if not given:
        return None
    [name] = given
    output = _constraint(name, constraints[name], f"structured_outputs.{name}")
    pattern = constraints.get(_WHITE_SPACE)
    output = _with_pattern(output, pattern, f"structured_outputs.{_WHITE_SPACE}")
    if constraints.get(_NO_WHITE_SPACE):
        options = {"whitespace_flexible": False}
        return _with_white_space(output, options, f"structured_outputs.{_NO_WHITE_SPACE}")
    return output


def _with_pattern(output: StructuredOutput, pattern: Any, param: str) -> StructuredOutput:
    """Return a constraint to JSON with a pattern for white space; None keeps that of the schema, or the default."""
    if pattern is None:
        return output
    if not isinstance(pattern, str):
        raise wrong(param, "a string", pattern)
    return _with_white_space(output, {_WHITE_SPACE: pattern}, param)


def _with_white_space(
    output: StructuredOutput, options: dict[str, Any], param: str
) -> StructuredOutput:
    """Return a constraint to JSON with options for the white space between two elements.

    Raises:
        APIError: The constraint is not to JSON (400).
    """
    if output.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT):
        raise bad_request(param, "applies only to a constraint to JSON")
    schema: Any = {"type": "object"}
    if output.kind is GrammarKind.JSON_SCHEMA:
        schema = msgspec.json.decode(output.spec)
    if schema is False:
        return output
    schema = {} if schema is True else schema
    guidance = mapping_of(schema.get("x-guidance")) | options
    return StructuredOutput(
        GrammarKind.JSON_SCHEMA, _encode(schema | {"x-guidance": guidance}).decode()
    )


def _constraint(name: str, value: Any, param: str) -> StructuredOutput:
    """Return the constraint called `name` in `structured_outputs`. Errors name the field `param`."""
    if name == "json":
        return json_schema(value, param)
    if name == "json_object":
        return StructuredOutput(GrammarKind.JSON_OBJECT)
    if name == "choice":
        if not (value and isinstance(value, list) and all(isinstance(c, str) for c in value)):
            raise wrong(param, "an array of strings", value)
        return StructuredOutput(GrammarKind.CHOICE, _encode(value).decode())
    if name == "structural_tag" and value and isinstance(value, dict | str):
        return _structural_tag(value, param)
    if not (value and isinstance(value, str)):
        raise wrong(param, "a non-empty string", value)
    return StructuredOutput(GrammarKind(name), value)
