"""`POST /v1/decisions`: the probabilities of the options of questions, each from one token of the model."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from starlette.types import Receive

from ...client.engine_client import Delta
from ...http.errors import bad_request, renamer, renaming
from ...tokenizer.tokenizer import Tokenizer
from ..answer import Answer
from ..bodies.intake import Intake
from ..chats.prompt import RenderedChat
from ..endpoint import NewAnswer
from ..generation import PreparedPrompt
from ..logprobs import Json
from ..routes.chat_completions import ChatCompletions, ChatPlan
from ..schema import ChatCompletionRequest
from ..schema.decisions import DecisionRequest
from ..serving import Serving
from .request import LABELS, DecisionChat, Question, translate, write_conversation

_PROBE = [{"role": "user", "content": "Hi"}]

_rename = renamer({"messages": "input"})


class Decisions(ChatCompletions):
    """The endpoint. All questions of a request share the prefix with its input."""

    body_schema: type[msgspec.Struct] = DecisionRequest
    id_prefix = "decision"

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        self._label_ids: list[int] = []

    async def _translate(self, body: Any, size: int) -> ChatCompletionRequest:
        return await self._serving.executor.run(size, translate, body)

    async def prepare(
        self, request: ChatCompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[ChatCompletionRequest]]:
        """Return the prompt of each question, and the constructor of the answer."""
        assert isinstance(request, DecisionChat)
        plan = await self._plan(request, body_size, receive)
        if not self._label_ids:
            self._label_ids = await self._find_labels(plan, request)
        prompts = []
        for i, question in enumerate(request.questions):
            messages = await self._serving.executor.run(
                body_size, write_conversation, request.items, question, f"questions[{i}]"
            )
            label_ids = tuple(self._label_ids[: len(question.options)])
            params = msgspec.structs.replace(plan.params, logprob_token_ids=label_ids)
            one = msgspec.structs.replace(request, messages=messages)
            with renaming(_rename):
                prompt, _ = await self._prepare_conversation(
                    replace(plan, params=params), one, body_size
                )
            prompts.append(prompt)
            # Many questions must not block other streams.
            await asyncio.sleep(0)
        return prompts, partial(DecisionAnswer, self._serving, request)

    async def _render(
        self, plan: ChatPlan, request: ChatCompletionRequest, size: int
    ) -> RenderedChat:
        """Return the prompt up to the first token of the answer, without reasoning."""
        chat = await super()._render(plan, request, size)
        parser = self._serving.formats.new_reasoning_parser(chat.text)
        start = "" if parser is None else parser.answer_start
        if start:
            token_ids = self._serving.tokenizer.encode(start, False)
            chat = replace(chat, text=chat.text + start, token_ids=[*chat.token_ids, *token_ids])
        return chat

    async def _find_labels(self, plan: ChatPlan, request: DecisionChat) -> list[int]:
        """Return the token id of each label as the first token of an answer.

        Raises:
            APIError: A label is not one token (400).
        """
        probe = msgspec.structs.replace(request, messages=_PROBE)
        chat = await self._render(plan, probe, 0)
        tokenizer = self._serving.tokenizer
        return await self._serving.executor.run(
            len(LABELS) * len(chat.text), _label_ids, tokenizer, chat.text
        )


def _label_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    before = list(tokenizer.encode(prompt, False))
    found = []
    for label in LABELS:
        *start, last = tokenizer.encode(prompt + label, False)
        if start != before:
            # The label joins the last token of the prompt, which is already computed.
            *start, last = tokenizer.encode_output(label)
            if start:
                raise bad_request("model", f"has no token for the label {label!r} of an option")
        found.append(last)
    return found


class DecisionAnswer(Answer[ChatCompletionRequest]):
    """The answers to all questions."""

    request: DecisionChat

    def whole(self, outputs: list[Delta]) -> Json:
        """Return the complete response body."""
        questions = zip(self.request.questions, outputs, strict=True)
        answers = [_answer(*each) for each in questions]
        model = self.envelope["model"]
        return {"model": model, "answers": answers, "usage": self.usage_so_far()}

    def usage_so_far(self) -> Json:
        """Return the usage under the names of the Decisions API."""
        sequences = self._group.sequences
        num_input = sum(sequence.num_prompt_tokens for sequence in sequences)
        num_output = sum(sequence.num_read_tokens for sequence in sequences)
        num_cached = sum(sequence.num_cached_tokens for sequence in sequences)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }


def _answer(question: Question, output: Delta) -> Json:
    """Return the answer to a question.

    `probabilities` are those among the options. `confidence` is the probability of the best option among all tokens.
    """
    body = question.body
    [position] = output.logprobs or ()
    logprobs = np.array([logprob for _, logprob in position.top])
    best = int(logprobs.argmax())
    confidence = float(np.exp(logprobs[best]))
    if confidence:
        logprobs -= np.logaddexp.reduce(logprobs)
        shares: list[float] = np.exp(logprobs).tolist()
    else:
        shares = [1 / len(logprobs)] * len(logprobs)
    answer: Json = {"type": body.type, "name": body.name}
    if body.type == "predicate":
        return answer | {"probability": shares[0]}
    options: list[Json]
    if body.type == "choice":
        options = [{"value": choice.value} for choice in body.choices or ()]
        answer["choice"] = options[best]["value"]
    else:
        levels = body.levels or ()
        options = [{"value": i, "label": level.label} for i, level in enumerate(levels)]
        answer["score"] = sum(i * share for i, share in enumerate(shares))
    with_shares: list[dict[str, Any]] = [
        option | {"probability": share} for option, share in zip(options, shares, strict=True)
    ]
    return answer | {"probabilities": with_shares, "confidence": confidence}
