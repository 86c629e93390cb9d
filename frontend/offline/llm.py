"""Batch generation from Python, without a server."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ...protocol.errors import ParameterError
from ...protocol.sampling_params import SamplingParams
from ..api.sampling import params_for_output
from ..chat import ChatTemplate, ModelTemplates, SpecialTokenGuard
from ..client.engine_client import Delta, RequestGroup, SequenceRequest
from ..client.logprobs import PositionLogprobs
from .local_engine import LocalEngine

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
"""Text, token IDs, or a mapping with `prompt` or `prompt_token_ids`."""

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt. `error` is the reason if `finish_reason` is "error" or "ignored"."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None

    @property
    def cumulative_logprob(self) -> float | None:
        """The logprob of the whole output; None if logprobs were not requested."""
        return None if self.logprobs is None else sum(p.logprob for p in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The times of one prompt in CLOCK_MONOTONIC seconds; 0.0 for events that did not happen.

    With several outputs, the first start and the last end are given. `scheduler_time` is the number of seconds that the
    scheduler worked while the prompt was running, or 0.0 if a stop string ended it.
    """

    arrival_time: float
    queued_time: float
    first_scheduled_time: float
    first_token_time: float
    last_token_time: float
    finished_time: float
    scheduler_time: float

    @property
    def time_in_queue(self) -> float:
        """Seconds from queueing the prompt until it was first scheduled."""
        return max(self.first_scheduled_time - self.queued_time, 0.0)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The outputs of one prompt. `prompt` is None if it was given as token IDs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics


class LLM:
    """A model and the processes that run it, until `close` or the end of a `with` block. It is thread-safe.

    Args:
        model: A directory, a `.gguf` file or a hub name; None for the default model.
        keywords: The flags of `engine serve`, such as `max_model_len=4096`.

    Raises:
        EngineError: The engine cannot start.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._engine = LocalEngine(model, keywords)
        self._numbers = itertools.count()
        self._templates: dict[str | None, ModelTemplates] = {}
        policy = self._engine.config.frontend.special_tokens_in_text
        self._special_tokens = SpecialTokenGuard(self._engine.tokenizer, policy)
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt and return the outputs in the order of the prompts.

        Args:
            prompts: One prompt or a list of them.
            sampling_params: For all prompts, or one per prompt. The default is the model's own.

        Raises:
            ParameterError: A prompt or parameter is invalid; nothing was generated.
        """
        several = isinstance(prompts, list | tuple) and not (
            prompts and isinstance(prompts[0], int)
        )
        wanted: list[Prompt] = list(prompts) if several else [prompts]  # type: ignore[arg-type, list-item]
        return self._generate([self._encoded(prompt) for prompt in wanted], sampling_params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, and return the outputs in their order.

        Args:
            messages: One conversation or a list of them.
            sampling_params: For all conversations, or one per conversation. The default is the model's own.
            chat_template: A template or the path of one, instead of the model's own.
            add_generation_prompt: Whether the prompt ends with the start of an assistant message.
            continue_final_message: Whether the model continues the last message.
            tools: Function definitions in OpenAI's format.
            chat_template_kwargs: Extra variables for the template.

        Raises:
            ParameterError: There is no chat template, or a parameter is invalid.
            ChatTemplateError: The template rejects the messages.
        """
        conversations: Any = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        template = self._template(chat_template, bool(tools))
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            text = template.render(
                conversation,
                self._special_tokens,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prompts.append(self._special_tokens.encode(text, add_special_tokens=False))
        return self._generate(prompts, sampling_params)

    def default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters in the model's generation config."""
        return SamplingParams(**self._engine.config.frontend.default_sampling)  # type: ignore[arg-type]

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache. Return False if it was in use by running requests."""
        return self._engine.run(self._engine.client.reset_prefix_cache())

    def close(self) -> None:
        """Stop the processes. Later calls do nothing."""
        atexit.unregister(self.close)
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return the text, if there is one, and the token IDs of a prompt."""
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt["prompt"]
        if isinstance(given, str):
            return given, self._engine.tokenizer.encode(given)
        return None, list(given)

    def _template(self, instead: str | None, with_tools: bool) -> ChatTemplate:
        if instead not in self._templates:
            self._templates[instead] = ModelTemplates(self._engine.tokenizer, instead)
        template = self._templates[instead].choose(with_tools)
        if template is None:
            raise ParameterError(
                "chat_template", "is required because this model has no chat template"
            )
        return template

    def _generate(
        self,
        prompts: list[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if len(sampling_params) != len(prompts):
            raise ParameterError(
                "sampling_params", f"has {len(sampling_params)} entries for {len(prompts)} prompts"
            )
        return self._engine.run(self._collect(prompts, sampling_params))

    async def _collect(
        self, prompts: list[tuple[str | None, list[int]]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        groups: list[RequestGroup] = []
        try:
            for (_, token_ids), each in zip(prompts, params, strict=True):
                sequences = [
                    SequenceRequest(token_ids, params_for_output(each, j)) for j in range(each.n)
                ]
                request_id = str(next(self._numbers))
                groups.append(await self._engine.client.submit(sequences, request_id=request_id))
            return [
                _request_output(group, *prompt, await group.result())
                for group, prompt in zip(groups, prompts, strict=True)
            ]
        finally:
            for group in groups:
                group.abort()


def _request_output(
    group: RequestGroup, prompt: str | None, prompt_token_ids: list[int], deltas: list[Delta]
) -> RequestOutput:
    return RequestOutput(
        request_id=group.request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        prompt_logprobs=group.sequences[0].prompt_logprobs,
        outputs=[
            CompletionOutput(
                index,
                delta.text,
                delta.token_ids,
                None if delta.logprobs is None else list(delta.logprobs),
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
            )
            for index, delta in enumerate(deltas)
        ],
        num_cached_tokens=group.sequences[0].num_cached_tokens,
        metrics=_request_metrics(group),
    )


def _request_metrics(group: RequestGroup) -> RequestMetrics:
    sequences = group.sequences

    def first(times: Iterable[float]) -> float:
        return min(filter(None, times), default=0.0)

    return RequestMetrics(
        arrival_time=sequences[0].arrival_time,
        queued_time=first(each.queued_time for each in sequences),
        first_scheduled_time=first(each.scheduled_time for each in sequences),
        first_token_time=first(each.first_token_time for each in sequences),
        last_token_time=max(each.last_token_time for each in sequences),
        finished_time=max(each.finish_time for each in sequences),
        scheduler_time=max(each.scheduler_time for each in sequences),
    )
