"""vLLM's `/v1/chat/completions/derender` and `/v1/completions/derender`, which write answers from generated tokens.

They are the counterpart of the render routes: one server renders a request, another one computes its tokens at
`/inference/v1/generate`, and these routes turn the tokens into the answer that the request would have had.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .....protocol.sampling_params import SamplingParams
from ....client.engine_client import Delta
from ....http.errors import bad_request, expect, json_response, renaming, wrong
from ...bodies.body import BodyDecoder, make_decoder
from ...bodies.intake import Intake, reads
from ...generation import PreparedPrompt
from ...logprobs import Json, LogprobsRenderer
from ...prompts import parse_token_ids, verify_num_sequences
from ...routes.chat_completions import ChatAnswer, ChatChoice, render_request
from ...schema import ChatCompletionRequest, CompletionRequest
from ...schema.vllm import (
    VllmChatDerenderRequest,
    VllmCompletionDerenderRequest,
    VllmGenerated,
    VllmGeneratedChoice,
)
from ...serving import Serving
from ...tools.tool_choice import ToolChoice, ToolMode, parse_tool_choice

T = TypeVar("T", bound=msgspec.Struct)

_PLACEHOLDER: Final = "token_id:"

_SEED_TOKENS: Final = 8
"""Tokens at the end of a prompt that are decoded with the answer, whose first token may continue a character."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """The request of an answer, as far as the parsers of the answer need it."""

    serving: Serving
    request: ChatCompletionRequest
    tools: ToolChoice
    prompt: PreparedPrompt
    envelope: Json


class Derender:
    """Makes answers from token ids that the client has generated elsewhere."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        self._serving = serving
        self._intake = intake
        is_strict = serving.config.frontend.strict
        self._chats = make_decoder(ChatCompletionRequest, is_strict)
        self._completions = make_decoder(CompletionRequest, is_strict)

    @reads(VllmChatDerenderRequest)
    async def chat(self, http: Request, body: VllmChatDerenderRequest, size: int) -> Response:
        """Return the chat completion of generated tokens."""
        serving, where = self._serving, "generate_response"
        serving.verify_model(body.model)
        serving.verify_tokenizer("messages")
        if body.generate_response is None:
            raise bad_request(where, "is required")
        request = await self._decode(self._chats, body.chat_request, "chat_request", size)
        text, prompt_ids = "", body.prompt_token_ids
        with renaming(lambda place: f"chat_request.{place}"):
            tools = await serving.grammar_checks.run(size, parse_tool_choice, request)
            if request.messages:
                rendered = await render_request(serving, request, size)
                text = rendered.text
                prompt_ids = list(rendered.token_ids) if prompt_ids is None else prompt_ids

        def write() -> Json:
            before = self._seed(prompt_ids, "prompt_token_ids")
            choices = self._choices(body.generate_response, where)
            shows_special = serving.has_special_reasoning_marks or tools.mode is ToolMode.AUTO
            skips = request.skip_special_tokens is not False and not shows_special
            params = SamplingParams()
            envelope = self._envelope(body.model, body.generate_response, "chat.completion")
            prompt = PreparedPrompt(parse_token_ids([0], "", 1), params, text)
            chat = _Chat(serving, request, tools, prompt, envelope)
            written = [
                self._chat_choice(chat, i, choice, before, skips)
                for i, choice in enumerate(choices)
            ]
            usage = self._usage(body.prompt_tokens or 0, choices)
            return envelope | {"choices": written, "usage": usage} | _rest(body.generate_response)

        return json_response(await serving.executor.run(size, write))

    @reads(VllmCompletionDerenderRequest)
    async def completion(
        self, http: Request, body: VllmCompletionDerenderRequest, size: int
    ) -> Response:
        """Return the completion of generated tokens."""
        serving, where = self._serving, "generate_responses"
        serving.verify_model(body.model)
        serving.verify_tokenizer("prompt")
        responses = body.generate_responses or []
        if not responses:
            raise bad_request(where, "is required and must not be empty")
        verify_num_sequences(len(responses), where)
        for name in ("prompt_tokens", "prompt_token_ids"):
            listed = getattr(body, name)
            if listed is not None and len(listed) != len(responses):
                raise bad_request(
                    name, f"must have one entry for each of the {len(responses)} generate_responses"
                )
        given = body.completion_request
        request = await self._decode(self._completions, given, "completion_request", size)

        def write() -> Json:
            written: list[Json] = []
            every: list[VllmGeneratedChoice] = []
            for i, response in enumerate(responses):
                ids = None if body.prompt_token_ids is None else body.prompt_token_ids[i]
                before = self._seed(ids, f"prompt_token_ids[{i}]")
                choices = self._choices(response, f"{where}[{i}]")
                skips = request.skip_special_tokens is not False
                for choice in choices:
                    text = self._text(choice, before, skips, request.include_stop_str_in_output)
                    ending: Json = {"finish_reason": choice.finish_reason}
                    ending["stop_reason"] = choice.stop_reason
                    logprobs = self._completion_logprobs(choice)
                    found = {"index": len(written), "text": text, "logprobs": logprobs}
                    written.append(found | ending)
                every += choices
            envelope = self._envelope(body.model, responses[0], "text_completion")
            usage = self._usage(sum(body.prompt_tokens or ()), every)
            return envelope | {"choices": written, "usage": usage} | _rest(responses[0])

        return json_response(await serving.executor.run(size, write))

    async def _decode(self, decoder: BodyDecoder[T], given: Json | None, name: str, size: int) -> T:
        """Return the request in a field of a body.

        Raises:
            APIError: It is invalid; its fields are named within `name` (400).
        """
        with renaming(lambda place: f"{name}.{place}"):
            return await self._serving.executor.run(
                size, lambda: decoder.decode(msgspec.json.encode(given or {}))
            )

    def _chat_choice(
        self, chat: _Chat, index: int, given: VllmGeneratedChoice, before: list[int], skips: bool
    ) -> Json:
        # The parsers read nothing else of an answer.
        choice = ChatChoice(cast(ChatAnswer, chat), index)
        text = self._text(given, before, skips, chat.request.include_stop_str_in_output)
        reason = given.finish_reason or "stop"
        delta = Delta(text, list(given.token_ids or ()), None, reason, given.stop_reason)
        found = choice.read(delta)
        message: Json = {"role": "assistant", "content": found.content or None, "refusal": None}
        if not found.tool_calls:
            message["content"] = found.content
        else:
            message |= choice.calls.whole(found.tool_calls)
        reasoning = found.reasoning or None
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        ending = choice.ending(delta) | {"logprobs": self._chat_logprobs(given)}
        return {"index": index, "message": message} | ending

    def _choices(self, response: VllmGenerated | None, where: str) -> list[VllmGeneratedChoice]:
        """Return the choices of a response, whose token ids are verified.

        Raises:
            APIError: There are too many, or their tokens are too many or unknown (400).
        """
        choices = (response.choices if response is not None else None) or []
        if not choices:
            raise bad_request(f"{where}.choices", "is required and must not be empty")
        verify_num_sequences(len(choices), f"{where}.choices")
        for i, choice in enumerate(choices):
            place = f"{where}.choices[{i}]"
            # In large bodies they are an array.
            choice.token_ids = [] if choice.token_ids is None else list(map(int, choice.token_ids))
            self._verify_ids(choice.token_ids, f"{place}.token_ids")
            entries = _entries(choice)
            self._verify_length(len(entries), f"{place}.logprobs.content")
            limit = self._serving.config.frontend.max_logprobs
            for entry in entries:
                expect(entry, dict, f"{place}.logprobs.content", "an array of objects")
                top = expect(
                    entry.get("top_logprobs") or [],
                    list,
                    f"{place}.logprobs",
                    "an array of objects",
                )
                # The generated token is listed besides the most likely ones.
                if 0 <= limit < len(top) - 1:
                    raise bad_request(
                        f"{place}.logprobs",
                        f"must have at most {limit} top_logprobs (max_logprobs), got {len(top)}",
                    )
        return choices

    def _verify_ids(self, token_ids: list[int], where: str) -> None:
        self._verify_length(len(token_ids), where)
        parse_token_ids(token_ids, where, self._serving.config.model.vocab_size)

    def _verify_length(self, length: int, where: str) -> None:
        limit = self._serving.config.model.max_model_len
        if length > limit:
            raise wrong(where, f"at most {limit} entries long (max_model_len)", length)

    def _seed(self, token_ids: list[int] | None, where: str) -> list[int]:
        """Return the tokens of a prompt that are decoded with its answer."""
        if token_ids is None:
            return []
        self._verify_ids(token_ids, where)
        return list(map(int, token_ids[-_SEED_TOKENS:]))

    def _text(
        self,
        choice: VllmGeneratedChoice,
        before: list[int],
        skips_special: bool,
        includes_stop: bool | None,
    ) -> str:
        """Return the text of a choice without the end-of-sequence token and the stop string."""
        tokenizer, token_ids = self._serving.tokenizer, list(choice.token_ids or ())
        ends = self._serving.config.model.eos_token_ids
        if choice.finish_reason == "stop" and choice.stop_reason is None and token_ids[-1] in ends:
            token_ids.pop()
        start = len(tokenizer.decode(before, skips_special)) if before else 0
        text = tokenizer.decode([*before, *token_ids], skips_special)[start:]
        if isinstance(choice.stop_reason, str) and not includes_stop:
            text = text.partition(choice.stop_reason)[0]
        return text

    def _chat_logprobs(self, choice: VllmGeneratedChoice) -> Json | None:
        if choice.logprobs is None:
            return None
        return {
            "content": [
                self._entry(entry)
                | {"top_logprobs": [self._entry(top) for top in entry.get("top_logprobs") or ()]}
                for entry in _entries(choice)
            ]
        }

    def _completion_logprobs(self, choice: VllmGeneratedChoice) -> Json | None:
        if choice.logprobs is None:
            return None
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = 0
        for given in _entries(choice):
            entry = self._entry(given)
            shown["tokens"].append(entry["token"])
            shown["token_logprobs"].append(entry["logprob"])
            tops = [self._entry(top) for top in given.get("top_logprobs") or ()]
            shown["top_logprobs"].append({top["token"]: top["logprob"] for top in tops})
            shown["text_offset"].append(offset)
            offset += len(entry["token"])
        return shown

    def _entry(self, entry: Any) -> Json:
        """Return the token of an entry with its text; vLLM names tokens `token_id:N`."""
        fields: Json = expect(entry, dict, "logprobs", "an array of objects")
        token_id, token = fields.get("token_id"), fields.get("token")
        if token_id is None and isinstance(token, str) and token.startswith(_PLACEHOLDER):
            number = token.removeprefix(_PLACEHOLDER)
            token_id = int(number) if number.isdecimal() and len(number) < 10 else None
        logprob = expect(fields.get("logprob"), (int, float), "logprobs", "numbers as logprob")  # type: ignore[arg-type]
        if token_id is None:
            return {"token": str(token), "logprob": logprob, "bytes": fields.get("bytes")}
        parse_token_ids([token_id], "logprobs", self._serving.config.model.vocab_size)
        return LogprobsRenderer(self._serving.tokenizer).chat_token(token_id, logprob)

    def _envelope(self, model: str | None, response: VllmGenerated | None, kind: str) -> Json:
        serving = self._serving
        return {
            "id": response.request_id if response is not None else None,
            "object": kind,
            "created": int(time.time()),
            "model": serving.answering_model(model),
            "system_fingerprint": serving.find_fingerprint(model, None),
        }

    def _usage(self, num_prompt: int, choices: Iterable[VllmGeneratedChoice]) -> Json:
        num_output = sum(len(choice.token_ids or ()) for choice in choices)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }


def _entries(choice: VllmGeneratedChoice) -> list[Any]:
    content = (choice.logprobs or {}).get("content") or []
    entries: list[Any] = expect(content, list, "logprobs.content", "an array")
    return entries


def _rest(response: VllmGenerated | None) -> Json:
    """Return the fields of a response that the answer has unchanged."""
    assert response is not None
    found: Json = {"prompt_logprobs": response.prompt_logprobs}
    found["kv_transfer_params"] = response.kv_transfer_params
    return found if response.metrics is None else found | {"metrics": response.metrics}
