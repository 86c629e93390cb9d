"""The routes of llama.cpp's own API, which code editors and chat applications use."""

from __future__ import annotations

import contextlib
from typing import Any, Final

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from .... import __version__
from ....protocol.sampling_params import SamplingParams
from ...http.errors import APIError, json_response, unavailable
from ...http.routing import Route, with_v1
from ..bodies.intake import Intake, RouteHandlers, reads
from ..chats.prompt import RenderedChat
from ..generation import PreparedPrompt
from ..infill import require_infill
from ..inputs.given_media import LLAMA_MARKER
from ..prompts import Prompt, verify_num_characters
from ..routes.capabilities import reads_audio, reads_images
from ..routes.chat_completions import render_request
from ..routes.completions import Completions
from ..routes.embeddings import Embeddings
from ..routes.management import Management
from ..sampling import sampling_params
from ..schema import UNLIMITED, ChatCompletionRequest, CompletionRequest
from ..schema.llama_cpp import LlamaCompletionRequest, LlamaFields, LlamaInfillRequest
from ..serving import Serving
from ..structured.constraint import Constraint
from .llama_cpp_answer import EmptyPrompt, LlamaAnswer, generation_settings
from .llama_cpp_operations import LlamaOperations
from .llama_cpp_request import LlamaPrompt, encode_prompts, infill_files, translate

UNLIMITED_SHARE: Final = 8
"""The share of the context that an infill without a limit keeps for its answer: one in this many tokens."""


def routes(
    serving: Serving, intake: Intake, management: Management, embeddings: Embeddings
) -> list[Route]:
    """Return all routes."""
    description = LlamaDescription(serving)
    chats = LlamaChats(serving, intake)
    operations = LlamaOperations(serving, intake, management, description.num_slots)
    return [
        Route("/completion", LlamaCompletions(serving, intake)),
        Route("/infill", LlamaInfills(serving, intake)),
        Route("/apply-template", chats.apply_template),
        Route("/embedding", embeddings.embed_content),
        Route("/props", description.props),
        Route("/slots", description.slots),
        Route("/slots/{id}", operations.act_on_slot, methods=["POST"]),
        Route("/lora-adapters", operations.adapters),
        Route("/lora-adapters", operations.set_scales, methods=["POST"]),
        Route("/models/load", operations.load),
        Route("/models/unload", operations.unload, methods=["POST"]),
        *with_v1(
            [
                Route("/chat/completions/input_tokens", chats.count_tokens),
                Route("/chat/completions/control", operations.control),
            ]
        ),
    ]


