"""`POST /v1/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np

from ...protocol.sampling_params import SamplingParams
from ..engine_client import Delta, RequestGroup, Sequence
from .answer import Answer
from .chunks import Chunks
from .endpoint import Endpoint, NewAnswer
from .event_stream import ChunkEncoder
from .generation import (
    PreparedPrompt,
    raise_if_failed,
)
from .logprobs import CompletionLogprobs, Json, LogprobsRenderer
from .prompts import Prompt, fit_context, parse_prompts, verify_characters
from .sampling import sampling_params
from .schema import CompletionRequest
from .serving import Serving
from .structured import Constraint, constraint_of

DEFAULT_MAX_TOKENS = 16


class Completions(Endpoint[CompletionRequest]):
    def __init__(self, serving: Serving) -> None:
        super().__init__(serving, CompletionRequest, "cmpl")

    def _object_name(self, request: CompletionRequest) -> str:
        return "text_completion"

    async def _prepare(
        self, request: CompletionRequest, body_size: int
    ) -> tuple[list[PreparedPrompt], NewAnswer[CompletionRequest]]:
        serving, model = self._serving, self._serving.config.model
        prompts = parse_prompts(request.prompt, model.vocab_size)
        constraint = await serving.off_loop.run(body_size, constraint_of, request)
        params = self._params(request, constraint)
        serving.verify_sampling(params)
        await serving.verify_constraint(constraint)
        texts = [p for p in prompts if p.text is not None]
        for prompt in texts:
            if request.truncate_prompt_tokens is None:
                verify_characters(prompt.text or "", prompt.param, model.max_model_len)
        encoded = await serving.encode(
            [p.text or "" for p in texts], request.add_special_tokens is not False
        )
        for prompt, token_ids in zip(texts, encoded, strict=True):
            prompt.token_ids = np.array(token_ids, np.int32)
        prepared = [self._fit(prompt, request, params) for prompt in prompts]
        return prepared, partial(_Answer, serving, request, prepared)

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        token_ids, max_tokens = fit_context(
            prompt.token_ids,
            prompt.param,
            max_tokens=params.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            max_tokens_limit=self._serving.max_tokens_limit,
            truncate=request.truncate_prompt_tokens,
            max_model_len=self._serving.config.model.max_model_len,
        )
        text = prompt.text if len(token_ids) == len(prompt.token_ids) else None
        return PreparedPrompt(
            token_ids, msgspec.structs.replace(params, max_tokens=max_tokens), text
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
        if request.echo and request.logprobs is not None and params.prompt_logprobs is None:
            params.prompt_logprobs = request.logprobs
        return params


def _only_scores_prompt(request: CompletionRequest) -> bool:
    """`echo` with `max_tokens` 0 asks for the prompt's log-probabilities alone."""
    return bool(request.echo) and request.max_tokens == 0


class _Choice:
    """One sequence on its way to the client."""

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
        """This choice with what `delta` adds to it."""
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
        if self._only_prompt and delta.finish_reason is not None:
            choice |= {"finish_reason": "length", "stop_reason": None}
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = self._prompt.token_ids.tolist()
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._renderer.prompt(self._sequence.prompt_logprobs or [])
        return choice

    def _logprobs_of(self, token_ids: list[int], positions: list[Any], is_first: bool) -> Json:
        if not (self._request.echo and is_first):
            return self._logprobs.piece(token_ids, positions)
        return self._logprobs.piece(
            token_ids,
            [*(self._sequence.prompt_logprobs or []), *positions],
            prompt_token_ids=self._prompt.token_ids.tolist(),
            prompt_text=self._prompt_text(),
        )

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        return self._tokenizer.decode(self._prompt.token_ids.tolist(), skip_special_tokens=False)


class _Answer(Answer[CompletionRequest]):
    def __init__(
        self,
        serving: Serving,
        request: CompletionRequest,
        prompts: list[PreparedPrompt],
        group: RequestGroup,
        envelope: Json,
    ) -> None:
        super().__init__(serving, request, group, envelope)
        n = prompts[0].params.n
        self.choices = [
            _Choice(serving, request, prompts[i // n], sequence, self.renderer, i)
            for i, sequence in enumerate(group.sequences)
        ]

    def usage_so_far(self) -> Json:
        only_prompt = _only_scores_prompt(self.request)
        return self._count_usage(num_completion_tokens=0 if only_prompt else None)

    def whole(self, outputs: list[Delta]) -> Json:
        choices = [c.render(output) for c, output in zip(self.choices, outputs, strict=True)]
        return self.envelope | {"choices": choices, "usage": self.usage()}

    def chunks(self) -> ChunkEncoder:
        return _Chunks(self)


class _Chunks(Chunks[_Answer]):
    __slots__ = ()

    def __init__(self, answer: _Answer) -> None:
        request = answer.request
        super().__init__(
            answer,
            len(answer.choices),
            is_plain=not (request.echo or request.logprobs is not None or request.return_token_ids),
            before=b'"text":',
            after=b"",
        )

    def _render(self, sequence: Sequence) -> bytes:
        delta = sequence.read()
        raise_if_failed(delta)
        return self.chunk(self._answer.choices[sequence.position].render(delta))
