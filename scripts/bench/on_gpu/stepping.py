"""Drive a worker's model runner as a worker does: a step begins before the tokens of the last one have arrived."""

from __future__ import annotations

import gc
import time
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine.protocol.arrays import int32_bytes
from engine.protocol.config import (
    CacheConfig,
    CPUBackend,
    Device,
    DeviceConfig,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    SchedulerConfig,
)
from engine.protocol.sampling_params import SamplingParams
from engine.protocol.worker_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput
from engine.workers.device.device import open_device
from engine.workers.device.memory import count_kv_blocks
from engine.workers.device.memory_profile import MemoryProfile
from engine.workers.execution.model_runner import ModelRunner
from engine.workers.execution.runner import PendingOutput
from engine.workers.loaders import DummyCheckpoint, open_checkpoint
from on_gpu.limits import synchronize
from on_gpu.reporting import Skipped
from on_gpu.shapes import Shape
from on_gpu.trace import Span, summary
from on_gpu.weights import write_weights

BLOCK_SIZE = 16
STEPS_IN_FLIGHT = 2
SETTLING_STEPS = 10
"""Number of steps before the profiled ones, because the first steps differ."""

FILLED_BLOCKS = 1024
"""Number of KV-cache blocks that are filled at once."""


class Stepping:
    """A loaded model whose steps are timed. Each measurement uses its own requests.

    `seconds` maps each part of the start, such as loading, to its duration.
    """

    def __init__(
        self,
        shape: Shape,
        directory: Path,
        *,
        device: Device,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._shape = shape
        self._max_model_len = max_model_len
        path = str(shape.write(directory, max_model_len))
        if shape.is_quantized:
            write_weights(shape, directory)
        config = EngineConfig(
            "",
            1,
            ModelConfig(
                "m",
                path,
                path,
                ("m",),
                shape.model_type,
                shape.vocab_size,
                max_model_len,
                (1,),
                load_format=LoadFormat.AUTO if shape.is_quantized else LoadFormat.DUMMY,
            ),
            CacheConfig(block_size=BLOCK_SIZE),
            SchedulerConfig(
                max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
            ),
            device=DeviceConfig(device, cpu_backend=CPUBackend.TORCH),
        )
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self.device = open_device(config.device)
        synchronize(self.device)
        self._part("device")
        # Weights that are not read from files would not be quantized.
        checkpoint = open_checkpoint(path) if shape.is_quantized else DummyCheckpoint(path)
        self.runner = ModelRunner(config, self.device, checkpoint, lambda *_: None)
        synchronize(self.device)
        self._part("weights")
        self.profile: MemoryProfile | None = self.runner.profile_memory(0.9)
        self._part("memory profile")
        self.num_blocks = count_kv_blocks(
            config, self.runner.block_bytes, self.runner.kv_cache_groups, self.profile
        )
        self.runner.allocate_kv_cache(self.num_blocks)
        self.runner.warm_up()
        synchronize(self.device)
        self._part("cache and graphs")
        self._fill_kv_cache()
        # As a worker does, keep garbage collections from traversing torch during a step.
        gc.collect()
        gc.freeze()
        self._step = 0
        self._host_seconds = 0.0
        self._pending: deque[PendingOutput] = deque()

    def _part(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = now - self._began
        self._began = now

    def decode(
        self, batch: int, context: int, steps: int, *, is_sampled: bool = False
    ) -> tuple[float, float]:
        """Return the seconds of a step that decodes `batch` requests of `context` tokens, and the host's seconds."""
        self._begin_requests(batch, context, steps + 24, is_sampled=is_sampled)
        for _ in range(20):
            self.step()
        self.drain()
        self._host_seconds = 0.0
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.drain()
        return (time.perf_counter() - begin) / steps, self._host_seconds / steps

    def mixed(self, batch: int, context: int, num_prompt_tokens: int, steps: int) -> float:
        """Return the seconds of a step in which `batch` requests decode while another request's prompt is computed."""
        num_more = steps + 24
        self._begin_requests(batch, context, num_more)
        first_block = 1 + batch * -(-(context + 1 + num_more) // BLOCK_SIZE)
        (prompt,) = self._requests(
            1, num_prompt_tokens, 0, 1, first_slot=batch, first_block=first_block
        )
        fields: dict[str, Any] = {
            "new_requests": [prompt],
            "slots": int32_bytes(range(batch + 1)),
            "chunks": int32_bytes([[batch, num_prompt_tokens]]),
        }
        self.step(**fields)
        fields["removed_slots"] = int32_bytes([batch])
        for _ in range(10):
            self.step(**fields)
        self.drain()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step(**fields)
        self.drain()
        seconds = (time.perf_counter() - begin) / steps
        self.step(removed_slots=int32_bytes([batch]), slots=int32_bytes(range(batch)))
        self.drain()
        return seconds

    def prefill(self, num_tokens: int, repeats: int) -> float:
        """Return the seconds of one step that computes a whole prompt, as the minimum of several."""
        times = []
        for _ in range(repeats + 1):
            requests = self._requests(1, num_tokens, num_computed=0, num_more=1)
            synchronize(self.device)
            begin = time.perf_counter()
            self.step(
                new_requests=requests,
                slots=int32_bytes([0]),
                chunks=int32_bytes([[0, num_tokens]]),
                removed_slots=int32_bytes([0]),
            )
            self.drain()
            times.append(time.perf_counter() - begin)
        return min(times[1:])

    def trace(self, batch: int, context: int, steps: int) -> dict[str, Any] | None:
        """Profile a GPU while `batch` requests decode; see `trace.summary`. Return None without a GPU."""
        if self.device.type != "cuda":
            return None
        self._begin_requests(batch, context, steps + SETTLING_STEPS + 30)
        for _ in range(20):
            self.step()
        self.drain()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps + SETTLING_STEPS):
                self.step()
            self.drain()
        spans = (
            # All kernels of a graph have the correlation id of the call that replayed it.
            Span(event.name, event.time_range.start, event.time_range.end, event.id)
            for event in profiler.events()
            if event.device_type.name == "CUDA"
        )
        return summary(spans, steps)

    def waits(self, batch: int, context: int) -> dict[str, Any] | None:
        """Return how often and where the host waits for the device in two decode steps; None without a GPU."""
        if self.device.type != "cuda":
            return None
        self._begin_requests(batch, context, 24)
        for _ in range(4):
            self.step()
        self.drain()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                results = [self._execute() for _ in range(2)]
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for result in results:
            if not isinstance(result, ModelRunnerOutput):
                result.output()
        places = [
            f"{warning.filename}:{warning.lineno}: {str(warning.message).splitlines()[0]}"
            for warning in caught
            # The mode announces itself.
            if "prototype feature" not in str(warning.message)
        ]
        return {"count": len(places), "places": places}

    def step(self, **fields: Any) -> None:
        result = self._execute(**fields)
        if not isinstance(result, ModelRunnerOutput):
            self._pending.append(result)
        if len(self._pending) == STEPS_IN_FLIGHT:
            self._pending.popleft().output()

    def drain(self) -> None:
        while self._pending:
            self._pending.popleft().output()

    def _execute(self, **fields: Any) -> ModelRunnerOutput | PendingOutput:
        self._step += 1
        begin = time.perf_counter()
        result = self.runner.execute(SchedulerOutput(self._step, **fields), lambda step: None)
        self._host_seconds += time.perf_counter() - begin
        return result

    @torch.inference_mode()
    def _fill_kv_cache(self) -> None:
        """Fill the cache with random keys and values, because products with zeros take less power, and so less time."""
        for layer in self.runner.kv_cache.layers:
            parts = layer.split(FILLED_BLOCKS)
            random = torch.randn(parts[0].shape, dtype=torch.bfloat16, device=self.device)
            random = random.to(layer.dtype)
            for part in parts:
                part.copy_(random[: len(part)])
        synchronize(self.device)

    def _begin_requests(
        self, batch: int, context: int, num_more: int, *, is_sampled: bool = False
    ) -> None:
        """Start requests whose first `context` tokens count as computed, with whatever is in the cache."""
        requests = self._requests(batch, context + 1, context, num_more, is_sampled=is_sampled)
        self.step(new_requests=requests, slots=int32_bytes(range(batch)))
        self.drain()

    def _requests(
        self,
        batch: int,
        length: int,
        num_computed: int,
        num_more: int,
        *,
        first_slot: int = 0,
        first_block: int = 1,
        is_sampled: bool = False,
    ) -> list[NewRequestData]:
        assert length + num_more <= self._max_model_len
        num_blocks = -(-(length + num_more) // BLOCK_SIZE)
        if first_block + batch * num_blocks > self.num_blocks:
            raise Skipped(
                f"the KV cache has {self.num_blocks} blocks, too few for {batch} x {length}"
            )
        tokens = np.random.default_rng(1).integers(2, self._shape.vocab_size, length)
        firsts = range(first_block, first_block + batch * num_blocks, num_blocks)
        return [
            NewRequestData(
                slot=first_slot + index,
                request_id=(0, first_slot + index),
                token_ids=int32_bytes(tokens),
                num_prompt_tokens=length,
                num_computed_tokens=num_computed,
                block_ids=(int32_bytes(range(first, first + num_blocks)),),
                sampling_params=SamplingParams(
                    temperature=0.8, top_p=0.95, seed=index, ignore_eos=True
                )
                if is_sampled
                else SamplingParams(temperature=0, ignore_eos=True),
            )
            for index, first in enumerate(firsts)
        ]