class LlamaCompletions(Completions):
    """The endpoint for completions."""

    body_schema: type[LlamaFields] = LlamaCompletionRequest
    cuts_max_tokens = True
    answer_type = LlamaAnswer

    async def _translate(self, body: LlamaFields, size: int) -> CompletionRequest:
        serving = self._serving
        return await serving.executor.run(size, translate, body, serving.tokenizer)

    async def _prompts(self, request: CompletionRequest, body_size: int) -> list[Prompt]:
        assert isinstance(request, LlamaPrompt)
        serving = self._serving
        serving.verify_tokenizer("prompt")
        if request.infill is None:
            return await serving.executor.run(
                body_size,
                lambda: encode_prompts(request, serving.tokenizer, serving.config.model.vocab_size),
            )
        return [await self._infill_prompt(request, request.infill, body_size)]

    async def _infill_prompt(
        self, request: LlamaPrompt, body: LlamaInfillRequest, body_size: int
    ) -> Prompt:
        """Return the prompt of an infill, cut to the context.

        Raises:
            APIError: The model does not fill in the middle, or a text is too long (400).
        """
        serving = self._serving
        infill = require_infill(serving.infill_format, "input_suffix", "use /completion")
        limit = serving.config.model.max_model_len
        files = infill_files(body)
        prefix, suffix = (body.input_prefix or "") + (body.prompt or ""), body.input_suffix or ""
        verify_num_characters(len(prefix), "input_prefix", limit)
        verify_num_characters(len(suffix), "input_suffix", limit)
        verify_num_characters(sum(len(text) for _, text in files), "input_extra", limit)
        is_unlimited = request.max_tokens in (None, UNLIMITED)
        num_answer_tokens = limit // UNLIMITED_SHARE if is_unlimited else request.max_tokens or 1
        max_tokens = max(limit - num_answer_tokens, limit // 2)
        token_ids = await serving.executor.run(
            body_size,
            lambda: infill.encode_beside_files(
                serving.tokenizer, prefix, suffix, files, max_tokens
            ),
        )
        return Prompt("input_prefix", None, np.asarray(token_ids, np.int32))

    def _fit(
        self, prompt: Prompt, request: CompletionRequest, params: SamplingParams
    ) -> PreparedPrompt:
        if len(prompt.token_ids):
            return super()._fit(prompt, request, params)
        # The answer to an empty prompt is empty.
        params = msgspec.structs.replace(params, max_tokens=1, min_tokens=0, structured_output=None)
        return EmptyPrompt(np.zeros(1, np.int32), params, "")

    def _params(self, request: CompletionRequest, constraint: Constraint | None) -> SamplingParams:
        params = super()._params(request, constraint)
        infill = self._serving.infill_format
        assert isinstance(request, LlamaPrompt)
        params.processed_logprobs = request.post_sampling_probs
        if request.infill is not None and infill is not None:
            params.stop_token_ids = tuple({*params.stop_token_ids, *infill.end_ids})
        return params


class LlamaInfills(LlamaCompletions):
    """The endpoint for infills."""

    body_schema = LlamaInfillRequest


class LlamaChats(RouteHandlers):
    """The routes that show the prompt of a conversation, and count its tokens."""

    @reads(ChatCompletionRequest)
    async def apply_template(
        self, http: Request, request: ChatCompletionRequest, size: int
    ) -> Response:
        """Return the prompt as text. It ends in the last message if that is the assistant's."""
        last: Any = request.messages[-1] if request.messages else None
        if request.add_generation_prompt is None and isinstance(last, dict):
            is_answer = last.get("role") == "assistant" and not last.get("tool_calls")
            request.continue_final_message = request.continue_final_message or is_answer or None
        return json_response({"prompt": (await self._render(request, size)).text})

    @reads(ChatCompletionRequest)
    async def count_tokens(
        self, http: Request, request: ChatCompletionRequest, size: int
    ) -> Response:
        """Return the number of tokens of the prompt."""
        return json_response({"input_tokens": len((await self._render(request, size)).token_ids)})

    async def _render(self, request: ChatCompletionRequest, size: int) -> RenderedChat:
        self._serving.verify_model(request.model)
        self._serving.verify_tokenizer("messages")
        return await render_request(self._serving, request, size)


class LlamaDescription:
    """The routes that describe the server."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    @property
    def num_slots(self) -> int:
        """The number of sequences that can run at the same time."""
        serving = self._serving
        return serving.config.scheduler.max_num_seqs * serving.num_replicas

    async def props(self, http: Request) -> Response:
        """Return the properties of the server and of its model."""
        serving = self._serving
        model, tokenizer = serving.config.model, serving.tokenizer
        source = ""
        # Some models have no chat template.
        with contextlib.suppress(APIError):
            source = serving.chat_template(with_tools=False).source
        request = LlamaPrompt(max_tokens=serving.default_max_tokens or UNLIMITED)
        defaults = sampling_params(
            request,
            defaults=serving.config.frontend.default_sampling,
            vocab_size=model.vocab_size,
            max_tokens=request.max_tokens,
            logprobs=None,
            constraint=None,
        )
        return json_response(
            {
                "default_generation_settings": {
                    "id": 0,
                    "n_ctx": model.max_model_len,
                    "params": generation_settings(defaults, request),
                },
                "total_slots": self.num_slots,
                "model_alias": serving.served_name,
                "model_path": model.model,
                "modalities": {
                    "vision": reads_images(serving),
                    "audio": reads_audio(serving),
                },
                "media_marker": LLAMA_MARKER,
                "chat_template": source,
                "bos_token": tokenizer.bos_token or "",
                "eos_token": tokenizer.eos_token or "",
                "build_info": f"engine-{__version__}",
                "is_sleeping": self._serving.engine.sleep.is_asleep,
            }
        )

    async def slots(self, http: Request) -> Response:
        """List the slots for running sequences. With `fail_on_no_slot`, answer 503 if all are in use."""
        metrics = self._serving.engine.metrics
        load = metrics.read_load()
        # The load may not include a sequence that has just started, but the frontends have counted it.
        num_started = metrics.count_unfinished() - int(load["num_requests_waiting"])
        num_running = max(int(load["num_requests_running"]), num_started)
        if http.query_params.get("fail_on_no_slot") and num_running >= self.num_slots:
            raise unavailable("no slot is available", self._serving.retry_after_s)
        n_ctx = self._serving.config.model.max_model_len
        return json_response(
            [
                {"id": i, "n_ctx": n_ctx, "is_processing": i < num_running}
                for i in range(self.num_slots)
            ]
        )
