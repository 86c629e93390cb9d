"""SGLang's routes that parse a text which a model has generated elsewhere."""

from __future__ import annotations

from typing import Final, get_args

from starlette.requests import Request
from starlette.responses import Response

from .....protocol.config.frontend import ReasoningParserName
from .....protocol.config.parser_names import (
    REASONING_PARSERS_OF_SGLANG,
    REASONING_PARSERS_OF_VLLM,
    TOOL_CALL_PARSERS_OF_SGLANG,
    TOOL_CALL_PARSERS_OF_VLLM,
)
from ....chat import FORMATS, CallFormat, CallParser, reasoning_parser
from ....http.errors import bad_request, json_response, verify_choice
from ...bodies.intake import RouteHandlers, reads
from ...logprobs import Json
from ...schema import ChatCompletionRequest
from ...schema.sglang import SglangCallsRequest, SglangReasoningRequest
from ...tools.tool_definitions import Tool, parse_tools

_OWN_FORMATS: Final[dict[str, CallFormat]] = {str(name): each for name, each in FORMATS.items()}
_CALL_FORMATS: Final = _OWN_FORMATS | {
    name: _OWN_FORMATS[own]
    for name, own in (TOOL_CALL_PARSERS_OF_SGLANG | TOOL_CALL_PARSERS_OF_VLLM).items()
}
_REASONING_PARSERS: Final = {
    **{name: name for name in get_args(ReasoningParserName)},
    **REASONING_PARSERS_OF_SGLANG,
    **REASONING_PARSERS_OF_VLLM,
}


class SglangParsers(RouteHandlers):
    """The routes that find the tool calls or the reasoning in a text."""

    @reads(SglangCallsRequest)
    async def parse_calls(self, http: Request, body: SglangCallsRequest, size: int) -> Response:
        """Return the calls in a text, and the rest of the text."""
        format = self._find_format(body.tool_call_parser)
        tools = parse_tools(ChatCompletionRequest(tools=body.tools))
        return json_response(
            await self._serving.executor.run(size, _parse_calls, body.text, format, tools)
        )

    @reads(SglangReasoningRequest)
    async def separate_reasoning(
        self, http: Request, body: SglangReasoningRequest, size: int
    ) -> Response:
        """Return the reasoning in a text, and the rest of the text."""
        verify_choice("reasoning_parser", body.reasoning_parser, _REASONING_PARSERS)
        if body.reasoning_parser is None:
            raise bad_request("reasoning_parser", "is required")
        answer = await self._serving.executor.run(size, _separate, body.text, body.reasoning_parser)
        if body.return_blocks:
            reasoning, text = answer["reasoning_text"], answer["text"]
            answer |= {
                "reasoning_blocks": [reasoning] * bool(reasoning),
                "text_blocks": [text] * bool(text),
                "blocks": [{"type": "reasoning", "text": reasoning}] * bool(reasoning)
                + [{"type": "text", "text": text}] * bool(text),
            }
        return json_response(answer)

    def _find_format(self, name: str | None) -> CallFormat:
        """Return the format with this name of SGLang or Engine; without a name, that of the served model.

        Raises:
            APIError: There is no such format (400).
        """
        verify_choice("tool_call_parser", name, _CALL_FORMATS)
        if name is not None:
            return _CALL_FORMATS[name]
        if not self._serving.formats.calls_tools:
            raise bad_request(
                "tool_call_parser", "is required, because this server parses no calls"
            )
        return self._serving.formats.call_format


def _parse_calls(text: str, format: CallFormat, tools: dict[str, Tool]) -> Json:
    parser = CallParser(format, {name: tool.schema for name, tool in tools.items()})
    pieces = [parser.feed(text), parser.finish()]
    positions = {name: position for position, name in enumerate(tools)}
    calls: list[Json] = []
    for delta in (delta for piece in pieces for delta in piece.tool_calls):
        if delta.name is not None:
            position = positions.get(delta.name, -1)
            calls.append({"tool_index": position, "name": delta.name, "parameters": ""})
        calls[-1]["parameters"] += delta.arguments
    return {"normal_text": "".join(piece.content for piece in pieces), "calls": calls}


def _separate(text: str, name: str) -> Json:
    parser = reasoning_parser(_REASONING_PARSERS[name])()
    pieces = [parser.feed(text), parser.finish()]
    return {
        "reasoning_text": "".join(piece.reasoning for piece in pieces),
        "text": "".join(piece.content for piece in pieces),
    }
