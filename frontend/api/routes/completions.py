"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import cached_property, partial
from itertools import chain
from typing import ClassVar, Final

import msgspec
import numpy as np
from starlette.types import Receive

from ....protocol.sampling_params import SamplingParams
from ...client.encoder_inputs import without_bad_words
from ...client.engine_client import Delta, PositionLogprobs, Sequence
from ...http.errors import APIError, bad_request
from ..answer import PromptAnswer
from ..endpoint import Endpoint, NewAnswer
from ..generation import PreparedPrompt, matched_stop, verify_image
from ..infill import require_infill
from ..inputs.hidden_states import last_states
from ..inputs.prompt_embeds import parse_prompt_embeds
from ..inputs.prompt_media import encode_with_media
from ..logprobs import CompletionLogprobs, Json, LogprobsRenderer
from ..prompts import BYTES_PER_TOKEN_ID, Prompt, fit_context, parse_prompts, verify_num_characters
from ..sampling import sampling_params
from ..schema import UNLIMITED, CompletionRequest
from ..serving import Serving
from ..streaming.chunks import Chunks
from ..streaming.event_stream import ChunkEncoder
from ..structured.constraint import Constraint, parse_constraint
from .source_text import encode_start, source_input

PROMPTS_AT_ONCE: Final = 128
"""Number of prompts that are prepared before other tasks run; takes about 2 ms."""


_ALWAYS_PRESENT: Final = ("token_ids", "prompt_logprobs", "prompt_token_ids")
"""Fields that vLLM's clients expect in every response that is not streamed."""


def _only_scores_prompt(request: CompletionRequest) -> bool:
    """Return whether only the prompt's log-probabilities are requested: `echo` with `max_tokens` 0."""
    return bool(request.echo) and request.max_tokens == 0


class _Choice:
    """One choice of a completion: its sequence and the state of its rendering."""

    def __init__(
        self,
        serving: Serving,
        request: CompletionRequest,
        prompt: PreparedPrompt,
        sequence: Sequence,
        renderer: LogprobsRenderer,
        index: int,
    ) -> None:
        self.index = index
        self._request = request
        self._prompt = prompt
        self._sequence = sequence
        self._renderer = renderer
        self._tokenizer = serving.tokenizer
        self._only_prompt = _only_scores_prompt(request)
        self._is_first = True
        self._logprobs = CompletionLogprobs(
            renderer, serving.tokenizer, prompt.params.skip_special_tokens
        )

    def render(self, delta: Delta) -> Json:
        """Return this choice with the output in `delta`."""
        request, is_first = self._request, self._is_first
        self._is_first = False
        text, token_ids, positions = delta.text, delta.token_ids, delta.logprobs or []
        if self._only_prompt:
            text, token_ids, positions = "", [], []
        choice: Json = {"index": self.index, "text": text, "logprobs": None}
        if request.logprobs is not None:
            choice["logprobs"] = self._logprobs_of(token_ids, positions, is_first)
        if request.echo and is_first:
            choice["text"] = self._prompt_text() + text
        choice["finish_reason"] = delta.finish_reason
        choice["stop_reason"] = delta.stop_reason
        if delta.finish_reason is not None:
            choice["matched_stop"] = matched_stop(delta)
        if self._only_prompt and delta.finish_reason is not None:
            choice |= {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompt.token_ids.tolist()
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._renderer.prompt(
                self._sequence.iterate_prompt_logprobs()
            )
        if not request.stream:
            choice |= last_states(self._sequence)
            for name in _ALWAYS_PRESENT:
                choice.setdefault(name, None)
        return choice

    def _logprobs_of(
        self, token_ids: list[int], positions: Iterable[PositionLogprobs], is_first: bool
    ) -> Json:
        if not (self._request.echo and is_first):
            return self._logprobs.piece(token_ids, positions)
        return self._logprobs.piece(
            token_ids,
            chain(self._sequence.iterate_prompt_logprobs(), positions),
            prompt_token_ids=self._prompt.token_ids.tolist(),
            prompt_text=self._prompt_text(),
        )

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._prompt.token_ids.tolist(), skip_special_tokens=False)


