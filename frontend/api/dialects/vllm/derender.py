"""vLLM's `/v1/chat/completions/derender` and `/v1/completions/derender`, which write answers from generated tokens.

They are the counterpart of the render routes: one server renders a request, another one computes its tokens at
`/inference/v1/generate`, and these routes turn the tokens into the answer that the request would have had.

With `stream`, they write one chunk of an answer. The client returns the tokens of the earlier chunks, which are parsed
again, so that any server can write the next chunk.
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
from ...bodies.intake import Intake, RouteHandlers, reads
from ...chats.answer import show_reasoning
from ...generation import PreparedPrompt
from ...logprobs import Json, LogprobsRenderer
from ...numbers import parse_number
from ...prompts import parse_token_ids, verify_num_sequences
from ...routes.chat_completions import render_request
from ...schema import ChatCompletionRequest, CompletionRequest
from ...schema.vllm import (
    VllmChatDerenderRequest,
    VllmCompletionDerenderRequest,
    VllmGenerated,
    VllmGeneratedChoice,
    VllmStreamState,
)
from ...serving import Serving
from ...tools.tool_choice import ToolMode, parse_tool_choice
from .message import Conversation
from .stream_state import Piece, chunk_usage, next_state

T = TypeVar("T", bound=msgspec.Struct)

_PLACEHOLDER: Final = "token_id:"

_SEED_TOKENS: Final = 8
"""Tokens at the end of a prompt that are decoded with the answer, whose first token may continue a character."""


@dataclass(frozen=True, slots=True)
class _Chat(Conversation):
    """A conversation whose answer is decoded here."""

    prompt_ids: list[int] | None
    skips_special: bool


class Derender(RouteHandlers):
    """Makes answers from token ids that the client has generated elsewhere."""

    def __init__(self, serving: Serving, intake: Intake) -> None:
        super().__init__(serving, intake)
        is_strict = serving.config.frontend.strict
        self._chats = make_decoder(ChatCompletionRequest, is_strict)
        self._completions = make_decoder(CompletionRequest, is_strict)

    @reads(VllmChatDerenderRequest)
    async def chat(self, http: Request, body: VllmChatDerenderRequest, size: int) -> Response:
        """Return the chat completion of generated tokens, or one chunk of it."""
        serving, where = self._serving, "generate_chunk" if body.stream else "generate_response"
        serving.verify_model(body.model)
        serving.verify_tokenizer("messages")
        response = getattr(body, where)
        if response is None:
            raise bad_request(where, "is required")
        chat = await self._read_chat(body, response, size)

        def write() -> Json:
            before = self._seed(chat.prompt_ids, "prompt_token_ids")
            if body.stream:
                return self._chat_chunk(chat, response, body, before)
            choices = self._choices(response, where)
            written = [
                self._chat_choice(chat, i, choice, before) for i, choice in enumerate(choices)
            ]
            usage = self._usage(body.prompt_tokens or 0, choices)
            answer = chat.envelope | _prompt_ids(chat.request, response)
            return answer | {"choices": written, "usage": usage} | _rest(response)

        return json_response(await serving.executor.run(size, write))

    async def _read_chat(
        self, body: VllmChatDerenderRequest, response: VllmGenerated, size: int
    ) -> _Chat:
        """Return the request of an answer. Raise APIError 400 if it is invalid."""
        serving = self._serving
        request = await self._decode(self._chats, body.chat_request, "chat_request", size)
        text, prompt_ids = "", body.prompt_token_ids
        with renaming(lambda place: f"chat_request.{place}"):
            tools = await serving.grammar_checks.run(size, parse_tool_choice, request)
            if request.messages:
                rendered = await render_request(serving, request, size)
                text = rendered.text
                prompt_ids = list(rendered.token_ids) if prompt_ids is None else prompt_ids

        shows_special = serving.formats.has_special_reasoning_marks or tools.mode is ToolMode.AUTO
        skips = request.skip_special_tokens is not False and not shows_special
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        envelope = self._envelope(body.model, response, kind)
        prompt = PreparedPrompt(parse_token_ids([0], "", 1), SamplingParams(), text)
        return _Chat(serving, request, tools, prompt, envelope, prompt_ids, skips)

    @reads(VllmCompletionDerenderRequest)
    async def completion(
        self, http: Request, body: VllmCompletionDerenderRequest, size: int
    ) -> Response:
        """Return the completion of generated tokens, or one chunk of it."""
        serving, where = self._serving, "generate_responses"
        serving.verify_model(body.model)
        serving.verify_tokenizer("prompt")
        if body.stream:
            return await self._stream_completion(body, size)
        responses = body.generate_responses or []
        if not responses:
            raise bad_request(where, "is required and must not be empty")
        verify_num_sequences(len(responses), where)
        for name in ("prompt_tokens", "prompt_token_ids"):
            listed = getattr(body, name)
            if listed is not None and (isinstance(listed, int) or len(listed) != len(responses)):
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
                if isinstance(ids, int):
                    raise wrong("prompt_token_ids", "an array of arrays", ids)
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
            counts = body.prompt_tokens if isinstance(body.prompt_tokens, list) else []
            usage = self._usage(sum(counts), every)
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
        self, chat: _Chat, index: int, given: VllmGeneratedChoice, before: list[int]
    ) -> Json:
        stops = chat.request.include_stop_str_in_output
        text = self._text(given, before, chat.skips_special, stops)
        reason = given.finish_reason or "stop"
        delta = Delta(text, list(given.token_ids or ()), None, reason, given.stop_reason)
        return chat.whole_choice(index, delta) | {"logprobs": self._chat_logprobs(given)}

    def _chat_chunk(
        self,
        chat: _Chat,
        response: VllmGenerated,
        body: VllmChatDerenderRequest,
        before: list[int],
    ) -> Json:
        """Return one chunk of a chat, and the state for the next one."""
        state, request = body.stream_state or VllmStreamState(), chat.request
        piece = self._piece(response, state, before, chat.skips_special, request, "chat_request")
        choices: list[Json] = []
        calls = False
        if piece is not None:
            given = piece.choice
            choice = chat.new_choice(given.index or 0)
            if piece.known_ids:
                choice.read(Delta(piece.known_text, piece.known_ids, None, None, None))
            reason = given.finish_reason
            delta = Delta(piece.text, piece.token_ids, None, reason, given.stop_reason)
            found = choice.read(delta)
            fields: Json = {} if state.role_sent else {"role": "assistant"}
            if found.content:
                fields["content"] = found.content
            if found.reasoning:
                fields |= show_reasoning(found)
            if found.tool_calls:
                fields |= choice.calls.pieces(found.tool_calls)
            calls = choice.called_tools
            ending = choice.ending(delta) | {"logprobs": self._chat_logprobs(given)}
            choices.append({"index": given.index or 0, "delta": fields} | ending)
        usage = chunk_usage(response, body.prompt_tokens)
        prompt_ids = _prompt_ids(request, response)
        chunk = chat.envelope | prompt_ids | {"choices": choices} | usage
        return {"chunk": chunk, "stream_state": next_state(state, piece, calls)}

    async def _stream_completion(self, body: VllmCompletionDerenderRequest, size: int) -> Response:
        """Return one chunk of a completion, and the state for the next one."""
        if (response := body.generate_chunk) is None:
            raise bad_request("generate_chunk", "is required with stream true")
        where = "completion_request"
        request = await self._decode(self._completions, body.completion_request, where, size)
        state, prompt_ids = body.stream_state or VllmStreamState(), body.prompt_token_ids
        if any(isinstance(each, list) for each in prompt_ids or ()):
            raise bad_request("prompt_token_ids", "must be an array of tokens with stream=true")
        if isinstance(body.prompt_tokens, list):
            raise wrong("prompt_tokens", "a number with stream=true", body.prompt_tokens)
        num_prompt = body.prompt_tokens

        def write() -> Json:
            before = self._seed(cast(list[int] | None, prompt_ids), "prompt_token_ids")
            skips = request.skip_special_tokens is not False
            piece = self._piece(response, state, before, skips, request, where)
            choices: list[Json] = []
            num_shown = state.logprob_text_offset or 0
            if piece is not None:
                shown = self._completion_logprobs(piece.choice, num_shown)
                num_shown += sum(map(len, shown["tokens"])) if shown else 0
                ending: Json = {"finish_reason": piece.choice.finish_reason}
                ending["stop_reason"] = piece.choice.stop_reason
                found = {"index": piece.choice.index or 0, "text": piece.text, "logprobs": shown}
                choices = [found | ending]
            envelope = self._envelope(body.model, response, "text_completion")
            chunk = envelope | {"choices": choices} | chunk_usage(response, num_prompt)
            following = next_state(state, piece, False) | {"logprob_text_offset": num_shown}
            return {"chunk": chunk, "stream_state": following}

        return json_response(await self._serving.executor.run(size, write))

    def _piece(
        self,
        response: VllmGenerated,
        state: VllmStreamState,
        before: list[int],
        skips_special: bool,
        request: ChatCompletionRequest | CompletionRequest,
        where: str,
    ) -> Piece | None:
        """Return the text of a chunk; None if the chunk has no choice.

        Raises:
            APIError: It has several choices or invalid tokens, or the request has stop strings (400).
        """
        choices = response.choices or []
        if len(choices) > 1:
            raise bad_request(
                "generate_chunk.choices", f"must have at most one choice, got {len(choices)}"
            )
        if request.stop and not request.include_stop_str_in_output:
            raise bad_request(
                f"{where}.stop",
                "cannot be removed from text that was sent; derender the whole answer, or set "
                "include_stop_str_in_output",
            )
        known = list(map(int, state.output_token_ids or ()))
        if known:
            self._verify_ids(known, "stream_state.output_token_ids")
        if not choices:
            return None
        choice = choices[0]
        if choice.token_ids is not None and len(choice.token_ids):
            self._choices(response, "generate_chunk")
        else:
            choice.token_ids = []
        ids = [*known, *map(int, choice.token_ids or ())]
        self._verify_length(len(ids), "stream_state.output_token_ids")
        known_text = self._text_so_far(known, before, skips_special)
        if choice.finish_reason is None or not ids:
            text = self._text_so_far(ids, before, skips_special)
        else:
            text = self._text(
                msgspec.structs.replace(choice, token_ids=ids), before, skips_special, True
            )
        return Piece(choice, known, known_text, text[len(known_text) :])

    def _text_so_far(self, ids: list[int], before: list[int], skips_special: bool) -> str:
        """Return the text of tokens without the bytes of an incomplete last character."""
        choice = VllmGeneratedChoice(token_ids=ids)
        return self._text(choice, before, skips_special, True).rstrip("\ufffd")

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

    def _completion_logprobs(self, choice: VllmGeneratedChoice, offset: int = 0) -> Json | None:
        if choice.logprobs is None:
            return None
        shown: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
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
            token_id = parse_number(token.removeprefix(_PLACEHOLDER))
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


def _prompt_ids(request: ChatCompletionRequest, response: VllmGenerated) -> Json:
    """Return the token ids of the prompt if the request asks for them and the response has them; else {}."""
    if not request.return_token_ids or response.prompt_token_ids is None:
        return {}
    return {"prompt_token_ids": response.prompt_token_ids}


def _rest(response: VllmGenerated | None) -> Json:
    """Return the fields of a response that the answer has unchanged."""
    assert response is not None
    found: Json = {"prompt_logprobs": response.prompt_logprobs}
    found["kv_transfer_params"] = response.kv_transfer_params
    return found if response.metrics is None else found | {"metrics": response.metrics}
