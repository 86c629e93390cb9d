"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from ...protocol.errors import ParameterError
from ...protocol.sampling_params import SamplingParams
from ..chat import ChatOutputParser, MessageDelta, ToolCallDelta, ToolParser
from ..engine_client import Delta, RequestGroup, Sequence
from .answer import Answer
from .chat_prompt import render_chat
from .chunks import Chunks
from .endpoint import Endpoint, NewAnswer
from .errors import bad_request, echo, renamed
from .event_stream import ChunkEncoder
from .forced_calls import ForcedCallParser, NamedCall, RequiredCalls
from .generation import (
    PreparedPrompt,
    raise_if_failed,
)
from .logprobs import Json
from .prompts import fit_context
from .sampling import sampling_params
from .schema import ChatCompletionRequest
from .serving import Serving
from .structured import Constraint, constraint_of, or_calls
from .tool_choice import ToolChoice, ToolMode, parse_tool_choice


class ChatCompletions(Endpoint[ChatCompletionRequest]):
    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, ChatCompletionRequest, "chatcmpl")

    def _object_name(self, request: ChatCompletionRequest) -> str:
        return "chat.completion.chunk" if request.stream else "chat.completion"

    async def _prepare(
        self, request: ChatCompletionRequest, body_size: int
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        serving = self._serving
        run = serving.off_loop.run
        tools = await run(body_size, parse_tool_choice, request)
        asked_for = await run(body_size, constraint_of, request)
        constraint = tools.constraint or asked_for
        if constraint and tools.mode is ToolMode.AUTO:
            parallel = request.parallel_tool_calls is not False
            constraint = or_calls(constraint, serving.call_rules(tools.names, parallel=parallel))
        params = self._params(request, tools, constraint)
        self._verify(params, request)
        await serving.verify_constraint(constraint)
        chat = await render_chat(
            serving,
            request,
            body_size,
            add_special_tokens=bool(request.add_special_tokens),
            with_tools=tools.mode is not ToolMode.NONE,
            template_kwargs=_reasoning_kwargs(request),
        )
        token_ids, max_tokens = fit_context(
            np.array(chat.token_ids, np.int32),
            "messages",
            max_tokens=params.max_tokens,
            max_tokens_limit=serving.max_tokens_limit,
            truncate=request.truncate_prompt_tokens,
            max_model_len=serving.config.model.max_model_len,
            max_tokens_param=_max_tokens_param(request),
        )
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            structured_output=serving.leave_reasoning_free(params.structured_output, chat.text),
        )
        prompt = PreparedPrompt(token_ids, params, chat.text)
        return [prompt], partial(_Answer, serving, request, tools, prompt)

    def _params(
        self, request: ChatCompletionRequest, tools: ToolChoice, constraint: Constraint | None
    ) -> SamplingParams:
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs", "top_logprobs needs logprobs=true")
        for modality in request.modalities or ():
            if modality != "text":
                raise bad_request("modalities", f"modalities must be text, got {echo(modality)}")
        max_tokens = request.max_completion_tokens
        params = sampling_params(
            request,
            defaults=self._serving.config.frontend.default_sampling,
            vocab_size=self._serving.config.model.vocab_size,
            max_tokens=request.max_tokens if max_tokens is None else max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            constraint=constraint,
        )
        if tools.mode is ToolMode.AUTO:
            # There must be a parser. What it looks for are special tokens of some models.
            self._serving.new_tool_parser()
            params.skip_special_tokens = False
        if self._serving.has_special_reasoning_marks:
            params.skip_special_tokens = False
        return params

    def _verify(self, params: SamplingParams, request: ChatCompletionRequest) -> None:
        """Raises APIError 400, in the names that this endpoint uses."""
        try:
            self._serving.verify_sampling(params)
        except ParameterError as error:
            names = {"max_tokens": _max_tokens_param(request), "logprobs": "top_logprobs"}
            raise renamed(error, names.get(error.param, error.param)) from None


def _reasoning_kwargs(request: ChatCompletionRequest) -> Json:
    """How much reasoning is asked for, in the names that templates know."""
    effort, thinking = request.reasoning_effort, (request.thinking or {}).get("type")
    kwargs: Json = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" or thinking in ("enabled", "disabled"):
        wanted = effort != "none" and thinking == "enabled"
        kwargs |= {"enable_thinking": wanted, "thinking": wanted}
    return kwargs


def _max_tokens_param(request: ChatCompletionRequest) -> str:
    return "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"