class _Answer(PromptAnswer):
    shows_abort = True

    @cached_property
    def _choices(self) -> dict[int, _Choice]:
        return {}

    def choice(self, position: int) -> _Choice:
        """Return the choice of a sequence, created on first use because there may be thousands."""
        choice = self._choices.get(position)
        if choice is None:
            sequence = self._group.sequences[position]
            prompt = self.prompt_of(sequence)
            choice = self._choices[position] = _Choice(
                self.serving, self.request, prompt, sequence, self.renderer, position
            )
        return choice

    @property
    def shows_prompt(self) -> bool:
        return super().shows_prompt or bool(self.request.echo)

    def usage_so_far(self) -> Json:
        only_prompt = _only_scores_prompt(self.request)
        return self._count_usage(num_completion_tokens=0 if only_prompt else None)

    def add_to_usage(self, usage: Json, num_tokens: int) -> None:
        if not _only_scores_prompt(self.request):
            super().add_to_usage(usage, num_tokens)

    def whole(self, outputs: list[Delta]) -> Json:
        choices = self.render_choices(
            outputs,
            lambda index, position: (
                self.choice(position).render(outputs[position]) | {"index": index}
            ),
        )
        answer = self.envelope | {"choices": choices, "usage": self.usage()}
        return answer | self.timing() | self.transfer() | self.extension()

    def chunks(self) -> ChunkEncoder:
        return _Chunks(self).with_progress()


class _Chunks(Chunks[_Answer]):
    __slots__ = ()
    _empty_choice: ClassVar[Json] = {"text": "", "logprobs": None}

    def __init__(self, answer: _Answer) -> None:
        request = answer.request
        has_more = request.echo or request.logprobs is not None or request.return_token_ids
        super().__init__(answer, None if has_more else (b'"text":"', b'"'))

    def _render(self, sequence: Sequence) -> bytes:
        delta = self.read(sequence)
        return self.chunk(self._answer.choice(sequence.position).render(delta))


