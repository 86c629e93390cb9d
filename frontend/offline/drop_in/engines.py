"""Engines whose requests arrive and stream one by one: `AsyncLLM` for asyncio, and `LLMEngine` for loops of steps."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from ....protocol.messages import PauseMode
from ....protocol.sampling_params import SamplingParams as Params
from ...client.engine_client import EngineDead, RequestGroup
from ..control import ControlMethods
from ..llm import LLM
from ..loras import LoraChoice
from ..outputs import RequestOutput
from ..prompts import EncodedPrompt, Prompt
from .streams import stream_outputs

if TYPE_CHECKING:
    from ..outputs import PoolingRequestOutput
    from ..params import PoolingParams
    from .engine_args import Options
    from .tokenizer import ModelTokenizer


class _Running:
    """A request that may not have been sent to the engine yet. Its methods must be called on the engine's loop."""

    def __init__(self) -> None:
        self._group: RequestGroup | None = None
        self._is_aborted = False

    def begin(self, group: RequestGroup) -> None:
        """Record that the request was sent."""
        self._group = group
        if self._is_aborted:
            group.abort()

    def abort(self) -> None:
        """End the request, if necessary as soon as it is sent."""
        self._is_aborted = True
        if self._group is not None:
            self._group.abort()


class _Streaming:
    """A model whose requests run on the loop of its engine, and deliver outputs by a callback.

    A request is in `_running` until the caller has read its end, so that its ID is not used again before.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        self._llm = LLM(model, **keywords)
        # These classes start requests as an `LLM` does, and wait for them in their own ways.
        self._requests = requests = self._llm._requests  # noqa: SLF001
        self._engine, self._prompts = requests.engine, requests.prompts
        self._running: dict[str, _Running] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Options, **_: Any) -> Self:
        """Start an engine with options. Other arguments of vLLM's method have no effect."""
        return cls(**engine_args.keywords())

    def _start(
        self,
        request_id: str,
        encode: Callable[[], list[EncodedPrompt]],
        params: Params | None,
        lora_request: LoraChoice,
        priority: int,
        deliver: Callable[[RequestOutput | Exception | None], object],
    ) -> None:
        """Start a request for the one prompt that `encode` returns.

        `deliver` gets its outputs, and then None or the exception that ended it.
        """

        async def work() -> None:
            end: Exception | None = None
            try:
                [prompt] = await asyncio.to_thread(encode)
                [group] = await self._requests.submit([prompt], params, lora_request, priority)
                running.begin(group)
                async for output in stream_outputs(group, prompt, params, request_id, tokenizer):
                    deliver(output)
            except asyncio.CancelledError:
                end = EngineDead("the engine was closed before this request finished")
            except Exception as error:
                end = error
            deliver(end)

        if request_id in self._running:
            raise ValueError(f"request_id {request_id!r} is the ID of a request that still runs")
        tokenizer = self._engine.tokenizer
        running = self._running[request_id] = _Running()
        self._engine.start(work())

    def _abort(self, request_id: str | Iterable[str]) -> None:
        for each in [request_id] if isinstance(request_id, str) else [*request_id]:
            if (running := self._running.get(each)) is not None:
                self._engine.call(running.abort)


