"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Final

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.types import Receive

from ....protocol.sampling_params import SamplingParams, StructuredOutput
from ...client.engine_client import RequestGroup
from ...http.errors import bad_request, wrong
from ...http.routing import Asgi
from ..answer import Answer
from ..chats.answer import ChatAnswer
from ..chats.prompt import RenderedChat, find_token_ids, read_token_ids, render_chat
from ..endpoint import Endpoint, NewAnswer
from ..generation import PreparedPrompt
from ..logprobs import Json
from ..prediction import encode_prediction
from ..prompts import fit_context
from ..sampling import sampling_params
from ..schema import ChatCompletionRequest, TokenizeRequest
from ..serving import Serving
from ..structured.constraint import Constraint, allow_calls, parse_constraint
from ..structured.reasoning_control import constraint_after_reasoning, controllable
from ..tools.tool_choice import ToolChoice, ToolMode, parse_tool_choice
from .source_text import read_as_source

EFFORT_TOKENS: Final = {"none": 0, "minimal": 256, "low": 1024, "medium": 8192}
"""`reasoning_effort` -> maximum reasoning tokens, for models whose chat template does not read the effort."""


class ChatPlan(msgspec.Struct, frozen=True):
    """The verified fields of a request, except its conversation.

    `params` are verified, but their `max_tokens` depends on the prompt. `max_reasoning_tokens` is -1 for no limit.
    `after_reasoning` is the constraint on the text after a reasoning that the client may end; None if it may not.
    `allows_text` is true if only the calls in an answer are constrained.
    """

    tools: ToolChoice
    params: SamplingParams
    predicted_token_ids: npt.NDArray[np.int32] | None
    max_reasoning_tokens: int = -1
    after_reasoning: StructuredOutput | None = None
    allows_text: bool = False


class ChatCompletions(Endpoint[ChatCompletionRequest]):
    """The chat completions endpoint.

    `cuts_max_tokens` is true if a request for more tokens than the context has left is reduced instead of rejected.
    """

    body_schema: type[msgspec.Struct] = ChatCompletionRequest
    id_prefix = "chatcmpl"
    cuts_max_tokens: ClassVar[bool] = False
    answer_type: ClassVar[type[ChatAnswer]] = ChatAnswer

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
            is_limited = (
                tools.is_limited or max_reasoning_tokens >= 0 or serving.formats.describes_tools
            )
            verified = await serving.verify_constraint(asked_for, receive)
            constraint = await run(
                body_size, self._constrain_auto, tools, asked_for, verified, is_limited
            )
        params = self._params(request, tools, constraint)
        serving.verify_sampling(params)
        params.structured_output = await serving.verify_constraint(constraint, receive)
        after_reasoning = None
        if request.reasoning_control and serving.formats.can_limit_reasoning:
            given = params.structured_output
            after_reasoning = await constraint_after_reasoning(serving, given, tools, receive)
        predicted = await encode_prediction(serving, request.prediction)
        predicted_or_none = predicted if len(predicted) else None
        return ChatPlan(
            tools,
            params,
            predicted_or_none,
            max_reasoning_tokens,
            after_reasoning,
            allows_text=tools.mode is ToolMode.AUTO and asked_for is None,
        )

    def _max_reasoning_tokens(self, request: ChatCompletionRequest, tools: ToolChoice) -> int:
        """Return the limit of reasoning tokens; -1 for none."""
        serving, limit = self._serving, request.thinking_token_budget
        name = request.sent_name("thinking_token_budget")
        # Clients that use another server's name send it to models without reasoning, too.
        if limit is not None and (
            name == "thinking_token_budget" or serving.formats.can_limit_reasoning
        ):
            return serving.formats.verify_reasoning_limit(limit, name)
        effort = EFFORT_TOKENS.get(request.reasoning_effort or "")
        if effort is None or not serving.formats.can_limit_reasoning:
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
            structured_output=serving.formats.constrain_after_reasoning(
                params.structured_output,
                chat.text,
                plan.max_reasoning_tokens,
                allows_text=plan.allows_text,
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

    async def _reply(self, answer: Answer[Any], group: RequestGroup, asgi: Asgi) -> None:
        prompt = answer.prompt if isinstance(answer, ChatAnswer) else None
        key = asgi.state["owner"], answer.envelope["id"]
        with controllable(self._serving, key, prompt, group):
            await super()._reply(answer, group, asgi)

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        """Return the prompt for a conversation of about `size` characters.

        Raises:
            APIError: The conversation is invalid or too long (400).
        """
        if (given := find_token_ids(request)) is not None:
            return await read_token_ids(self._serving, given)
        return await render_chat(
            self._serving,
            request,
            size,
            tools=plan.tools.shown,
            add_special_tokens=bool(request.add_special_tokens),
            template_kwargs=reasoning_kwargs(request),
        )

    def _constrain_auto(
        self,
        tools: ToolChoice,
        constraint: Constraint | None,
        verified: StructuredOutput | None,
        is_limited: bool,
    ) -> Constraint | None:
        """Return the constraint on an answer that may be text or calls.

        Unless the calls are limited (`is_limited`), only the request's own constraint applies, whose form for the core
        is `verified`.
        """
        if constraint is not None and verified is not None:
            verified = msgspec.structs.replace(verified, is_isolated=False)
            constraint = msgspec.structs.replace(constraint, structured_output=verified)
            return allow_calls(constraint, self._serving.formats.call_rules(tools), tools.parts)
        return self._serving.formats.limit_calls(tools) if is_limited else None

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
            _ = self._serving.formats.call_format  # Raises APIError if there is none.
            # Some models mark calls with special tokens, which the parser must see in the text.
            params.skip_special_tokens = False
        if self._serving.formats.has_special_reasoning_marks:
            params.skip_special_tokens = False
        return params


def reasoning_kwargs(request: ChatCompletionRequest | TokenizeRequest) -> Json:
    """Return the requested reasoning effort under the names that chat templates use.

    An effort also turns reasoning on for templates that do not reason by default, unless `thinking` turns it off.
    """
    # Some clients send an empty effort for none.
    effort, thinking = request.reasoning_effort or None, (request.thinking or {}).get("type")
    kwargs: Json = {} if effort is None else {"reasoning_effort": effort}
    if effort is not None or thinking in ("enabled", "disabled"):
        wanted = effort != "none" and thinking != "disabled"
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