class _Choice:
    """One sequence on its way to the client."""

    def __init__(self, answer: _Answer, index: int) -> None:
        serving, prompt = answer.serving, answer.prompt
        self.index = index
        self._answer = answer
        is_constrained = prompt.params.structured_output is not None
        self._reasoning = serving.new_reasoning_parser(
            prompt.text or "", constrained=is_constrained
        )
        self._parser = ChatOutputParser(self._reasoning, self._new_tool_parser(answer.tools))
        self.is_plain = self._reasoning is None and answer.tools.mode is ToolMode.NONE
        self._called_tools = False
        self._token_ids: list[int] = []

    def _new_tool_parser(self, tools: ToolChoice) -> ToolParser | None:
        new_id = self._answer.serving.new_call_id
        match tools.mode:
            case ToolMode.NAMED:
                return ForcedCallParser(NamedCall(tools.name, new_id))
            case ToolMode.REQUIRED:
                return ForcedCallParser(RequiredCalls(new_id))
            case ToolMode.AUTO:
                return self._answer.serving.new_tool_parser()
            case ToolMode.NONE:
                return None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """None where reasoning is not told from content."""
        if self._reasoning is None:
            return None
        return self._reasoning.num_reasoning_tokens(self._token_ids, self._answer.serving.tokenizer)

    def read(self, delta: Delta) -> MessageDelta:
        message = self._parser.feed(delta.text, delta.finish_reason is not None)
        if self._reasoning is not None:
            self._token_ids += delta.token_ids
            if self._answer.request.include_reasoning is False:
                message.reasoning = ""
        if self._answer.request.parallel_tool_calls is False:
            message.tool_calls = [call for call in message.tool_calls if call.index == 0]
        self._called_tools |= bool(message.tool_calls)
        return message

    def ending(self, delta: Delta) -> Json:
        """Everything of a choice but its message or delta."""
        request = self._answer.request
        reason = delta.finish_reason
        if (
            reason == "stop"
            and self._called_tools
            and self._answer.tools.mode is not ToolMode.NAMED
        ):
            reason = "tool_calls"
        choice: Json = {"logprobs": None, "finish_reason": reason, "stop_reason": delta.stop_reason}
        if request.logprobs and delta.logprobs is not None:
            choice["logprobs"] = self._answer.renderer.chat(delta.logprobs)
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return choice


class _Answer(Answer[ChatCompletionRequest]):
    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        tools: ToolChoice,
        prompt: PreparedPrompt,
        group: RequestGroup,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        self.tools = tools
        self.role = serving.config.frontend.response_role
        if request.continue_final_message and request.messages:
            self.role = request.messages[-1]["role"]
        self.prompt = prompt
        self.choices = [_Choice(self, i) for i in range(len(group.sequences))]

    def usage(self) -> Json:
        """The final count, reasoning included."""
        counts = [choice.num_reasoning_tokens for choice in self.choices]
        known = [count for count in counts if count is not None]
        return self._count_usage(reasoning_tokens=sum(known) if known else None)

    def whole(self, outputs: list[Delta]) -> Json:
        answer = self.envelope | {
            "choices": [
                {"index": choice.index, "message": self._message(choice.read(output))}
                | choice.ending(output)
                for choice, output in zip(self.choices, outputs, strict=True)
            ]
        }
        answer["usage"] = self.usage()
        if self.request.prompt_logprobs is not None:
            prompt_logprobs = self._group.sequences[0].prompt_logprobs or []
            answer["prompt_logprobs"] = self.renderer.prompt(prompt_logprobs)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompt.token_ids.tolist()
        return answer

    def chunks(self) -> ChunkEncoder:
        return _Chunks(self)

    def _message(self, delta: MessageDelta) -> Json:
        message: Json = {"role": self.role, "content": delta.content, "refusal": None}
        if delta.tool_calls:
            message["content"] = delta.content or None
            message["tool_calls"] = _whole_calls(delta.tool_calls)
        # Clients that know of reasoning read it whether there was any or not.
        return message | (_reasoning(delta) if self.serving.tells_reasoning else {})


def _reasoning(delta: MessageDelta) -> Json:
    """Under both names that clients look for."""
    reasoning = delta.reasoning or None
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _whole_calls(deltas: list[ToolCallDelta]) -> list[Json]:
    calls: dict[int, Json] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def _call_pieces(deltas: list[ToolCallDelta]) -> list[Json]:
    """One piece a call, since some clients look at the first only."""
    pieces: dict[int, Json] = {}
    for delta in deltas:
        piece = pieces.setdefault(delta.index, {"index": delta.index})
        function = piece.setdefault("function", {})
        if delta.name is not None:
            piece |= {"id": delta.id, "type": "function"}
            function["name"] = delta.name
        function["arguments"] = function.get("arguments", "") + delta.arguments
    return list(pieces.values())


class _Chunks(Chunks[_Answer]):
    __slots__ = ("_without_role",)

    def __init__(self, answer: _Answer) -> None:
        request = answer.request
        super().__init__(
            answer,
            len(answer.choices),
            is_plain=answer.choices[0].is_plain
            and not (request.logprobs or request.return_token_ids),
            before=b'"delta":{"content":',
            after=b"}",
        )
        self._without_role = set(range(len(answer.choices)))

    def encode(self, news: list[Sequence]) -> bytes:
        body = super().encode(news)
        if self._without_role:
            begun = self._without_role.intersection(sequence.position for sequence in news)
            self._without_role -= begun
            body = b"".join(map(self._role_chunk, sorted(begun))) + body
        return body

    def _render(self, sequence: Sequence) -> bytes:
        """The chunk of what parsers make of the news, b"" while they hold it back."""
        delta = sequence.read()
        raise_if_failed(delta)
        index = sequence.position
        choice = self._answer.choices[index]
        message = choice.read(delta)
        ending = choice.ending(delta)
        is_heard = message or delta.finish_reason or ending["logprobs"] or "token_ids" in ending
        if not is_heard:
            return b""
        content: Json = {"content": message.content} if message.content else {}
        if message.reasoning:
            content |= _reasoning(message)
        if message.tool_calls:
            content["tool_calls"] = _call_pieces(message.tool_calls)
        return self.chunk({"index": index, "delta": content} | ending)

    def _role_chunk(self, index: int) -> bytes:
        delta = {"role": self._answer.role, "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        if self._answer.request.return_token_ids:
            return self.chunk(choice, prompt_token_ids=self._answer.prompt.token_ids.tolist())
        return self.chunk(choice)
