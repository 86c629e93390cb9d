"""Structured outputs of `LLM`: constraints under their names in vLLM, checked before a core compiles them."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from ...protocol.errors import ParameterError
from ...protocol.grammars.process import GrammarProcesses
from ...protocol.sampling_params import SamplingParams, StructuredOutput
from ..api.structured.constraint import parse_structured_outputs
from ..client.grammar_checks import GrammarChecks
from ..http.errors import APIError
from .local_engine import LocalEngine


def structured_output(
    *,
    json: dict[str, Any] | str | bool | None = None,
    json_object: bool | None = None,
    regex: str | None = None,
    choice: list[str] | None = None,
    grammar: str | None = None,
    structural_tag: dict[str, Any] | str | None = None,
) -> StructuredOutput:
    """Return a constraint for `SamplingParams.structured_output`. Exactly one argument must be given.

    Args:
        json: A JSON schema, or a string that contains one.
        json_object: True for any JSON object.
        regex: A regular expression that matches the whole text.
        choice: The texts of which the output is one.
        grammar: A grammar in the notation of Lark.
        structural_tag: A structural tag, or a string that contains one in JSON.

    Raises:
        ParameterError: No argument was given, several were, or one is invalid.
    """
    given = {
        "json": json,
        "json_object": json_object,
        "regex": regex,
        "choice": choice,
        "grammar": grammar,
        "structural_tag": structural_tag,
    }
    try:
        parsed = parse_structured_outputs({k: v for k, v in given.items() if v is not None})
    except APIError as error:
        param = error.param or "structured_outputs"
        raise ParameterError(param, error.message.removeprefix(f"{param} ")) from None
    if parsed is None:
        raise ParameterError("structured_outputs", f"needs one of {', '.join(given)}")
    return parsed


StructuredOutputsParams: Final = structured_output
"""vLLM's name of `structured_output`."""


class OfflineGrammars:
    """Checks the grammars of requests in separate processes. The first one starts with the first grammar."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._checks: GrammarChecks | None = None

    async def check(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with the form of their grammar for the core.

        Raises:
            ParameterError: The grammar cannot be compiled.
        """
        output = params.structured_output
        if output is None:
            return params
        if self._checks is None:
            model = self._engine.config.model
            self._checks = GrammarChecks(
                GrammarProcesses(
                    model.verified_tokenizer_path, model.vocab_size, model.eos_token_ids
                ),
                self._engine.client.executor.create_separate(),
                self._engine.client.calls.prepare_grammars,
            )
            self._engine.close_together(self._checks.close)
        verdict = await self._checks.check(output)
        if verdict.problem:
            raise ParameterError("structured_output", verdict.problem)
        return msgspec.structs.replace(params, structured_output=verdict.apply_to(output))
