"""SGLang's `/generate`, which completes texts or token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import islice
from typing import Any

import numpy as np
from starlette.types import Receive

from .....protocol.sampling_params import SamplingParams
from ....client.engine_client import Delta, PositionLogprobs, RequestGroup, Sequence
from ....http.errors import bad_request, json_response, renaming, wrong
from ....http.json_pieces import EncodedJSON, encode_list, join_lists
from ....http.routing import Asgi
from ...answer import Answer, PromptAnswer
from ...bodies.intake import Intake
from ...bodies.request_memory import MemoryLease
from ...endpoint import NewAnswer
from ...generation import REQUEST_ID, PreparedPrompt, raise_if_failed, read_outputs, wait_for_end
from ...inputs.hidden_states import all_states
from ...logprobs import Json
from ...prompts import BYTES_PER_TOKEN_ID, Prompt, parse_prompts
from ...receipts.meta_info import TokenEntries, meta_info
from ...routes.completions import Completions
from ...schema import CompletionRequest
from ...schema.sglang import SglangGenerateRequest
from ...serving import Serving
from ...streaming.event_stream import OPENAI_STREAM, ChunkEncoder, event
from ...structured.constraint import Constraint
from .embeds import embedded_prompts
from .request import DEFAULT_MAX_TOKENS, SglangPrompt, assign_ids, translate, verify_repeated
from .sessions import Sessions


def _verify_stream(request: SglangPrompt, prompts: list[PreparedPrompt]) -> None:
    num_tokens = 0
    if (first := request.first_logprob) >= 0:
        num_tokens = sum(max(len(prompt.token_ids) - first, 0) for prompt in prompts)
    verify_repeated(request, num_tokens)


class SglangAnswer(PromptAnswer):
    """The answer to prompts."""

    shows_abort = True

    request: SglangPrompt

    def whole(self, outputs: list[Delta]) -> Any:
        """Return the complete response body: one result, or a list if the request has a list of prompts."""
        sequences = self._group.sequences
        results = (
            self.result(
                sequence,
                output.text,
                output.token_ids,
                output,
                self.prompt_logprobs(sequence) | self.logprobs(sequence, output),
            )
            for sequence, output in zip(sequences, outputs, strict=True)
        )
        if self.request.is_list or len(sequences) > 1:
            return encode_list(results, at_once=1)
        return next(results)

    def chunks(self) -> SglangChunks:
        """Return the encoder of a stream."""
        return SglangChunks(self)

    def result(
        self,
        sequence: Sequence,
        text: str,
        token_ids: list[int],
        newest: Delta,
        logprobs: dict[str, EncodedJSON],
    ) -> Json:
        """Return the result of a sequence with all of its output so far. `newest` is its newest output."""
        request = self.request_of(sequence)
        if request.only_computes_prompt:
            text, token_ids = "", []
        meta = meta_info(
            self.id_of(sequence),
            sequence,
            newest,
            len(token_ids),
            self.serving.weight_version(sequence.core_index),
            only_prompt=request.only_computes_prompt,
        )
        if newest.finish_reason is not None:
            meta |= all_states(sequence)
        meta["reasoning_tokens"] = self._count_reasoning(request, sequence, token_ids)
        result: Json = {"text": text, "output_ids": token_ids, "meta_info": meta | logprobs}
        if request.return_token_ids:
            result["prompt_token_ids"] = self.prompt_of(sequence).token_ids.tolist()
        return result

    def request_of(self, sequence: Sequence) -> SglangPrompt:
        """Return the request for the prompt of a sequence."""
        parts = self.request.parts
        return parts[sequence.position // self.request.num_outputs] if parts else self.request

    def logprobs(self, sequence: Sequence, output: Delta) -> dict[str, EncodedJSON]:
        """Return the lists of log-probabilities of new output, by their names; {} if none are requested."""
        if (positions := output.logprobs) is None:
            return {}
        request = self.request_of(sequence)
        listed = self._listed(request, "output", positions)
        if request.only_computes_prompt:
            # The listed tokens are scored at the position after the prompt.
            return self._lists(request, "output", [], lambda: ()) | listed
        return self._lists(request, "output", output.token_ids, lambda: positions) | listed

    def prompt_logprobs(self, sequence: Sequence) -> dict[str, EncodedJSON]:
        """Return the lists of log-probabilities of the prompt, by their names; {} if none are requested."""
        request = self.request_of(sequence)
        if (first := request.first_logprob) < 0:
            return {}
        prompt = self.prompt_of(sequence).token_ids[first:].tolist()

        def positions() -> Iterator[PositionLogprobs | None]:
            # SGLang's clients expect null for the first token, wherever the list begins.
            yield from [None] * bool(prompt)
            yield from islice(sequence.iterate_prompt_logprobs(), first + 1, None)

        return self._lists(request, "input", prompt, positions) | self._listed(
            request, "input", positions()
        )

    def _count_reasoning(
        self, request: SglangPrompt, sequence: Sequence, token_ids: list[int]
    ) -> int:
        """Return the number of tokens to the end of the reasoning; 0 unless the request asks for it."""
        if not request.requires_reasoning:
            return 0
        text = self.prompt_of(sequence).text or ""
        parser = self.serving.formats.new_reasoning_parser(text, constrained=False)
        if parser is None:
            return 0
        count = parser.num_reasoning_tokens(token_ids, self.serving.tokenizer)
        # SGLang counts the token that ends the reasoning.
        return count + (0 < count < len(token_ids))

    def id_of(self, sequence: Sequence) -> str:
        """Return the ID of the answer with the output of a sequence."""
        prompt, output = divmod(sequence.position, self.request.num_outputs)
        own_id = self.envelope["id"] + (f"_{prompt}" if prompt else "")
        chosen = self.request.request_ids[prompt] if self.request.request_ids else own_id
        return chosen + (f"_{output}" if output else "")

    def _lists(
        self,
        request: SglangPrompt,
        kind: str,
        token_ids: list[int],
        positions: Callable[[], Iterable[PositionLogprobs | None]],
    ) -> dict[str, EncodedJSON]:
        pairs = zip(token_ids, positions(), strict=True)
        lists = {f"{kind}_token_logprobs": self._token_entries.chosen(pairs)}
        if num_top := request.logprobs:
            tops = self._token_entries.others(positions(), slice(num_top))
            lists[f"{kind}_top_logprobs"] = tops
        return lists

    def _listed(
        self, request: SglangPrompt, kind: str, positions: Iterable[PositionLogprobs | None]
    ) -> dict[str, EncodedJSON]:
        """Return the log-probabilities of the tokens that the request lists."""
        if not request.logprob_token_ids:
            return {}
        listed = slice(request.logprobs, None)
        return {f"{kind}_token_ids_logprobs": self._token_entries.others(positions, listed)}

    @cached_property
    def _token_entries(self) -> TokenEntries:
        return TokenEntries(self.renderer, shows_text=self.request.return_text_in_logprobs)


class SglangChunks(ChunkEncoder):
    """Writes the events of an answer. Each has all output so far, as in SGLang."""

    format = OPENAI_STREAM

    def __init__(self, answer: SglangAnswer) -> None:
        self._answer = answer
        self._outputs: dict[int, tuple[str, list[int], dict[str, EncodedJSON]]] = {}
        self._finish_reasons: dict[int, str] = {}

    def ended(self, position: int) -> Delta | None:
        """Return the whole output of the sequence at a position; None if it has not ended."""
        if position not in self._finish_reasons:
            return None
        text, token_ids, _ = self._outputs[position]
        return Delta(text, token_ids, finish_reason=self._finish_reasons[position])

    def encode(self, sequence: Sequence) -> bytes:
        """Return the event for the new output."""
        position = sequence.position
        answer = self._answer
        text, token_ids, lists = self._outputs.get(position, ("", [], {}))
        delta = sequence.read_some()
        raise_if_failed(delta, shows_abort=True)
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        if position not in self._outputs:
            lists = answer.prompt_logprobs(sequence)
        text, token_ids = text + delta.text, token_ids + delta.token_ids
        for name, new in answer.logprobs(sequence, delta).items():
            lists[name] = join_lists([lists[name], new]) if name in lists else new
        self._outputs[position] = text, token_ids, lists
        if delta.finish_reason is not None:
            self._finish_reasons[position] = delta.finish_reason
        result = answer.result(sequence, text, token_ids, delta, lists)
        return event(result if answer.num_sequences == 1 else result | {"index": position})


class SglangGenerate(Completions):
    """The endpoint that completes texts or token ids.

    A request within a session is stored before its client receives the end.
    """

    body_schema = SglangGenerateRequest
    default_max_tokens = DEFAULT_MAX_TOKENS
    answer_type = SglangAnswer

    def __init__(self, serving: Serving, intake: Intake, sessions: Sessions) -> None:
        super().__init__(serving, intake)
        self._sessions = sessions

    async def receive(self, asgi: Asgi, lease: MemoryLease) -> tuple[CompletionRequest, int]:
        """Return the request and the size of its body in bytes.

        Raises:
            APIError: The body is too large or invalid, or its session does not exist (4xx).
        """
        body, size = await self._intake.receive(asgi, SglangGenerateRequest, lease)
        request = translate(body)
        if body.session_params is not None:
            owner = asgi.state["owner"]
            request.turn = await self._sessions.find_turn(body.session_params, request, owner)
        return request, size

    async def prepare(
        self, request: CompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[CompletionRequest]]:
        """Return the encoded prompts, and the constructor of the answer."""
        assert isinstance(request, SglangPrompt)
        prompts, new_answer = await self._prepare_parts(request, body_size, receive)
        assign_ids(request, len(prompts))
        if request.rid is None:
            for i, (prompt, own_id) in enumerate(zip(prompts, request.request_ids, strict=False)):
                if not REQUEST_ID.fullmatch(own_id):
                    raise wrong(f"rid[{i}]", "1 to 128 visible ASCII characters", own_id)
                prompt.request_id = own_id
        return prompts, new_answer

    async def _prepare_parts(
        self, request: SglangPrompt, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[CompletionRequest]]:
        if not request.parts:
            prompts, new_answer = await super().prepare(request, body_size, receive)
            _verify_stream(request, prompts)
            return prompts, new_answer
        prompts, size = [], body_size // len(request.parts)
        with self._serving.request_memory.lease() as lease:
            for part in request.parts:
                with renaming(part.sent_name):
                    [prompt], _ = await super().prepare(part, size, receive)
                with renaming(lambda name, place=part.place: f"lora_path{place}"):  # type: ignore[misc]
                    prompt.lora = self._serving.find_lora(part.model)
                prompt.cache_salt = part.cache_salt
                _verify_stream(part, [prompt])
                prompts.append(prompt)
                lease.count_media(prompt.num_image_bytes)
                await asyncio.sleep(0)
        return prompts, partial(self.answer_type, self._serving, request, prompts)

    async def reply(
        self, answer: Answer[CompletionRequest], group: RequestGroup, asgi: Asgi
    ) -> None:
        """Answer a request within a session."""
        assert isinstance(answer, SglangAnswer)
        prompt = answer.prompt_of(sequence := group.sequences[0])
        turn, rid = answer.request.turn, answer.id_of(sequence)

        async def save(output: Delta) -> None:
            await self._sessions.save_turn(turn, rid, prompt.token_ids, output)

        if answer.request.stream:
            chunks = answer.chunks()

            async def before_end() -> None:
                if (output := chunks.ended(sequence.position)) is not None:
                    await save(output)

            await self._stream(asgi).run(asgi.receive, group, chunks, before_end)
            return
        await wait_for_end(group, asgi.receive)
        outputs = read_outputs(group, shows_abort=True)
        await save(outputs[0])
        await json_response(answer.whole(outputs))(*asgi)

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        assert isinstance(request, SglangPrompt)
        if request.turn is not None and len(history := request.turn.history):
            is_text, new = prompt.text is not None, prompt.token_ids
            if is_text and len(new) and new[0] == self._serving.tokenizer.bos_token_id:
                new = new[1:]
            prompt.token_ids, prompt.text = np.concatenate((history, new)), None
        prepared = super()._fit(prompt, request, params)
        if request.first_logprob > (num_tokens := len(prepared.token_ids)):
            allowed = f"at most {num_tokens}, the number of tokens of the prompt"
            raise wrong("logprob_start_len", allowed, request.first_logprob)
        return prepared

    def _params(self, request: CompletionRequest, constraint: Constraint | None) -> SamplingParams:
        assert isinstance(request, SglangPrompt)
        params = super()._params(request, constraint)
        # Listed tokens do not replace the most likely ones.
        params.logprobs = request.logprobs
        if request.first_logprob >= 0:
            params.prompt_logprobs = request.num_prompt_tops
            params.prompt_logprob_token_ids = params.logprob_token_ids
        return params

    async def _prompts(self, request: CompletionRequest, body_size: int) -> list[Prompt]:
        assert isinstance(request, SglangPrompt)
        executor, config = self._serving.executor, self._serving.config
        if request.embeds is not None:
            if request.first_logprob >= 0:
                raise bad_request("logprob_start_len", "cannot be used with input_embeds")
            return await executor.run(body_size, embedded_prompts, request, config)
        prompts = await executor.run(
            body_size // BYTES_PER_TOKEN_ID,
            parse_prompts,
            request.prompt,
            config.model.prompt_vocab_size,
            request.prompts_param,
        )
        for prompt in prompts:
            prompt.given_media = request.media
        return prompts
