"""Encode and check the requests of `LLM`, and send them to the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import msgspec

from ...protocol.errors import ParameterError, counted
from ...protocol.grammars.process import GrammarProcesses
from ...protocol.sampling_params import SamplingParams as Params
from ..api.chats.formats import AnswerFormats
from ..chat import ModelTemplates, prepare_formats
from ..client.encoder_inputs import without_bad_words
from ..client.engine_client import RequestGroup, SequenceRequest
from ..client.grammar_checks import GrammarChecks
from ..client.prompt_candidates import verify_candidates
from ..client.sequence_io import params_for_output
from ..http.errors import APIError
from .local_engine import LocalEngine
from .loras import LoraChoice, OfflineLoras
from .params import SamplingParams
from .prompts import EncodedPrompt, Prompt, PromptEncoder, as_list

_END_TOKENS: Final = 64
"""Number of tokens at the end of a prompt that show whether its answer begins with reasoning."""


class OfflineRequests:
    """Encodes prompts, checks their parameters and starts their requests. `numbers` yields the IDs of requests.

    Attributes:
        engine: The engine.
        prompts: The encoder of prompts.
    """

    def __init__(
        self,
        engine: LocalEngine,
        prompts: PromptEncoder,
        loras: OfflineLoras,
        numbers: Iterator[int],
    ) -> None:
        self.engine = engine
        self.prompts = prompts
        self._loras = loras
        self._numbers = numbers
        self._grammars = OfflineGrammars(engine)

    def encode(
        self, prompts: Prompt | Sequence[Prompt], tokenization_kwargs: Mapping[str, Any] | None
    ) -> list[EncodedPrompt]:
        """Return one or more prompts as tokens, which `tokenization_kwargs` may cut.

        Raises:
            ParameterError: A prompt or an argument is invalid.
        """
        tokenization = self.prompts.tokenization(tokenization_kwargs)
        return [self.prompts.encode(each, tokenization=tokenization) for each in as_list(prompts)]

    async def submit(
        self,
        prompts: Sequence[EncodedPrompt],
        sampling_params: Params | Sequence[Params] | None,
        lora_request: LoraChoice | Sequence[LoraChoice] = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestGroup]:
        """Start to generate, and return the request of each prompt.

        Raises:
            ParameterError: A parameter is invalid; no request runs.
        """
        has_images = [bool(prompt.encoder_inputs) for prompt in prompts]
        loras = self._loras.find_each(lora_request, has_images)
        if sampling_params is None:
            sampling_params = self.default_params()
        if isinstance(sampling_params, Params):
            sampling_params = [sampling_params] * len(prompts)
        _verify_length("sampling_params", sampling_params, len(prompts))
        ranks = each_priority(priority, len(prompts))
        params = [
            await self._grammars.check(self._fitting(each, prompt))
            for each, prompt in zip(sampling_params, prompts, strict=True)
        ]
        groups: list[RequestGroup] = []
        try:
            for prompt, each, lora, rank in zip(prompts, params, loras, ranks, strict=True):
                sequences = [
                    SequenceRequest(
                        prompt.token_ids,
                        params_for_output(each, j),
                        priority=rank,
                        lora=lora,
                        encoder_inputs=list(prompt.encoder_inputs),
                    )
                    for j in range(each.n)
                ]
                request_id = str(next(self._numbers))
                groups.append(await self.engine.client.submit(sequences, request_id=request_id))
        except BaseException:
            for group in groups:
                group.abort()
            raise
        return groups

    def default_params(self) -> SamplingParams:
        """Return the sampling parameters in the model's generation config."""
        given: dict[str, Any] = {**self.engine.config.frontend.default_sampling}
        return SamplingParams(**given)

    def without_bad_words(self, params: Params) -> Params:
        """Return sampling parameters that also exclude the tokens that a model with a source never generates."""
        source = self.engine.config.model.source_text
        return params if source is None else without_bad_words(params, source)

    def _fitting(self, given: Params, prompt: EncodedPrompt) -> Params:
        """Return the parameters for a prompt.

        `max_tokens` does not exceed the context, because all prompts may share the parameters.

        Raises:
            ParameterError: They are invalid for the prompt.
        """
        params = self.without_bad_words(_with_tuples(given))
        model, frontend = self.engine.config.model, self.engine.config.frontend
        num_tokens = len(prompt.token_ids)
        remaining = model.max_model_len - num_tokens
        if params.max_tokens is not None and 0 < remaining < params.max_tokens:
            params = msgspec.structs.replace(params, max_tokens=remaining)
        if (candidates := params.prompt_candidates) is not None:
            verify_candidates(candidates, num_tokens, model.vocab_size, frontend.max_logprobs)
        if isinstance(params, SamplingParams) and params.thinking_token_budget is not None:
            return self._limit_reasoning(params, params.thinking_token_budget, prompt)
        return params

    def _limit_reasoning(
        self, params: SamplingParams, limit: int, prompt: EncodedPrompt
    ) -> SamplingParams:
        name = "thinking_token_budget"
        try:
            limit = self._formats.verify_reasoning_limit(limit, name)
        except APIError as error:
            raise ParameterError(name, error.message.removeprefix(f"{name} ")) from None
        end = self.engine.tokenizer.decode(prompt.token_ids[-_END_TOKENS:])
        constraint = self._formats.constrain_after_reasoning(params.structured_output, end, limit)
        return msgspec.structs.replace(
            params, structured_output=constraint, thinking_token_budget=None
        )

    @cached_property
    def _formats(self) -> AnswerFormats:
        """The formats of the model's reasoning and tool calls."""
        config, tokenizer = self.engine.config, self.engine.tokenizer
        templates = ModelTemplates(tokenizer, architecture=config.model.architecture)
        return AnswerFormats(prepare_formats(config.frontend, templates), tokenizer)


class OfflineGrammars:
    """Checks the grammars of requests in separate processes. The first one starts with the first grammar."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self._checks: GrammarChecks | None = None

    async def check(self, params: Params) -> Params:
        """Return parameters with the form of their grammar for the core.

        Raises:
            ParameterError: The grammar cannot be compiled.
        """
        output = params.structured_output
        if output is None:
            return params
        if self._checks is None:
            model = self._engine.config.model
            self._checks = GrammarChecks(
                GrammarProcesses(
                    model.verified_tokenizer_path, model.vocab_size, model.eos_token_ids
                ),
                self._engine.client.executor.create_separate(),
                self._engine.client.calls.prepare_grammars,
            )
            self._engine.close_together(self._checks.close)
        verdict = await self._checks.check(output)
        if verdict.problem:
            raise ParameterError("structured_output", verdict.problem)
        return msgspec.structs.replace(params, structured_output=verdict.apply_to(output))


def each_priority(priority: int | Sequence[int] | None, number: int) -> Sequence[int]:
    """Return the priority of each of `number` prompts. Raise ParameterError if there are more or fewer."""
    if priority is None or isinstance(priority, int):
        return [priority or 0] * number
    _verify_length("priority", priority, number)
    return priority


def _verify_length(name: str, values: Sequence[object], number: int) -> None:
    if len(values) != number:
        raise ParameterError(
            name, f"has {counted(len(values), 'value')} for {counted(number, 'prompt')}"
        )


def _with_tuples(params: Params) -> Params:
    """Return parameters whose lists of texts may have been given as one text or as a list."""
    stop, stop_regex, bad_words = (
        (value,) if isinstance(value, str) else tuple(value)
        for value in (params.stop, params.stop_regex, params.bad_words)
    )
    return msgspec.structs.replace(params, stop=stop, stop_regex=stop_regex, bad_words=bad_words)
