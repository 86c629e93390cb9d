"""`POST /v1/chat/completions/batch`: several conversations with one set of parameters and one choice each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import msgspec
from starlette.types import Receive

from ...client.engine_client import Delta, RequestGroup, Sequence
from ...http.errors import bad_request, renamer, renaming, wrong
from ...http.json_pieces import encode_list
from ..answer import Answer
from ..endpoint import NewAnswer
from ..generation import PreparedPrompt
from ..logprobs import Json
from ..prompts import verify_num_sequences
from ..schema import BatchChatCompletionRequest, ChatCompletionRequest
from ..serving import Serving
from .chat_completions import ChatCompletions


class ChatBatch(ChatCompletions):
    """Answers conversations without streaming or tools. One invalid conversation fails the whole batch."""

    body_schema = BatchChatCompletionRequest

    async def prepare(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        """Return the encoded prompts, and the constructor of the answer."""
        _verify(request)
        plan = await self._plan(request, body_size, receive)
        prompts: list[PreparedPrompt] = []
        new_answers: list[NewAnswer[ChatCompletionRequest]] = []
        for i, messages in enumerate(request.messages or ()):
            one = msgspec.structs.replace(request, messages=messages)
            with renaming(renamer({"messages": f"messages[{i}]"})):
                prompt, new_answer = await self._prepare_conversation(plan, one, body_size)
            prompts.append(prompt)
            new_answers.append(new_answer)
            # A batch of many conversations must not block other streams.
            await asyncio.sleep(0)
        return prompts, partial(_Answer, self._serving, request, prompts, new_answers)


def _verify(request: ChatCompletionRequest) -> None:
    if not request.messages:
        raise bad_request("messages", "must be an array of conversations, got none")
    verify_num_sequences(len(request.messages), "messages")
    if request.stream:
        raise bad_request("stream", "is not supported for batches; use /v1/chat/completions")
    for name in ("tools", "functions", "prompt_token_ids"):
        if getattr(request, name):
            raise bad_request(name, "is not supported for batches; use /v1/chat/completions")
    if "prompt_token_ids" in (request.kv_transfer_params or {}):
        name = "kv_transfer_params.prompt_token_ids"
        raise bad_request(name, "is not supported for batches; use /v1/chat/completions")
    if request.num_outputs != 1:
        raise wrong("n", "1 for batches", request.num_outputs)


@dataclass(slots=True)
class _Conversation:
    """The sequences of one conversation."""

    sequences: list[Sequence]

    def outputs_by_prompt(self) -> Iterator[list[Sequence]]:
        yield self.sequences


class _Answer(Answer[ChatCompletionRequest]):
    """The answers to all conversations as the choices of one response, in the format of chat completions."""

    def __init__(
        self,
        serving: Serving,
        request: ChatCompletionRequest,
        prompts: list[PreparedPrompt],
        new_answers: list[NewAnswer[ChatCompletionRequest]],
        group: RequestGroup,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        self._num_candidates = prompts[0].params.n
        self._new_answers = new_answers

    def whole(self, outputs: list[Delta]) -> Json:
        choices = encode_list(self._choices(outputs), at_once=1)
        return self.envelope | {"choices": choices, "usage": self.usage()}

    def _choices(self, outputs: list[Delta]) -> Iterator[Json]:
        for i, new_answer in enumerate(self._new_answers):
            part = slice(i * self._num_candidates, (i + 1) * self._num_candidates)
            conversation = _Conversation(self._group.sequences[part])
            answer = new_answer(conversation, self.envelope).whole(outputs[part])
            [choice] = answer["choices"]
            prompt = {name: answer[name] for name in ("prompt_logprobs", "prompt_token_ids")}
            yield choice | {"index": i} | prompt

    def usage_so_far(self) -> Json:
        return self._count_usage(predicts=self.request.prediction is not None)
