"""The forward pass of a step on a GPU: one copy of integers to the device, then graphs or kernels.

Shapes: T tokens of a step, R sampled rows, D hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch

from ...protocol.errors import ConfigError
from ..attention import CapturableAttention
from ..batch import PersistentBatch, StepPlan, even_requests
from ..device.cuda_graphs import GraphRecorder, SizedGraphs, chunk_sizes, decode_sizes
from ..models.torch_decoder import TorchDecoder
from ..towers.placed import Placed
from .kv_cache import KVCache
from .pipeline import Pipeline
from .step_buffers import DeviceStep, StepBuffers

logger = logging.getLogger(__name__)


class Forwarded(msgspec.Struct, frozen=True):
    """The result of a step, valid until the next one. `step` is the plan on the device.

    If every token of a step is sampled from, its graph also computes the `logits_RV` and the most likely tokens,
    `greedy_R`. If the tokens of requests are on the device, it appends these to them. A later `append_tokens` replaces
    them.
    """

    hidden_TD: torch.Tensor
    step: DeviceStep
    logits_RV: torch.Tensor | None = None
    greedy_R: torch.Tensor | None = None


class DeviceForward:
    """Runs plans of up to `max_tokens` tokens. Once constructed, it mirrors the block tables of `batch` on the device.

    With a recorder, steps of up to `max_graph_size` tokens run from graphs, unless the attention of `model` cannot be
    captured.
    """

    def __init__(
        self,
        model: TorchDecoder,
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
        if model.spec.num_earlier_tokens and batch.keeps_tokens_on_host:
            raise ConfigError(
                "this model reads earlier tokens, which needs them on the GPU; remove --speculative-config"
            )
        loras = model.loras
        self._buffers = StepBuffers(
            batch,
            max_tokens,
            model.spec.num_token_ids,
            None if loras is None else loras.number_by_slot,
        )
        if not model.shard.is_first:
            shape = (max_tokens, model.received_width)
            self._received_TD = torch.zeros(shape, dtype=model.hidden_dtype, device=batch.device)
        self._decodes: SizedGraphs | None = None
        self._chunks: SizedGraphs | None = None
        # A step cannot have more tokens than fit into all slots, and a larger one could not be captured.
        max_graph_size = min(max_graph_size, max_tokens, batch.num_slots * batch.max_model_len)
        if recorder is None or not max_graph_size:
            return
        if not isinstance(model.attention, CapturableAttention):
            logger.info("no CUDA graphs: %s cannot be captured", type(model.attention).__name__)
            return
        self._add_graphs(recorder, max_graph_size)

    def _add_graphs(self, recorder: GraphRecorder, max_size: int) -> None:
        if not self._kv_cache.has_states:
            # The number of segments of recurrent layers is known only on the host, unless each request has one token.
            self._chunks = SizedGraphs(self._run_chunks, chunk_sizes(max_size), recorder)
        largest = min(max_size, self._batch.num_slots)
        self._decodes = SizedGraphs(self._run_decode, decode_sizes(largest), recorder)

    def drop_graphs(self) -> None:
        """Drop all graphs, because the KV cache has moved."""
        for graphs in (self._decodes, self._chunks):
            if graphs is not None:
                graphs.drop_graphs()

    def captures(self) -> list[list[Callable[[], None]]]:
        """Return functions that capture one graph each, in one list per kind of graph, largest first."""
        return [
            [partial(self._capture, graphs, size) for size in reversed(graphs.sizes)]
            for graphs in (self._chunks, self._decodes)
            if graphs is not None
        ]

    def __call__(self, plan: StepPlan, placed: Placed | None = None) -> Forwarded:
        """Run a step. `placed` are the encoder outputs that its tokens read, if any."""
        num_tokens, num_requests = len(plan.positions_T), len(plan.slots_S)
        self._model.placed = placed
        if self._model.spec.source is not None:
            reads_T = self._batch.reads_source(plan)
            device = self._batch.device
            self._model.reads_T1 = (
                None if reads_T is None else torch.from_numpy(reads_T)[:, None].to(device)
            )
        if placed is not None or plan.visible_T2 is not None:
            # The number of outputs is different in each step, and graphs have no spans.
            step = self._fill(plan, num_tokens, num_requests)
            metadata = self._kv_cache.attention_metadata(self._batch, plan)
            return Forwarded(self._forward(step, metadata), step)
        if self._decodes is not None and len(plan.sampling_rows) == num_tokens:
            size = self._decodes.size_for(num_tokens)
            if size is not None:
                step = self._fill(plan, size, size)
                results = self._decodes.replay(size)
                hidden_TD, *chosen = self._without_kept(results, num_tokens)
                return Forwarded(hidden_TD, step, *chosen)
        if self._chunks is not None:
            size = self._chunks.size_for(num_tokens)
            if size is not None:
                step = self._fill(plan, size, self._max_requests(size))
                (hidden_TD,) = self._without_kept(self._chunks.replay(size), num_tokens)
                return Forwarded(hidden_TD, step)
        step = self._fill(plan, num_tokens, num_requests)
        metadata = self._kv_cache.attention_metadata(self._batch, plan)
        return Forwarded(self._forward(step, metadata), step)

    def append_tokens(self, step: DeviceStep, token_ids_R: torch.Tensor) -> None:
        """Append the next token, int [R], to the request of each sampled row, unless tokens are kept on the host."""
        self._append(step.token_index_T.index_select(0, step.logit_rows_R), token_ids_R)

    def _append(self, index_R: torch.Tensor, token_ids_R: torch.Tensor) -> None:
        if not self._batch.keeps_tokens_on_host:
            self._model.kernels.append_tokens(self._batch.token_ids_NL, index_R, token_ids_R)

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
            self._buffers.fill(plan, size, self._max_requests(size))
        graphs.capture(size)

    def _max_requests(self, num_tokens: int) -> int:
        """Return the maximum number of requests that can share these tokens."""
        return min(num_tokens, self._batch.num_slots)

    def _run_decode(self, size: int) -> list[torch.Tensor]:
        """Run a step in which each request has at most one token, and all sample. Return the tensors of `Forwarded`."""
        step = self._buffers.view(size, size)
        metadata = self._build_captured(step, max_queries=1)
        hidden_SD = self._forward(step, metadata)
        if not self._model.shard.is_last:
            return [hidden_SD]
        kept = self._kept_hidden()
        logits_SV = self._model.compute_logits(hidden_SD)
        greedy_S = self._model.kernels.choose_greedy(logits_SV)
        self._append(step.token_index_T, greedy_S)
        return [*kept, hidden_SD, logits_SV, greedy_S]

    def _run_chunks(self, size: int) -> list[torch.Tensor]:
        """Run a step of any kind. Return its hidden states, after those that the model keeps, if any."""
        step = self._buffers.view(size, self._max_requests(size))
        hidden_TD = self._forward(step, self._build_captured(step, max_queries=size))
        return [*self._kept_hidden(), hidden_TD]

    def _kept_hidden(self) -> list[torch.Tensor]:
        """Return the hidden states that the model has kept, if it keeps any."""
        kept_TE = self._model.kept_hidden_TE
        return [] if kept_TE is None else [kept_TE]

    def _without_kept(self, results: list[torch.Tensor], num_tokens: int) -> list[torch.Tensor]:
        """Return the first rows of a graph's results. Kept hidden states are moved from the results to the model."""
        results = [x[:num_tokens] for x in results]
        if self._model.kept_width:
            self._model.kept_hidden_TE = results.pop(0)
        return results

    def _earlier_tokens(self, step: DeviceStep, count: int) -> torch.Tensor:
        """Return the `count` tokens before each, [T, count], the last one first; -1 for none."""
        distance_W = torch.arange(1, count + 1, device=step.token_index_T.device)
        index_TW = (step.token_index_T[:, None] - distance_W).clamp(min=0)
        found_TW = self._batch.token_ids_NL.view(-1)[index_TW]
        return found_TW.masked_fill(step.positions_T[:, None] < distance_W, -1)

    def _build_captured(self, step: DeviceStep, max_queries: int) -> list[Any]:
        self._buffers.gather_block_tables(step)
        return self._kv_cache.captured_metadata(step.groups, max_queries)

    def _forward(self, step: DeviceStep, metadata: Sequence[Any]) -> torch.Tensor:
        if not self._model.shard.is_first:
            inputs = self._received_TD[: step.num_tokens]
        elif self._batch.keeps_tokens_on_host:
            inputs = step.input_ids_T
        else:
            inputs = self._batch.token_ids_NL.view(-1).index_select(0, step.token_index_T)
            if count := self._model.spec.num_earlier_tokens:
                self._model.earlier_TW = self._earlier_tokens(step, count)
        self._model.rotary_T3 = step.rotary_T3
        if self._model.loras is not None:
            self._model.loras.device_number_T = step.adapters_T
        return self._model.forward(inputs, step.positions_T, self._kv_cache.layers, metadata)