class AsyncLLM(_Streaming):
    """A model for asyncio: `generate` yields outputs as they arrive. Starting it blocks until the model is loaded.

    Args:
        model: As for `LLM`.
        keywords: As for `LLM`.
    """

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str = "",
        *,
        lora_request: LoraChoice = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Yield the output of a prompt whenever there is more.

        The request is aborted if the iteration ends early.

        Args:
            prompt: A prompt, as for `LLM.generate`.
            sampling_params: Parameters, of which `output_kind` chooses what each output has. The default is the
                model's own.
            request_id: An ID for `abort` and the outputs.
            lora_request: As for `LLM.generate`.
            priority: As for `LLM.generate`.
            tokenization_kwargs: As for `LLM.generate`.

        Raises:
            ParameterError: The prompt or a parameter is invalid.
        """
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()
        request_id = request_id or f"request-{id(outputs)}"
        self._start(
            request_id,
            partial(self._requests.encode, prompt, tokenization_kwargs),
            sampling_params,
            lora_request,
            priority,
            lambda item: loop.call_soon_threadsafe(outputs.put_nowait, item),
        )
        try:
            while (item := await outputs.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self._abort(request_id)
            del self._running[request_id]

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoraChoice = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """Yield the one result of a prompt that is not generated, as `LLM.encode` returns it."""
        [result] = await asyncio.to_thread(
            self._llm.encode, prompt, pooling_params, lora_request=lora_request
        )
        yield result

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End one or more running requests, whose last output has the finish reason "abort"."""
        self._abort(request_id)

    async def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer, as `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear the prefix cache, as `LLM.reset_prefix_cache`."""
        return await asyncio.to_thread(self._llm.reset_prefix_cache, reset_running_requests)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Free the memory of the model, as `LLM.sleep`."""
        await asyncio.to_thread(self._llm.sleep, level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Load the model again, as `LLM.wake_up`."""
        await asyncio.to_thread(self._llm.wake_up, tags)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Pause generation until `resume_generation`. New requests wait.

        Args:
            mode: What happens to running requests: `abort` ends them, `wait` finishes them first, and `keep` continues
                them after the pause.
            clear_cache: True to clear the prefix cache.
        """
        pause = PauseMode(mode)
        clears = clear_cache and pause is not PauseMode.KEEP
        work = self._engine.client.calls.pause(pause, clear_cache=clears)
        await asyncio.to_thread(self._engine.run, work)

    async def resume_generation(self) -> None:
        """Resume generation after `pause_generation`."""
        await asyncio.to_thread(self._engine.run, self._engine.client.calls.resume())

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has failed."""
        if (reason := self._engine.client.dead_reason) is not None:
            raise EngineDead(reason)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the processes. Requests that still run fail. `timeout` has no effect."""
        self._llm.close()


class LLMEngine(_Streaming, ControlMethods):
    """A model for programs that add requests and call `step` in a loop.

    Args:
        model: As for `LLM`.
        keywords: As for `LLM`.
    """

    def __init__(self, model: str | None = None, **keywords: Any) -> None:
        super().__init__(model, **keywords)
        self._outputs: queue.SimpleQueue[tuple[str, RequestOutput | Exception | None]] = (
            queue.SimpleQueue()
        )
        self._failed: tuple[str, Exception] | None = None
        """The ID and the exception of a request that has failed, for the next step."""

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params | None = None,
        *,
        lora_request: LoraChoice = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Start to generate, and return the ID of the request. The arguments are those of `AsyncLLM.generate`."""
        encoded = self._requests.encode(prompt, tokenization_kwargs)
        self._start(
            request_id,
            lambda: encoded,
            params,
            lora_request,
            priority,
            lambda item: self._outputs.put((request_id, item)),
        )
        return request_id

    def has_unfinished_requests(self) -> bool:
        """Return whether `step` will return more outputs, or raise an exception."""
        return bool(self._running)

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests whose last output was not returned by `step`."""
        return len(self._running)

    def step(self) -> list[RequestOutput]:
        """Wait for new outputs, and return them; [] if there are no requests.

        Raises:
            ParameterError: A parameter of a request is invalid. The other requests run on.
        """
        found: list[RequestOutput] = []
        while self._failed is None and self._running and not (found and self._outputs.empty()):
            request_id, item = self._outputs.get()
            if isinstance(item, RequestOutput):
                found.append(item)
            elif item is None:
                del self._running[request_id]
            else:
                self._failed = request_id, item
        if found or self._failed is None:
            return found
        (request_id, failure), self._failed = self._failed, None
        del self._running[request_id]
        raise failure

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End one or more running requests, whose last output has the finish reason "abort"."""
        self._abort(request_ids)

    def get_tokenizer(self) -> ModelTokenizer:
        """Return the model's tokenizer, as `LLM.get_tokenizer`."""
        return self._llm.get_tokenizer()

    def shutdown(self) -> None:
        """Stop the processes."""
        self._llm.close()
