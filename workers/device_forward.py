"""A step's forward pass on a device with a queue of its own: one copy of integers, then graphs or kernels.

Shapes: T tokens of a step, R sampled rows, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .attention import CapturableAttention
from .attention.graph_break import BreakingAttention, CurrentMetadata
from .batch import PersistentBatch, StepPlan, even_requests
from .cuda_graphs import GraphRecorder, SizedGraphs, chunk_sizes, decode_sizes
from .kv_cache import KVCache
from .model_loader import Model
from .pipeline import Pipeline
from .sampling import choose_greedy
from .step_buffers import DeviceStep, StepBuffers


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a step has come to, good until the next one. `step` is the plan where the device has it.

    Where all tokens of the step are sampled from, a graph has gone on: to their `logits_RV`, and to `greedy_R`, what
    `choose_greedy` makes of them, which are the requests' next tokens unless others are appended.
    """

    hidden_TD: torch.Tensor
    step: DeviceStep
    logits_RV: torch.Tensor | None = None
    greedy_R: torch.Tensor | None = None


class DeviceForward:
    """Runs plans of up to `max_tokens` tokens. The block tables of `batch` are mirrored from now on.

    With a recorder it captures steps of up to `max_graph_size` tokens; the attention of `model` is then a
    `BreakingAttention`.
    """

    def __init__(
        self,
        model: Model,
        batch: PersistentBatch,
        kv_cache: KVCache,
        pipeline: Pipeline,
        max_tokens: int,
        recorder: GraphRecorder | None = None,
        max_graph_size: int = 0,
    ) -> None:
        self._model = model
        self._batch = batch
        self._kv_cache = kv_cache
        self._pipeline = pipeline
        batch.mirror_block_tables()
        self._buffers = StepBuffers(batch, max_tokens)
        if not model.shard.is_first:
            self._received_TD = self._hidden_states(max_tokens)
        self._current = [CurrentMetadata() for _ in kv_cache.groups]
        self._decodes: SizedGraphs | None = None
        self._chunks: SizedGraphs | None = None
        max_graph_size = min(max_graph_size, max_tokens)
        if recorder is not None and max_graph_size:
            self._add_graphs(recorder, max_graph_size)

    def _add_graphs(self, recorder: GraphRecorder, max_size: int) -> None:
        attention = self._model.attention
        assert isinstance(attention, BreakingAttention)
        self._hidden_TD = self._hidden_states(max_size)
        arguments = recorder, attention.breaker
        self._chunks = SizedGraphs(self._run_chunks, chunk_sizes(max_size), *arguments)
        if isinstance(attention.backend, CapturableAttention):
            largest = min(max_size, self._batch.num_slots)
            run_decode = partial(self._run_decode, attention.backend)
            self._decodes = SizedGraphs(run_decode, decode_sizes(largest), *arguments)
            if self._model.shard.is_last:
                device, vocab_size = self._batch.device, self._model.spec.vocab_size
                self._logits_SV = torch.zeros((largest, vocab_size), device=device)
                self._greedy_S = torch.zeros(largest, dtype=torch.int64, device=device)

    def _hidden_states(self, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self._model.spec.hidden_size)
        return torch.zeros(shape, dtype=self._model.hidden_dtype, device=self._batch.device)

    def forget_graphs(self) -> None:
        """The KV cache is not where it was when they were captured."""
        for graphs in (self._decodes, self._chunks):
            if graphs is not None:
                graphs.forget()

    def captures(self) -> list[list[Callable[[], None]]]:
        """What captures the graphs, one each: those of each kind, the largest first."""
        return [
            [partial(self._capture, graphs, size) for size in reversed(graphs.sizes)]
            for graphs in (self._chunks, self._decodes)
            if graphs is not None
        ]

    def __call__(self, plan: StepPlan) -> Forwarded:
        num_tokens, num_requests = len(plan.positions_T), len(plan.slots_S)
        if self._decodes is not None and len(plan.sampling_rows) == num_tokens:
            size = self._decodes.size_for(num_tokens)
            if size is not None:
                step = self._fill(plan, size, size)
                self._decodes.replay(size)
                hidden_TD = self._hidden_TD[:num_tokens]
                if not self._model.shard.is_last:
                    return Forwarded(hidden_TD, step)
                logits_RV, greedy_R = self._logits_SV[:num_tokens], self._greedy_S[:num_tokens]
                return Forwarded(hidden_TD, step, logits_RV, greedy_R)
        size = None if self._chunks is None else self._chunks.size_for(num_tokens)
        step = self._fill(plan, size or num_tokens, num_requests)
        if self._chunks is not None and size is not None:
            self._set_current(plan)
            self._chunks.replay(size)
            return Forwarded(self._hidden_TD[:num_tokens], step)
        metadata = self._kv_cache.attention_metadata(self._batch, plan)
        return Forwarded(self._forward(step, metadata), step)

    def append(self, step: DeviceStep, token_ids_R: torch.Tensor) -> None:
        """The sampled rows' requests have these next tokens, int [R]."""
        rows_R = step.logit_rows_R
        self._append(step.slots_T[rows_R], step.positions_T[rows_R], token_ids_R)

    def _append(
        self, slots_R: torch.Tensor, positions_R: torch.Tensor, token_ids_R: torch.Tensor
    ) -> None:
        self._batch.token_ids_NL[slots_R, positions_R + 1] = token_ids_R.to(torch.int32)

    def _fill(self, plan: StepPlan, num_tokens: int, num_requests: int) -> DeviceStep:
        step = self._buffers.fill(plan, num_tokens, num_requests)
        if not self._model.shard.is_first:
            self._pipeline.receive_hidden(self._received_TD[: len(plan.positions_T)])
        return step

    def _capture(self, graphs: SizedGraphs, size: int) -> None:
        if graphs is self._decodes:
            self._buffers.fill(even_requests(1, 1), size, size)
        else:
            plan = even_requests(size, -(-size // self._batch.max_model_len))
            self._buffers.fill(plan, size, len(plan.slots_S))
            self._set_current(plan)
        graphs.capture(size)

    def _run_decode(self, attention: CapturableAttention, size: int) -> None:
        """A step of requests that have one token each, or none, and all sample."""
        step = self._buffers.view(size, size)
        self._buffers.gather_block_tables(step)
        metadata = [
            attention.build_decode(batch, windows)
            for batch, windows in zip(step.groups, self._kv_cache.windows_by_group, strict=True)
        ]
        self._run(step, metadata)
        if self._model.shard.is_last:
            logits_SV = self._model.compute_logits(self._hidden_TD[:size])
            self._logits_SV[:size] = logits_SV
            greedy_S = choose_greedy(logits_SV)
            self._greedy_S[:size] = greedy_S
            self._append(step.slots_T, step.positions_T, greedy_S.clamp(min=0))

    def _run_chunks(self, size: int) -> None:
        """A step of any kind, of which only the attention, which is not captured, knows the requests."""
        self._run(self._buffers.view(size, 0), self._current)

    def _run(self, step: DeviceStep, metadata: Sequence[Any]) -> None:
        self._hidden_TD[: step.num_tokens] = self._forward(step, metadata)

    def _forward(self, step: DeviceStep, metadata: Sequence[Any]) -> torch.Tensor:
        if self._model.shard.is_first:
            inputs = self._batch.token_ids_NL[step.slots_T, step.positions_T]
        else:
            inputs = self._received_TD[: step.num_tokens]
        return self._model.forward(inputs, step.positions_T, self._kv_cache.layers, metadata)

    def _set_current(self, plan: StepPlan) -> None:
        metadata = self._kv_cache.attention_metadata(self._batch, plan)
        for current, value in zip(self._current, metadata, strict=True):
            current.num_tokens = len(plan.positions_T)
            current.value = value