class Completions(Endpoint[CompletionRequest]):
    """The completions endpoint.

    `cuts_max_tokens` is true if a request for more tokens than the context has left is reduced instead of rejected.
    """

    body_schema: type[msgspec.Struct] = CompletionRequest
    id_prefix = "cmpl"
    cuts_max_tokens: ClassVar[bool] = False
    default_max_tokens: ClassVar[int] = 16
    """The default of `max_tokens`, as in OpenAI's API."""
    answer_type: ClassVar[type[PromptAnswer]] = _Answer
    object_type = "text_completion"

    async def prepare(
        self, request: CompletionRequest, body_size: int, receive: Receive
    ) -> tuple[list[PreparedPrompt], NewAnswer[CompletionRequest]]:
        """Return the encoded prompts, and the constructor of the answer."""
        serving, model = self._serving, self._serving.config.model
        if not model.has_tokenizer:
            request.return_token_ids = request.return_tokens_as_token_ids = True
        prompts = await self._prompts(request, body_size)
        constraint = await serving.grammar_checks.run(body_size, parse_constraint, request)
        if constraint is not None:
            serving.verify_tokenizer(constraint.param, "use allowed_token_ids")
        params = self._params(request, constraint)
        serving.verify_sampling(params)
        params.structured_output = await serving.verify_constraint(constraint, receive)
        texts = [p for p in prompts if p.text is not None]
        for prompt in texts:
            serving.verify_tokenizer(prompt.param)
            if request.truncate_prompt_tokens is None:
                longest = model.max_model_len
                if model.source_text is not None:
                    longest = model.source_text.max_tokens
                verify_num_characters(len(prompt.text or ""), prompt.param, longest)
        if model.source_text is not None:
            for name in ("suffix", "echo", "prompt_logprobs"):
                if getattr(request, name):
                    raise bad_request(name, "needs a model without an encoder")
            start = await encode_start(request.decoder_prompt, serving, model.source_text)
            for prompt in prompts:
                prompt.start_token_ids = start
        elif request.decoder_prompt is not None:
            raise bad_request("decoder_prompt", "needs a model with an encoder")
        if request.suffix:
            await self._encode_around(request.suffix, prompts, request)
        else:
            texts = [prompt for prompt in texts if prompt.given_media is None]
            has_special = request.add_special_tokens is not False
            encoded = await serving.encode([p.text or "" for p in texts], has_special)
            for prompt, token_ids in zip(texts, encoded, strict=True):
                prompt.token_ids = np.asarray(token_ids, np.int32)
            await encode_with_media(serving, prompts, has_special=has_special)
        prepared: list[PreparedPrompt] = []
        for prompt in prompts:
            prepared.append(self._fit(prompt, request, params))
            if len(prepared) % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return prepared, partial(self.answer_type, serving, request, prepared)

    async def _encode_around(
        self, suffix: str, prompts: list[Prompt], request: CompletionRequest
    ) -> None:
        """Turn each prompt into a fill-in-the-middle prompt with `suffix`."""
        serving = self._serving
        infill = require_infill(serving.infill_format)
        for prompt in prompts:
            if prompt.text is None:
                raise bad_request(prompt.param, "must be a string in a request with suffix")
            if prompt.given_media is not None:
                raise bad_request(prompt.given_media.param, "cannot be combined with suffix")
        for name in ("truncate_prompt_tokens", "echo"):
            if getattr(request, name):
                raise bad_request(name, "cannot be combined with suffix")
        verify_num_characters(len(suffix), "suffix", serving.config.model.max_model_len)
        has_special = request.add_special_tokens is not False

        def encode_all() -> None:
            for prompt in prompts:
                token_ids = infill.encode(
                    serving.tokenizer, prompt.text or "", suffix, add_special_tokens=has_special
                )
                prompt.token_ids = np.asarray(token_ids, np.int32)

        size = sum(len(prompt.text or "") + len(suffix) for prompt in prompts)
        await serving.executor.run(size, encode_all)

    async def _prompts(self, request: CompletionRequest, body_size: int) -> list[Prompt]:
        """Return the prompts, beginning with the ones in `prompt_embeds`."""
        executor, config = self._serving.executor, self._serving.config
        prompts: list[Prompt] = []
        if request.prompt_embeds in ("", []) and not request.prompt:
            message = "Either prompt or prompt_embeds must be provided and non-empty."
            raise APIError(400, message, param="prompt_embeds")
        if request.prompt_embeds is not None:
            for name in ("echo", "prompt_logprobs"):
                if getattr(request, name) not in (None, False):
                    raise bad_request(name, "is not supported with prompt_embeds; leave it out")
            # Hashing and checks run in a thread, because they release the interpreter lock.
            found = await executor.run(
                body_size, parse_prompt_embeds, request.prompt_embeds, config
            )
            prompts = [Prompt(*each[:1], None, each[1], encoder_inputs=each[2]) for each in found]
        if request.prompt_embeds is None or request.prompt not in (None, "", []):
            prompts += await executor.run(
                body_size // BYTES_PER_TOKEN_ID,
                parse_prompts,
                request.prompt,
                config.model.prompt_vocab_size,
            )
        return prompts

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        source, token_ids = self._serving.config.model.source_text, prompt.token_ids
        truncate, inputs = request.truncate_prompt_tokens, prompt.encoder_inputs
        default = self._serving.default_max_tokens
        if self.cuts_max_tokens:
            default = params.max_tokens or default
        elif default is None and request.max_tokens != UNLIMITED:
            default = self.default_max_tokens
        size, has_media = len(token_ids), prompt.given_media is not None
        if has_media and truncate is not None and 0 <= truncate < size:
            raise bad_request(
                "truncate_prompt_tokens",
                f"cannot cut a prompt with images or audio from {size} to {truncate} tokens",
            )
        if inputs:
            truncate = None
        if source is not None and prompt.start_token_ids is not None:
            verify_image(self._serving, inputs)
            inputs = [source_input(prompt, source, truncate, request.truncation_side)]
            token_ids, truncate = prompt.start_token_ids, None
            params = without_bad_words(params, source)
        token_ids, max_tokens = fit_context(
            token_ids,
            prompt.param if request.decoder_prompt is None else "decoder_prompt",
            max_tokens=None if self.cuts_max_tokens else params.max_tokens,
            default_max_tokens=default,
            max_tokens_limit=self._serving.max_tokens_limit,
            truncate=truncate,
            truncation_side=request.truncation_side,
            max_model_len=self._serving.config.model.max_model_len,
            max_tokens_param=request.sent_name("max_tokens"),
        )
        text = prompt.text if len(token_ids) == len(prompt.token_ids) else None
        return PreparedPrompt(
            token_ids,
            msgspec.structs.replace(params, max_tokens=max_tokens),
            text,
            encoder_inputs=inputs,
            video_hashes=prompt.video_hashes,
        )

    def _params(self, request: CompletionRequest, constraint: Constraint | None) -> SamplingParams:
        params = sampling_params(
            request,
            defaults=self._serving.config.frontend.default_sampling,
            vocab_size=self._serving.config.model.vocab_size,
            max_tokens=1 if _only_scores_prompt(request) else request.max_tokens,
            logprobs=request.logprobs,
            constraint=constraint,
        )
        if request.suffix and (infill := self._serving.infill_format) is not None:
            params.stop_token_ids = tuple({*params.stop_token_ids, *infill.end_ids})
        if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = request.logprobs
        return params
