"""`LLM`: generation in batches from Python, without a server."""

from __future__ import annotations

import atexit
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..protocol.errors import ParameterError
from ..protocol.sampling_params import SamplingParams
from .api.sampling import params_for_output
from .chat import ChatTemplate, ModelTemplates
from .engine_client import Delta, RequestGroup, SequenceRequest
from .local_engine import LocalEngine
from .logprobs import PositionLogprobs

Prompt: TypeAlias = str | list[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

Message: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of the n outputs of a prompt. `error` says why when `finish_reason` is "error" or "ignored"."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None

    @property
    def cumulative_logprob(self) -> float | None:
        """The logprob of the whole output, when logprobs were asked for."""
        return None if self.logprobs is None else sum(p.logprob for p in self.logprobs)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one prompt led to. `prompt` is None when it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int


class LLM:
    """A model and the processes that run it, until `close` or the end of a `with` block.

    `model` is a directory, a `.gguf` file or a hub name, None the default model; keywords are the flags of
    `engine serve` (`max_model_len=4096`). Raises EngineError for what cannot start. Methods may be called from
    several threads.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._engine = LocalEngine(model, keywords)
        self._numbers = itertools.count()
        self._templates: dict[str | None, ModelTemplates] = {}
        atexit.register(self.close)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt; the outputs are in the order of the prompts.

        `sampling_params` are for all prompts, or one for each; without any, the model's own defaults.
        Raises ParameterError for a prompt or parameter that the model cannot serve, and nothing is generated.
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
        """Answer one conversation, or each of several; otherwise as `generate`.

        `chat_template` is a template or the path of one. Raises ParameterError if neither it nor one of the
        model's own is there, ChatTemplateError if it refuses the messages.
        """
        conversations: Any = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        template = self._template(chat_template, bool(tools))
        encode = self._engine.tokenizer.encode
        prompts: list[tuple[str | None, list[int]]] = []
        for conversation in conversations:
            text = template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            prompts.append((text, encode(text, add_special_tokens=False)))
        return self._generate(prompts, sampling_params)

    def default_sampling_params(self) -> SamplingParams:
        """The model's own sampling parameters, from its generation config."""
        return SamplingParams(**self._engine.config.frontend.default_sampling)  # type: ignore[arg-type]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False while something runs."""
        return self._engine.run(self._engine.client.reset_prefix_cache())

    def close(self) -> None:
        """End the processes. May be repeated."""
        atexit.unregister(self.close)
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encoded(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the token ids of a prompt."""
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
            raise ParameterError("chat_template", "is required: this model has none of its own")
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
                delta.logprobs,
                delta.finish_reason,
                delta.stop_reason,
                delta.error,
            )
            for index, delta in enumerate(deltas)
        ],
        num_cached_tokens=group.sequences[0].num_cached_tokens,
    )
