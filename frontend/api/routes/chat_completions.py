"""`POST /v1/chat/completions`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope, Send

from ....protocol.sampling_params import SamplingParams, StructuredOutput
from ...chat import ChatOutputParser, MessageDelta, ToolParser
from ...chat.messages import text_of_content
from ...client.engine_client import Delta, RequestGroup, Sequence
from ...http.errors import bad_request, wrong
from ..answer import Answer, Outputs
from ..chat_prompt import RenderedChat, read_token_ids, render_chat
from ..endpoint import Endpoint, NewAnswer
from ..generation import PreparedPrompt, matched_stop
from ..logprobs import Json
from ..prediction import encode_prediction
from ..prompts import fit_context
from ..receipts.meta_info import choice_meta_info
from ..sampling import sampling_params
from ..schema import ChatCompletionRequest, TokenizeRequest
from ..serving import Serving
from ..streaming.chunks import Chunks
from ..streaming.event_stream import ChunkEncoder
from ..structured.constraint import Constraint, allow_calls, parse_constraint
from ..structured.reasoning_control import constraint_after_reasoning, controllable
from ..tools.call_writer import CallWriter
from ..tools.forced_calls import ForcedCallParser, NamedCall, RequiredCalls
from ..tools.tool_choice import ToolChoice, ToolMode, parse_tool_choice
from .source_text import read_as_source

EFFORT_TOKENS: Final = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}
"""`reasoning_effort` -> maximum reasoning tokens, for models whose chat template does not read the effort."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """The verified fields of a request, except its conversation.

    `params` are verified, but their `max_tokens` depends on the prompt. `max_reasoning_tokens` is -1 for no limit.
    `after_reasoning` is the constraint on the text after a reasoning that the client may end; None if it may not.
    """

    tools: ToolChoice
    params: SamplingParams
    predicted_token_ids: npt.NDArray[np.int32] | None
    max_reasoning_tokens: int = -1
    after_reasoning: StructuredOutput | None = None


class ChatCompletions(Endpoint[ChatCompletionRequest]):
    """The chat completions endpoint.

    `cuts_max_tokens` is true if a request for more tokens than the context has left is reduced instead of rejected.
    """

    body_schema: type[msgspec.Struct] = ChatCompletionRequest
    id_prefix = "chatcmpl"
    cuts_max_tokens: ClassVar[bool] = False

    @property
    def answer_type(self) -> type[ChatAnswer]:
        """The class that writes answers."""
        return ChatAnswer

    def object_name(self, request: ChatCompletionRequest) -> str:
        """Return the value of the response's field `object`."""
        return "chat.completion.chunk" if request.stream else "chat.completion"

    async def prepare(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        """Return the encoded prompts, and the constructor of the answer."""
        plan = await self._plan(request, body_size, receive)
        prompt, new_answer = await self._prepare_conversation(plan, request, body_size)
        return [prompt], new_answer

    async def _plan(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> ChatPlan:
        """Verify everything but the conversation.

        Raises:
            APIError: A field is invalid (400).
            ClientDisconnected: The client disconnected while its constraint was checked.
        """
        serving = self._serving
        serving.verify_tokenizer("messages")
        run = serving.grammar_checks.run
        tools = await run(body_size, parse_tool_choice, request)
        asked_for = await run(body_size, parse_constraint, request)
        constraint = tools.constraint or asked_for
        max_reasoning_tokens = self._max_reasoning_tokens(request, tools)
        if tools.mode is ToolMode.AUTO:
            # A model that was not trained to call tools would write calls that no parser recognizes.
            is_limited = tools.is_limited or max_reasoning_tokens >= 0 or serving.describes_tools
            constraint = await self._constrain_auto(tools, asked_for, receive, is_limited)
        params = self._params(request, tools, constraint)
        serving.verify_sampling(params)
        params.structured_output = await serving.verify_constraint(constraint, receive)
        after_reasoning = None
        if request.reasoning_control and serving.can_limit_reasoning:
            given = params.structured_output
            after_reasoning = await constraint_after_reasoning(serving, given, tools, receive)
        predicted = await encode_prediction(serving, request.prediction)
        predicted_or_none = predicted if len(predicted) else None
        return ChatPlan(tools, params, predicted_or_none, max_reasoning_tokens, after_reasoning)

    def _max_reasoning_tokens(self, request: ChatCompletionRequest, tools: ToolChoice) -> int:
        """Return the limit of reasoning tokens; -1 for none."""
        serving, limit = self._serving, request.thinking_token_budget
        if limit is not None:
            return serving.verify_reasoning_limit(limit, "thinking_token_budget")
        effort = EFFORT_TOKENS.get(request.reasoning_effort or "")
        if effort is None or not serving.can_limit_reasoning:
            return -1
        source = request.chat_template or serving.chat_template(bool(tools.shown)).source
        return -1 if "reasoning_effort" in source else effort

    async def _prepare_conversation(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> tuple[PreparedPrompt, NewAnswer[ChatCompletionRequest]]:
        """Return the prompt for a conversation of about `size` characters."""
        serving, params = self._serving, plan.params
        chat = await self._render(plan, request, size)
        source = serving.config.model.source_text
        chat, params, truncate = read_as_source(chat, params, request, source)
        token_ids, max_tokens = fit_context(
            np.asarray(chat.token_ids, np.int32),
            "messages",
            max_tokens=None if self.cuts_max_tokens else params.max_tokens,
            default_max_tokens=params.max_tokens or serving.default_max_tokens,
            max_tokens_limit=serving.max_tokens_limit,
            truncate=truncate,
            truncation_side=request.truncation_side,
            max_model_len=serving.config.model.max_model_len,
            max_tokens_param=request.sent_name("max_tokens"),
        )
        params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            structured_output=serving.constrain_after_reasoning(
                params.structured_output, chat.text, plan.max_reasoning_tokens
            ),
        )
        if chat.encoder_inputs and len(token_ids) < len(chat.token_ids):
            raise bad_request(
                "truncate_prompt_tokens",
                "cannot cut a prompt with images or audio; send fewer messages",
            )
        prompt = PreparedPrompt(
            token_ids,
            params,
            chat.text,
            plan.predicted_token_ids,
            encoder_inputs=chat.encoder_inputs,
            after_reasoning=plan.after_reasoning,
            video_hashes=chat.video_hashes,
        )
        return prompt, partial(self.answer_type, serving, request, plan.tools, prompt)

    async def _reply(
        self, answer: Answer[Any], group: RequestGroup, scope: Scope, receive: Receive, send: Send
    ) -> None:
        prompt = answer.prompt if isinstance(answer, ChatAnswer) else None
        key = scope["state"]["owner"], answer.envelope["id"]
        with controllable(self._serving, key, prompt, group):
            await super()._reply(answer, group, scope, receive, send)

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        """Return the prompt for a conversation of about `size` characters.

        Raises:
            APIError: The conversation is invalid or too long (400).
        """
        if request.prompt_token_ids is not None:
            return await read_token_ids(self._serving, request)
        return await render_chat(
            self._serving,
            request,
            size,
            tools=plan.tools.shown,
            add_special_tokens=bool(request.add_special_tokens),
            template_kwargs=reasoning_kwargs(request),
        )

    async def _constrain_auto(
        self, tools: ToolChoice, constraint: Constraint | None, receive: Receive, is_limited: bool
    ) -> Constraint | None:
        """Return the constraint on an answer that may be text or calls.

        Unless the callable tools are limited (`is_limited`), only the request's own constraint applies.
        """
        verified = await self._serving.verify_constraint(constraint, receive)
        if constraint is not None and verified is not None:
            verified = msgspec.structs.replace(verified, is_isolated=False)
            constraint = replace(constraint, structured_output=verified)
            rules = self._serving.call_rules(tuple(tools.functions), parallel=tools.is_parallel)
            return allow_calls(constraint, rules)
        if is_limited:
            return self._serving.limit_calls(tuple(tools.functions), parallel=tools.is_parallel)
        return None

    def _params(
        self, request: ChatCompletionRequest, tools: ToolChoice, constraint: Constraint | None
    ) -> SamplingParams:
        if request.top_logprobs and not request.logprobs:
            raise bad_request("top_logprobs", "needs logprobs=true")
        for modality in request.modalities or ():
            if modality != "text":
                raise wrong("modalities", '"text"', modality)
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
            _ = self._serving.call_format  # Raises APIError if there is none.
            # Some models mark calls with special tokens, which the parser must see in the text.
            params.skip_special_tokens = False
        if self._serving.has_special_reasoning_marks:
            params.skip_special_tokens = False
        return params


def reasoning_kwargs(request: ChatCompletionRequest | TokenizeRequest) -> Json:
    """Return the requested reasoning effort under the names that chat templates use."""
    effort, thinking = request.reasoning_effort, (request.thinking or {}).get("type")
    kwargs: Json = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none" or thinking in ("enabled", "disabled"):
        wanted = effort != "none" and thinking == "enabled"
        kwargs |= {"enable_thinking": wanted, "thinking": wanted}
    return kwargs


async def render_request(
    serving: Serving, request: ChatCompletionRequest, size: int
) -> RenderedChat:
    """Return the prompt of a request of about `size` characters that generates nothing.

    Raises:
        APIError: The conversation or its tools are invalid, or the prompt is too long (400).
    """
    tools = await serving.grammar_checks.run(size, parse_tool_choice, request)
    return await render_chat(
        serving, request, size, tools=tools.shown, template_kwargs=reasoning_kwargs(request)
    )


class ChatChoice:
    """One sequence of a chat, and the parsers of its output."""

    def __init__(self, answer: ChatAnswer, index: int) -> None:
        serving, prompt = answer.serving, answer.prompt
        self.index = index
        self._answer = answer
        is_constrained = prompt.params.structured_output is not None
        self._reasoning = None
        if answer.request.separate_reasoning is not False:
            text = prompt.text or ""
            self._reasoning = serving.new_reasoning_parser(text, constrained=is_constrained)
        self._held_reasoning = ""
        self._parser = ChatOutputParser(self._reasoning, self._new_tool_parser(answer.tools))
        self.is_plain = self._reasoning is None and answer.tools.mode is ToolMode.NONE
        self.calls = CallWriter(answer.tools)
        self.called_tools = False
        self._token_ids: list[int] = []

    def _new_tool_parser(self, tools: ToolChoice) -> ToolParser | None:
        # If another frontend continues the stream, the calls must have the same IDs.
        new_id = self._answer.serving.call_ids(f"{self._answer.envelope['id']} {self.index}")
        match tools.mode:
            case ToolMode.NAMED:
                call = NamedCall(tools.name, new_id, is_input=tools.writes_input)
                return ForcedCallParser(call)
            case ToolMode.REQUIRED:
                return ForcedCallParser(RequiredCalls(new_id))
            case ToolMode.AUTO:
                return self._answer.serving.new_tool_parser(tools.functions, new_id)
            case ToolMode.NONE:
                return None

    @property
    def num_reasoning_tokens(self) -> int | None:
        """The number of reasoning tokens; None if reasoning is not separated from content."""
        if self._reasoning is None:
            return None
        return self._reasoning.num_reasoning_tokens(self._token_ids, self._answer.serving.tokenizer)

    def read(self, delta: Delta) -> MessageDelta:
        """Return the message fields that a piece of the text adds: a delta of a stream, or the whole text.

        A call that was cut off has the arguments that the model wrote before.
        """
        is_end = delta.finish_reason is not None
        message = self._parser.feed(delta.text, is_end)
        if self._reasoning is not None:
            self._token_ids += delta.token_ids
            self._show_reasoning(message, is_end=is_end)
        if not self._answer.tools.is_parallel:
            message.tool_calls = [call for call in message.tool_calls if call.index == 0]
        message.tool_calls = self.calls.translate(message.tool_calls, is_end=is_end)
        self.called_tools |= bool(message.tool_calls)
        return message

    def _show_reasoning(self, message: MessageDelta, *, is_end: bool) -> None:
        """Remove the reasoning from a message, or hold it back until it is complete, if the request asks for that."""
        request = self._answer.request
        if request.include_reasoning is False:
            message.reasoning = ""
        elif request.stream_reasoning is False:
            self._held_reasoning += message.reasoning
            message.reasoning = ""
            if is_end or message.content or message.tool_calls:
                message.reasoning, self._held_reasoning = self._held_reasoning, ""

    def ending(self, delta: Delta) -> Json:
        """Return all fields of a choice except its message or delta."""
        request = self._answer.request
        reason = delta.finish_reason
        if reason == "stop" and self.called_tools and self._answer.tools.mode is not ToolMode.NAMED:
            reason = "function_call" if self._answer.tools.is_legacy else "tool_calls"
        choice: Json = {"logprobs": None, "finish_reason": reason, "stop_reason": delta.stop_reason}
        if reason is not None:
            choice["matched_stop"] = matched_stop(delta)
        if request.logprobs and delta.logprobs is not None:
            lists_chosen = bool(request.logprob_token_ids)
            renderer = self._answer.renderer
            choice["logprobs"] = renderer.chat(delta.logprobs, lists_chosen=lists_chosen)
        if request.return_token_ids:
            choice["token_ids"] = delta.token_ids
        elif not request.stream:
            choice["token_ids"] = None
        return choice


class ChatAnswer(Answer[ChatCompletionRequest]):
    """The answer to one conversation, in OpenAI's format. Other dialects override `whole` and `chunks`."""

    shows_abort = True

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        tools: ToolChoice,
        prompt: PreparedPrompt,
        group: Outputs,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        self.tools = tools
        self.role = serving.config.frontend.response_role
        if request.continue_final_message and request.messages:
            self.role = request.messages[-1]["role"]
        self.echoed = _echoed(request, self.role)
        self.prompt = prompt
        self.choices = [ChatChoice(self, i) for i in range(len(group.sequences))]

    def usage(self) -> Json:
        """Return the final usage, including reasoning tokens."""
        counts = [choice.num_reasoning_tokens for choice in self.choices]
        known = [count for count in counts if count is not None]
        counts_of_all = self._count_usage(
            reasoning_tokens=sum(known) if known else None,
            predicts=self.request.prediction is not None,
        )
        return counts_of_all | self.receipt()

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        choices = self.render_choices(
            outputs,
            lambda index, position: self._whole_choice(
                index, self.choices[position], outputs[position]
            ),
        )
        answer = self.envelope | {"choices": choices}
        answer["usage"] = self.usage()
        answer |= {"prompt_logprobs": None, "prompt_token_ids": None}
        if self.request.prompt_logprobs is not None:
            positions = self._group.sequences[0].iterate_prompt_logprobs()
            answer["prompt_logprobs"] = self.renderer.prompt(positions)
        if self.request.return_token_ids:
            answer["prompt_token_ids"] = self.prompt.token_ids.tolist()
        if self.request.return_prompt_text:
            answer["prompt_text"] = self.prompt.text
        return answer | self.timing() | self.transfer() | self.extension()

    def _whole_choice(self, index: int, choice: ChatChoice, output: Delta) -> Json:
        message = self._message(choice, output)
        whole = {"index": index, "message": message} | choice.ending(output)
        if self.request.return_prompt_token_ids:
            whole["prompt_token_ids"] = self.prompt.token_ids.tolist()
        if self.request.return_meta_info:
            sequence = self._group.sequences[choice.index]
            version = self.serving.weight_version(sequence.core_index)
            whole["meta_info"] = choice_meta_info(
                self.envelope["id"], sequence, output, self.renderer, version
            )
        return whole

    def chunks(self) -> ChunkEncoder:
        """Return the encoder that writes the response as stream chunks."""
        return ChatChunks(self).with_progress()

    def _message(self, choice: ChatChoice, output: Delta) -> Json:
        delta = choice.read(output)
        content = self.echoed + delta.content
        message: Json = {"role": self.role, "content": content, "refusal": None}
        if delta.tool_calls:
            message["content"] = content or None
            message |= choice.calls.whole(delta.tool_calls)
        # Clients with reasoning support read these fields even if there is no reasoning.
        return message | (_reasoning(delta) if self.serving.separates_reasoning else {})


def _reasoning(delta: MessageDelta) -> Json:
    """Return the reasoning under both field names that clients read."""
    reasoning = delta.reasoning or None
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _echoed(request: ChatCompletionRequest, role: str) -> str:
    """Return the text that `echo` puts before the answer: the last message, if it has the same role as the answer."""
    if not (request.echo and request.messages) or request.messages[-1].get("role") != role:
        return ""
    return text_of_content(request.messages[-1].get("content"))


class ChatChunks(Chunks[ChatAnswer]):
    """Writes the chunks of a chat."""

    __slots__ = ("_without_role",)
    _empty_choice: ClassVar[Json] = {"delta": {}, "logprobs": None}

    def __init__(self, answer: ChatAnswer) -> None:
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

    def encode(self, sequence: Sequence) -> bytes:
        """Return the events for the new output of a sequence, after the one with its role."""
        if sequence.position not in self._without_role:
            return super().encode(sequence)
        self._without_role.remove(sequence.position)
        return self._opening(sequence.position) + super().encode(sequence)

    def _render(self, sequence: Sequence) -> bytes:
        """Return the chunk with the new output; b"" while the parsers hold it back."""
        delta = self.read(sequence)
        index = sequence.position
        choice = self._answer.choices[index]
        message = choice.read(delta)
        ending = choice.ending(delta)
        has_output = message or delta.finish_reason or ending["logprobs"] or "token_ids" in ending
        if not has_output:
            return b""
        content: Json = {"content": message.content} if message.content else {}
        if message.reasoning:
            content |= _reasoning(message)
        if message.tool_calls:
            content |= choice.calls.pieces(message.tool_calls)
        return self.chunk({"index": index, "delta": content} | ending)

    def _opening(self, index: int) -> bytes:
        """Return the chunk with the role, and the chunk with the echoed text if there is one."""
        answer = self._answer
        # A helper that joins deltas gets the message of a whole answer, which has no content beside forced calls.
        delta = {"role": answer.role, "content": None if answer.tools.constraint else ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        more: Json = {}
        if answer.request.return_token_ids:
            more["prompt_token_ids"] = answer.prompt.token_ids.tolist()
        if answer.request.return_prompt_text:
            more["prompt_text"] = answer.prompt.text
        role = self.chunk(choice, **more)
        if not answer.echoed:
            return role
        return role + self.chunk(choice | {"delta": {"content": answer.echoed}})
