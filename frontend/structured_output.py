"""Checks a grammar before its request goes to a core, where a bad one would cost other requests time."""

from __future__ import annotations

from ..protocol.errors import ParameterError
from ..protocol.grammar import PARAM, grammar_text, shorten_error
from ..protocol.sampling_params import StructuredOutput


def verify_structured_output(structured_output: StructuredOutput) -> None:
    """Raise ParameterError for a grammar that cannot be compiled, with the reason.

    Takes up to some hundred milliseconds for the largest grammars, during which other threads run.
    """
    try:
        grammar = grammar_text(structured_output)
    except RecursionError:
        raise ParameterError(PARAM, "is nested too deeply") from None
    # Most frontends never see a grammar; they need not load the library.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
    if is_error:
        reason = shorten_error(" ".join(messages))
        kind = structured_output.kind.value
        raise ParameterError(PARAM, f"must be a {kind} that can be compiled, got: {reason}")
