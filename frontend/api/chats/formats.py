"""The formats in which a model writes tool calls and reasoning, as its endpoints use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, Final

import msgspec

from ....protocol.errors import ParameterError
from ....protocol.sampling_params import GrammarKind, StructuredOutput
from ...chat import (
    CallFormat,
    CallIds,
    CallParser,
    ChatFormats,
    Parameters,
    ReasoningParser,
    call_rules,
    openai_call_id,
    text_or_calls,
)
from ...chat.reasoning import has_special_tokens
from ...http.errors import APIError, bad_request, reject_deep_nesting, wrong
from ...tokenizer.tokenizer import Tokenizer
from ..structured.constraint import Constraint
from ..tools.tool_choice import ToolChoice

ANY_OUTPUT: Final = StructuredOutput(GrammarKind.LARK, "start: TEXT\nTEXT: /(.|\\n)*/")
"""A grammar for any text."""


@contextmanager
def _reject_schemas() -> Iterator[None]:
    """Turn errors about schemas of tools into APIError 400."""
    with reject_deep_nesting("tools"):
        try:
            yield
        except ParameterError as error:
            raise bad_request("tools", error.problem) from None


class AnswerFormats:
    """The formats of a model's tool calls and reasoning: their parsers, and the constraints that they need.

    `describes_tools` is true if the server explains tools to the model, because the chat template does not.
    """

    def __init__(self, formats: ChatFormats, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._call_format = formats.call_format
        self._reasoning_parser = formats.reasoning_parser
        self.describes_tools = formats.describes_tools

    def find_marks(self) -> set[str]:
        """Return the texts with which the model marks reasoning and tool calls."""
        marks: set[str] = set()
        reasoning = self.new_reasoning_parser("")
        if reasoning is not None:
            marks.update(reasoning.marks)
        if self._call_format is not None:
            marks.update(self._call_format.markers)
        return marks

    @property
    def call_format(self) -> CallFormat:
        """The format of the model's tool calls.

        Raises:
            APIError: The server was started without one (400).
        """
        if self._call_format is None:
            raise APIError(
                400,
                "tool_choice auto needs a tool-call parser, but the server was started with "
                "--tool-call-parser none: start it with a parser, or use tool_choice required, none or a "
                "named function",
                param="tools",
            )
        return self._call_format

    @property
    def calls_tools(self) -> bool:
        """True if the model's tool calls have a known format."""
        return self._call_format is not None

    def call_ids(self, seed: str, messages: Sequence[Mapping[str, Any]] | None) -> CallIds:
        """Return the IDs of the calls in one text after `messages`; equal seeds give equal IDs."""

        def find_earlier() -> Iterator[str]:
            # A conversation beside given token ids is not verified.
            for message in messages or ():
                calls = message.get("tool_calls")
                for call in calls if isinstance(calls, list) else ():
                    if isinstance(call, dict) and isinstance(call.get("id"), str):
                        yield call["id"]

        create = self._call_format.new_id if self._call_format else openai_call_id
        return CallIds(create, seed, find_earlier)

    def new_tool_parser(self, functions: Mapping[str, Parameters], call_ids: CallIds) -> CallParser:
        """Return a parser for the calls of these functions in one answer.

        Raises:
            APIError: The server was started without one (400).
        """
        return CallParser(self.call_format, functions, call_ids)

    def call_rules(self, tools: ToolChoice) -> str:
        """Return grammar rules for the model's calls of these tools.

        Raises:
            APIError: No grammar can be written for the schema of a strict tool (400).
        """
        with _reject_schemas():
            return call_rules(
                self.call_format,
                tuple(tools.functions),
                self._tokenizer,
                parallel=tools.is_parallel,
                schemas=tools.schemas,
            )

    def limit_calls(self, tools: ToolChoice) -> Constraint:
        """Return the constraint that allows calls of these tools only.

        Raises:
            APIError: No grammar can be written for the schema of a strict tool (400).
        """
        with _reject_schemas():
            grammar = text_or_calls(
                self.call_format,
                tuple(tools.functions),
                self._tokenizer,
                parallel=tools.is_parallel,
                schemas=tools.schemas,
            )
        output = StructuredOutput(GrammarKind.LARK, grammar)
        return Constraint("tool_choice", output, parts=tools.parts)

    def new_reasoning_parser(
        self, prompt: str, *, constrained: bool = False
    ) -> ReasoningParser | None:
        """Return a reasoning parser for the answer to `prompt`; None if the server was started without one."""
        if self._reasoning_parser is None:
            return None
        return self._reasoning_parser(prompt, constrained=constrained)

    @property
    def separates_reasoning(self) -> bool:
        """True if answers separate reasoning from content."""
        return self._reasoning_parser is not None

    @property
    def has_special_reasoning_marks(self) -> bool:
        """True if special tokens in the text are the only marks of reasoning."""
        parser = self.new_reasoning_parser("")
        return parser is not None and has_special_tokens(parser.marks, self._tokenizer)

    @cached_property
    def can_limit_reasoning(self) -> bool:
        """True if the number of reasoning tokens can be limited."""
        parser = self.new_reasoning_parser("")
        return parser is not None and parser.can_limit(self._tokenizer)

    def verify_reasoning_limit(self, limit: int | None, param: str) -> int:
        """Return the maximum number of reasoning tokens that a field `param` sets; -1 for no limit.

        Raises:
            APIError: The limit is below -1, or the server cannot enforce it (400).
        """
        if limit is None or limit == -1:
            return -1
        if limit < 0:
            raise wrong(param, "at least 0, or -1 for no limit", limit)
        if not self.can_limit_reasoning:
            problem = "needs a model whose end-of-reasoning token is known to the server; omit it"
            raise bad_request(param, problem)
        return limit

    def constrain_after_reasoning(
        self,
        constraint: StructuredOutput | None,
        prompt: str,
        max_tokens: int = -1,
        *,
        allows_text: bool = False,
    ) -> StructuredOutput | None:
        """Return the constraint on the answer to `prompt`, changed so that it applies only after the reasoning.

        If `max_tokens` is not -1, the reasoning has at most `max_tokens` tokens. If the constraint `allows_text` of any
        kind, the answer may end within the reasoning, for example with a call.
        """
        if constraint is None and max_tokens >= 0:
            constraint = ANY_OUTPUT
        if constraint is None or self._reasoning_parser is None:
            return constraint
        parser = self._reasoning_parser(prompt)
        allowed = parser.allow_reasoning_before(constraint, self._tokenizer, max_tokens)
        if not allows_text or allowed.reasoning is None or max_tokens >= 0:
            return allowed
        reasoning = msgspec.structs.replace(allowed.reasoning, is_optional=True)
        return msgspec.structs.replace(allowed, reasoning=reasoning)
