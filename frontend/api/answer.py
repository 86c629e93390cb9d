"""The answer to one request, as far as completions and chat completions share it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from ..engine_client import Delta, RequestGroup
from .event_stream import ChunkEncoder
from .logprobs import Json, LogprobsRenderer
from .schema import GenerationRequest
from .serving import Serving

Request = TypeVar("Request", bound=GenerationRequest)


class Answer(ABC, Generic[Request]):
    """It is given whole, or as the chunks of a stream. `envelope` is everything of either but choices and usage."""

    def __init__(
        self, serving: Serving, request: Request, group: RequestGroup, envelope: Json
    ) -> None:
        self.serving = serving
        self.request = request
        self.envelope = envelope
        self.renderer = LogprobsRenderer(
            serving.tokenizer, bool(request.return_tokens_as_token_ids)
        )
        self._group = group

    @abstractmethod
    def whole(self, outputs: list[Delta]) -> Json: ...

    @abstractmethod
    def chunks(self) -> ChunkEncoder: ...

    def usage(self) -> Json:
        """The final count."""
        return self.usage_so_far()

    def usage_so_far(self) -> Json:
        return self._count_usage()

    def _count_usage(
        self, *, num_completion_tokens: int | None = None, reasoning_tokens: int | None = None
    ) -> Json:
        """A prompt that was continued n times counts once."""
        prompts = [outputs[0] for outputs in self._group.outputs_by_prompt()]
        num_prompt = sum(s.num_prompt_tokens for s in prompts)
        if num_completion_tokens is None:
            num_completion_tokens = sum(s.num_generated_tokens for s in self._group.sequences)
        counts: Json = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_completion_tokens,
            "total_tokens": num_prompt + num_completion_tokens,
        }
        if self.serving.config.frontend.enable_prompt_tokens_details:
            cached = sum(s.num_cached_tokens for s in prompts)
            counts["prompt_tokens_details"] = {"cached_tokens": cached}
        if reasoning_tokens is not None:
            counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
        return counts
