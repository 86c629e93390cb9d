"""Structured outputs of `LLM`, under their names in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ....protocol.errors import ParameterError
from ....protocol.sampling_params import StructuredOutput
from ...api.structured.constraint import parse_structured_outputs
from ...http.errors import APIError


@dataclass
class StructuredOutputsParams:
    """A constraint for `SamplingParams.structured_outputs`, as in vLLM. Exactly one of the first six must be given.

    Attributes:
        json: A JSON schema, or a string that contains one.
        regex: A regular expression that matches the whole text.
        choice: The texts of which the output is one.
        grammar: A grammar in the notation of Lark.
        json_object: True for any JSON object.
        structural_tag: A structural tag, or a string that contains one in JSON.
        disable_any_whitespace: True for JSON without white space between its elements.
        disable_additional_properties: Without effect, because a schema that lists properties allows no others anyway.
        whitespace_pattern: A regular expression for white space between elements of JSON.
        constraint: The constraint in the form that the engine reads.

    Raises:
        ParameterError: No constraint was given, several were, or one is invalid.
    """

    json: dict[str, Any] | str | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: dict[str, Any] | str | None = None
    constraint: StructuredOutput = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.constraint = structured_output(
            json=self.json,
            json_object=self.json_object,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            structural_tag=self.structural_tag,
            disable_any_whitespace=self.disable_any_whitespace,
            whitespace_pattern=self.whitespace_pattern,
        )


def structured_output(
    *,
    json: dict[str, Any] | str | bool | None = None,
    json_object: bool | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    structural_tag: dict[str, Any] | str | None = None,
    disable_any_whitespace: bool = False,
    whitespace_pattern: str | None = None,
) -> StructuredOutput:
    """Return a constraint for `SamplingParams.structured_output`. Exactly one of the first six must be given.

    Args:
        json: A JSON schema, or a string that contains one.
        json_object: True for any JSON object.
        regex: A regular expression that matches the whole text.
        choice: The texts of which the output is one.
        grammar: A grammar in the notation of Lark.
        structural_tag: A structural tag, or a string that contains one in JSON.
        disable_any_whitespace: True for JSON without white space between its elements.
        whitespace_pattern: A regular expression for white space between elements of JSON.

    Raises:
        ParameterError: No constraint was given, several were, or one is invalid.
    """
    given = {
        "json": json,
        "json_object": json_object,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "structural_tag": structural_tag,
    }
    options = {
        "disable_any_whitespace": disable_any_whitespace or None,
        "whitespace_pattern": whitespace_pattern,
    }
    try:
        parsed = parse_structured_outputs(
            {k: v for k, v in (given | options).items() if v is not None}
        )
    except APIError as error:
        param = error.param or "structured_outputs"
        raise ParameterError(param, error.message.removeprefix(f"{param} ")) from None
    if parsed is None:
        raise ParameterError("structured_outputs", f"needs one of {', '.join(given)}")
    return parsed
