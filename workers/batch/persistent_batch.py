"""The worker's persistent batch: the state of every slot, and the layout of a step.

Applying the changes in each `SchedulerOutput` keeps these arrays equal to the scheduler's own.

Shapes: N slots, L max_model_len, B blocks per row, S scheduled slots, T scheduled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from types import MappingProxyType
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.arrays import Int32Array, Int64Array, int32_bytes, int32_view, offsets_in_runs
from ...protocol.config.diffusion import BlockDiffusion
from ...protocol.config.images.settings import SpanKind
from ...protocol.worker_messages import HeldRequest, SchedulerOutput
from ..device.dtypes import AnyArray, HostDevice, on_host, torch_device
from ..device.transfers import to_device
from ..layers.window import SpanLayers, Window
from .rotary_positions import RotaryPositions
from .spans import Spans, VisibleStarts, span_layers, visible_in_blocks, visible_in_canvases

SlotArray: TypeAlias = Int32Array | Int64Array


class AttentionBatch(msgspec.Struct, frozen=True):
    """The requests of a step, as attention sees them in one KV-cache group.

    Tokens `query_start_loc[i] : query_start_loc[i + 1]` of the step belong to request i, at least one. They are the
    last of its `seq_lens[i]` tokens. In a cross-attention group, `seq_lens` are the numbers of encoder outputs, and
    each token attends to all of them. `block_table` may be wider than needed; entries past the sequence are not read.
    `slot_mapping` is the place of each token's keys and values: block id * block size + offset. `visible` is the result
    of `visible_tokens` of `Spans`, or of `VisibleStarts` in a model that is not causal.
    Only `span_layers` apply it. `num_prompt_tokens` are those of each request, which `AfterPrompt` windows read.
    """

    query_start_loc: NDArray[np.int32]  # [S + 1]
    seq_lens: NDArray[np.int32]  # [S], after this step
    block_table: NDArray[np.int32]  # [S, B]
    slot_mapping: NDArray[np.int32]  # [T]
    visible: NDArray[np.int32] | None = None  # [T, 2]
    span_layers: SpanLayers = SpanLayers.ALL
    num_prompt_tokens: NDArray[np.int32] | None = None  # [S]

    def visible_in(self, window: Window | None) -> NDArray[np.int32] | None:
        """Return `visible` if layers with this window apply it, else None."""
        return self.visible if self.span_layers.include(window) else None


class StepPlan(msgspec.Struct):
    """The tokens of a step, in batch order.

    `positions_T` and `slots_T` locate each token. `query_start_loc` int32 [S + 1] delimits the chunks of the slots.
    `seq_lens_S` are the lengths after the step. `sampling_rows` are the batch positions that sample. `rotary_T3` int32
    are the rotary positions if they differ from `positions_T`, else None. `visible_T2` is that of
    `AttentionBatch`.
    """

    slots_S: Int32Array
    num_computed_S: Int32Array
    seq_lens_S: Int32Array
    query_start_loc: Int32Array
    slots_T: Int32Array
    positions_T: Int32Array
    sampling_rows: Int32Array
    rotary_T3: Int32Array | None = None
    visible_T2: Int32Array | None = None
    span_layers: SpanLayers = SpanLayers.ALL

    @property
    def logit_rows(self) -> Int32Array:
        """Index of the last token of each sampling row, int32 [len(sampling_rows)]."""
        return self.query_start_loc[self.sampling_rows + 1] - 1

    def split(self) -> Iterator[StepPlan]:
        """Yield a separate plan for each request."""
        samples_S = np.zeros(len(self.slots_S), np.bool_)
        samples_S[self.sampling_rows] = True
        for row, samples in enumerate(samples_S):
            one, tokens = slice(row, row + 1), slice(*self.query_start_loc[row : row + 2])
            yield StepPlan(
                self.slots_S[one],
                self.num_computed_S[one],
                self.seq_lens_S[one],
                self.query_start_loc[row : row + 2] - self.query_start_loc[row],
                self.slots_T[tokens],
                self.positions_T[tokens],
                np.zeros(int(samples), np.int32),
                None if self.rotary_T3 is None else self.rotary_T3[tokens],
                None if self.visible_T2 is None else self.visible_T2[tokens],
                self.span_layers,
            )


def even_requests(num_tokens: int, num_requests: int, num_computed: int = 0) -> StepPlan:
    """Return a plan in which the first `num_requests` slots share the tokens evenly and all of them sample.

    Each request has `num_computed` computed tokens. Requests without blocks read and write the null block.
    """
    ends = np.arange(num_requests + 1) * num_tokens // num_requests
    num_computed_S = np.full(num_requests, num_computed)
    return plan_chunks(np.arange(num_requests), num_computed_S, np.diff(ends))


def mixed_requests(num_tokens: int, num_requests: int, max_model_len: int) -> StepPlan:
    """Return a plan like `even_requests`, but with one token per request, except the last, which has all others.

    The first request's token is at the second-to-last position of its slot.
    """
    num_scheduled_S = np.ones(num_requests, np.int32)
    num_scheduled_S[-1] = min(num_tokens - num_requests + 1, max_model_len)
    num_computed_S = np.zeros(num_requests, np.int32)
    if num_requests > 1:
        num_computed_S[0] = max(0, max_model_len - 2)
    return plan_chunks(np.arange(num_requests), num_computed_S, num_scheduled_S)


def plan_chunks(slots_S: SlotArray, begins_S: SlotArray, counts_S: SlotArray) -> StepPlan:
    """Return the plan of a step that computes `counts_S` tokens per slot, from position `begins_S` on."""
    query_start_loc = np.concatenate(([0], np.cumsum(counts_S))).astype(np.int32)
    first_S = begins_S - query_start_loc[:-1]
    positions_T = np.arange(query_start_loc[-1]) + np.repeat(first_S, counts_S)
    slots_32 = slots_S.astype(np.int32)
    return StepPlan(
        slots_32,
        begins_S.astype(np.int32),
        (begins_S + counts_S).astype(np.int32),
        query_start_loc,
        np.repeat(slots_32, counts_S),
        positions_T.astype(np.int32),
        sampling_rows=np.arange(len(slots_S), dtype=np.int32),
    )


class PersistentBatch:
    """The state of all requests, indexed by slot.

    Token ids are on the device, so that sampled tokens never have to leave it, or with `keeps_tokens_on_host` on the
    host, where drafts are looked up. `rotary` has the rotary positions, if a model has several per token,
    which may count the images (`numbers_images`).
    `source_sizes` has the maximum number of encoder outputs for each cross-attention group. `diffusion` are the blocks
    of a block-diffusion model, and `canvas_window` is the window of layers with one, if its blocks are canvases.
    """

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        device: torch.device | HostDevice,
        *,
        has_rotary_axes: bool = False,
        numbers_images: bool = False,
        span_kind: SpanKind | None = None,
        source_sizes: Mapping[int, int] = MappingProxyType({}),
        keeps_tokens_on_host: bool = False,
        diffusion: BlockDiffusion | None = None,
        canvas_window: int = 0,
    ) -> None:
        if diffusion is not None:
            max_model_len += diffusion.max_excess_tokens
        blocks_per_row = -(-max_model_len // block_size) + 1
        self.source_sizes = source_sizes
        self.num_slots = num_slots
        self.block_size = block_size
        self._device = device
        self.max_model_len = max_model_len
        # Padding reads and writes the row after the last slot.
        shape = (num_slots + 1, max_model_len)
        self.keeps_tokens_on_host = keeps_tokens_on_host
        self._host_token_ids_NL: Int32Array | None = None
        self.token_ids_NL: AnyArray
        if keeps_tokens_on_host or device.type == "cpu":
            # numpy's zeros take no memory until they are written, and numpy indexes a few rows ten times as fast as
            # torch.
            self._host_token_ids_NL = np.zeros(shape, np.int32)
            self.token_ids_NL = self._host_token_ids_NL
            if not isinstance(device, HostDevice):
                self.token_ids_NL = torch.from_numpy(self._host_token_ids_NL)
        else:
            self.token_ids_NL = torch.zeros(shape, dtype=torch.int32, device=torch_device(device))
        self.num_tokens = np.zeros(num_slots, np.int32)
        self.num_prompt_tokens = np.zeros(num_slots, np.int32)
        self.num_computed_tokens = np.zeros(num_slots, np.int32)
        self.source_lens = np.zeros(num_slots, np.int32)
        """Number of encoder outputs that each slot's cross attention reads; 0 if there are none."""
        self.block_tables = [
            np.zeros(
                (num_slots, max(blocks_per_row, -(-source_sizes.get(group, 0) // block_size))),
                np.int32,
            )
            for group in range(num_groups)
        ]
        self.device_block_tables: list[torch.Tensor] = []
        self.rotary: RotaryPositions | None = None
        if has_rotary_axes:
            self.rotary = RotaryPositions(num_slots, numbers_images=numbers_images)
        self._spans = None if span_kind is None else Spans(span_kind)
        self._visible_starts = VisibleStarts()
        self._diffusion = diffusion
        self._canvas_window = canvas_window
        self._span_layers = span_layers(span_kind)
        self._slots_S: Int32Array = np.zeros(0, np.int32)
        self._requests: dict[int, tuple[tuple[int, int], float]] = {}

    @property
    def device(self) -> torch.device:
        """The device on which the token ids are."""
        return torch_device(self._device)

    @property
    def host_token_ids_NL(self) -> Int32Array:
        """The tokens of every slot, on a CPU or with `keeps_tokens_on_host`."""
        assert self._host_token_ids_NL is not None
        return self._host_token_ids_NL

    def with_own_lengths(self, group: int) -> PersistentBatch:
        """Return a batch that shares this one's tokens and the block table of one KV-cache group.

        It counts known and computed tokens itself, from 0.
        """
        other = copy(self)
        other.num_tokens = np.zeros(self.num_slots, np.int32)
        other.num_computed_tokens = np.zeros(self.num_slots, np.int32)
        other.block_tables = [self.block_tables[group]]
        other.device_block_tables = self.device_block_tables[group : group + 1]
        other.rotary = None
        other.source_sizes = MappingProxyType({})
        return other

    def mirror_block_tables(self) -> None:
        """Keep a copy of `block_tables` on the device from now on, with one more row for padding."""
        if self.device_block_tables:
            return
        self.device_block_tables = [
            torch.zeros((len(table) + 1, table.shape[1]), dtype=torch.int32, device=self.device)
            for table in self.block_tables
        ]

    def release_requests(self) -> list[HeldRequest]:
        """Free every slot.

        Return the requests that were in the slots, with the tokens and blocks that the KV cache holds.
        """
        # The first step of the next core lists its slots.
        self._slots_S = np.zeros(0, np.int32)
        requests, self._requests = self._requests, {}
        held = []
        for slot, (request_id, arrival_time) in requests.items():
            num_computed = int(self.num_computed_tokens[slot])
            num_blocks = -(-num_computed // self.block_size)
            block_ids = tuple(int32_bytes(table[slot, :num_blocks]) for table in self.block_tables)
            held.append(HeldRequest(request_id, arrival_time, num_computed, block_ids))
        return held

    def apply_output(self, output: SchedulerOutput) -> None:
        """Apply a step's changes of slots and block tables."""
        if output.removed_slots:
            for slot in int32_view(output.removed_slots).tolist():
                del self._requests[slot]
        for new in output.new_requests:
            tokens = int32_view(new.token_ids)
            slot = new.slot
            self._requests[slot] = new.request_id, new.arrival_time
            if self._host_token_ids_NL is not None:
                self._host_token_ids_NL[slot, : len(tokens)] = tokens
            else:
                # torch requires a writable array, but the bytes of the message are read-only.
                self.token_ids_NL[slot, : len(tokens)] = to_device(tokens.copy(), self.device)
            self.num_tokens[slot] = len(tokens)
            self.num_prompt_tokens[slot] = new.num_prompt_tokens
            self.num_computed_tokens[slot] = new.num_computed_tokens
            if self.rotary is not None:
                self.rotary.add_request(slot, new.encoder_inputs)
            if self._spans is not None:
                self._spans.add_request(slot, new.num_prompt_tokens, new.encoder_inputs)
            if new.pooling_params is not None:
                self._visible_starts.add_request(slot, new.pooling_params.num_visible)
            for table, block_ids in zip(self.block_tables, new.block_ids, strict=True):
                blocks = int32_view(block_ids)
                table[slot, : len(blocks)] = blocks
                table[slot, len(blocks) :] = 0
            for table_NB, host_NB in zip(self.device_block_tables, self.block_tables, strict=False):
                table_NB[slot] = to_device(host_NB[slot].copy(), self.device)
        if output.block_updates:
            updates = int32_view(output.block_updates).reshape(-1, 4)
            for group, table in enumerate(self.block_tables):
                rows = updates[updates[:, 0] == group]
                table[rows[:, 1], rows[:, 2]] = rows[:, 3]
                if self.device_block_tables and len(rows):
                    slots, columns, blocks = to_device(rows[:, 1:].T.copy(), self.device)
                    self.device_block_tables[group][slots, columns] = blocks

    def decoding_slots(self, output: SchedulerOutput) -> Int32Array | None:
        """Return the slots of a step in which every slot computes only its last token, else None."""
        slots_S = self.slots_of(output)
        is_last_S = self.num_computed_tokens[slots_S] + 1 == self.num_tokens[slots_S]
        return slots_S if len(slots_S) and is_last_S.all() else None

    def plan(self, output: SchedulerOutput) -> StepPlan:
        """Return the layout of a step, and advance `num_computed_tokens` past the step's tokens."""
        slots_S = self.slots_of(output)
        num_computed_S = self.num_computed_tokens[slots_S]
        num_scheduled_S = np.ones(len(slots_S), np.int32)
        query_start_loc = np.arange(len(slots_S) + 1, dtype=np.int32)
        slots_T, positions_T = slots_S, num_computed_S
        if output.chunks:
            chunks = int32_view(output.chunks).reshape(-1, 2)
            num_scheduled_S[chunks[:, 0]] = chunks[:, 1]
            if output.drafts:
                # Drafts are verified only in steps in which all requests decode.
                rows, counts = int32_view(output.drafts).reshape(-1, 2).T
                num_scheduled_S[rows] -= counts
            np.cumsum(num_scheduled_S, out=query_start_loc[1:])
            slots_T = np.repeat(slots_S, num_scheduled_S)
            positions_T = np.arange(len(slots_T), dtype=np.int32)
            positions_T += np.repeat(num_computed_S - query_start_loc[:-1], num_scheduled_S)
        seq_lens_S = num_computed_S + num_scheduled_S
        if self._diffusion is not None:
            samples_S = seq_lens_S > self.num_tokens[slots_S]
            not_final = seq_lens_S if self._diffusion.answer_size else self._diffusion.block_size
            self.num_computed_tokens[slots_S] = seq_lens_S - not_final * samples_S
        else:
            samples_S = seq_lens_S == self.num_tokens[slots_S]
            self.num_computed_tokens[slots_S] = seq_lens_S
        sampling_rows = np.flatnonzero(samples_S).astype(np.int32)
        rotary_T3 = None
        if self.rotary is not None:
            rotary_T3 = self.rotary.of_step(slots_S, query_start_loc, positions_T)
        visible_T2: Int32Array | None = None
        if self._diffusion is not None:
            ends_T = np.repeat(seq_lens_S, num_scheduled_S)
            visible_T2 = self._visible_in_diffusion(self._diffusion, slots_T, positions_T, ends_T)
        elif self._spans is not None and output.chunks:
            visible_T2 = self._spans.visible_tokens(slots_S, query_start_loc, positions_T)
        elif output.chunks:
            visible_T2 = self._visible_starts.visible_tokens(slots_S, query_start_loc, seq_lens_S)
        return StepPlan(
            slots_S,
            num_computed_S,
            seq_lens_S,
            query_start_loc,
            slots_T,
            positions_T,
            sampling_rows,
            rotary_T3,
            visible_T2,
            self._span_layers,
        )

    def _visible_in_diffusion(
        self,
        blocks: BlockDiffusion,
        slots_T: Int32Array,
        positions_T: Int32Array,
        ends_T: Int32Array,
    ) -> Int32Array | None:
        if blocks.answer_size:
            return np.stack((positions_T, ends_T), 1).astype(np.int32)
        if blocks.renoising is None:
            return visible_in_blocks(positions_T, blocks.block_size)
        num_known_T = self.num_tokens[slots_T]
        if (positions_T < num_known_T).all():
            return None
        return visible_in_canvases(positions_T, num_known_T, blocks.block_size, self._canvas_window)

    def num_drafts(self, output: SchedulerOutput) -> Int32Array:
        """Return how many drafts of each slot of the last plan the step may verify, int32 [N]."""
        num_drafts_N = np.zeros(self.num_slots, np.int32)
        rows, counts = int32_view(output.drafts).reshape(-1, 2).T
        num_drafts_N[self._slots_S[rows]] = counts
        return num_drafts_N

    def slots_of(self, output: SchedulerOutput) -> Int32Array:
        """Return the slots of a step."""
        if output.slots is not None:
            self._slots_S = int32_view(output.slots)
        return self._slots_S

    def slot_mapping(self, plan: StepPlan, group: int) -> Int32Array:
        """Return the place of each token in the KV cache, int32 [T]; -1 in cross-attention groups, which store none."""
        if group in self.source_sizes:
            return np.full(len(plan.slots_T), -1, np.int32)
        blocks_T = self.block_tables[group][plan.slots_T, plan.positions_T // self.block_size]
        return blocks_T * self.block_size + plan.positions_T % self.block_size

    def attention_batches(self, plan: StepPlan) -> list[AttentionBatch]:
        """Return the plan for each KV-cache group."""
        batches = []
        for group, block_table in enumerate(self.block_tables):
            reads_source = group in self.source_sizes
            lens_S = self.source_lens[plan.slots_S] if reads_source else plan.seq_lens_S
            width = -(-max(int(lens_S.max()), 1) // self.block_size)
            batches.append(
                AttentionBatch(
                    query_start_loc=plan.query_start_loc,
                    seq_lens=lens_S,
                    block_table=block_table[plan.slots_S, :width],
                    slot_mapping=self.slot_mapping(plan, group),
                    visible=None if reads_source else plan.visible_T2,
                    span_layers=plan.span_layers,
                    num_prompt_tokens=self.num_prompt_tokens[plan.slots_S],
                )
            )
        return batches

    def reads_source(self, plan: StepPlan) -> NDArray[np.bool_] | None:
        """Return for each token whether cross attention has something to read, bool [T]; None if it never has."""
        reads_T = self.source_lens[plan.slots_T] > 0
        return reads_T if reads_T.any() else None

    def input_ids(self, plan: StepPlan) -> AnyArray:
        """Return the step's tokens, int32 [T]: a tensor on the device, or a numpy array if they are on the host."""
        if self._host_token_ids_NL is not None:
            return self._host_token_ids_NL[plan.slots_T, plan.positions_T]
        return self.token_ids_NL[self._index(plan.slots_T, plan.positions_T)]

    def earlier_tokens(self, plan: StepPlan, count: int) -> Int32Array:
        """Return the `count` tokens before each of a step, int32 [T, count], the last one first; -1 for none."""
        columns = plan.positions_T[:, None] - np.arange(1, count + 1)
        found = self.host_token_ids_NL[plan.slots_T[:, None], np.maximum(columns, 0)]
        return np.where(columns < 0, np.int32(-1), found)

    def tokens_at(self, slot: int, begin: int, end: int) -> AnyArray:
        """Return the tokens of a slot at these positions, int32 [end - begin]: a tensor on the device, or an array."""
        token_ids = self.token_ids_NL[slot, begin:end]
        return token_ids.to(self.device) if self.keeps_tokens_on_host else token_ids

    def append_tokens(self, slots: Int32Array, token_ids: AnyArray) -> None:
        """Append one sampled token to each of `slots`; `token_ids` are int [len(slots)] on the device."""
        self.store_tokens(slots, self.reserve_columns(slots), token_ids)

    def write_drafts(self, slots: SlotArray, counts: Int32Array, token_ids: Int32Array) -> None:
        """Write drafts after the tokens of slots: slot i gets `counts[i]` of the concatenated `token_ids`."""
        offsets = offsets_in_runs(counts)
        columns = np.repeat(self.num_tokens[slots], counts) + offsets
        self.host_token_ids_NL[np.repeat(slots, counts), columns] = token_ids

    def store_verified(self, slots: Int32Array, tokens_RK: Int32Array) -> None:
        """Append the tokens that a step with drafts sampled for each of `slots`, followed by -1."""
        is_sampled_RK = tokens_RK >= 0
        counts = is_sampled_RK.sum(1).astype(np.int32)
        self.write_drafts(slots, counts, tokens_RK[is_sampled_RK])
        self.num_tokens[slots] += counts
        self.num_computed_tokens[slots] = self.num_tokens[slots] - 1

    def reserve_columns(self, slots: Int32Array) -> Int32Array:
        """Reserve a column for the token that each of `slots` samples. Return the columns, for `store_tokens`."""
        columns = self.num_tokens[slots]
        self.num_tokens[slots] = columns + 1
        return columns

    def store_tokens(self, slots: Int32Array, columns: Int32Array, token_ids: AnyArray) -> None:
        """Write tokens, int [len(slots)] on the device, to reserved columns."""
        if self._host_token_ids_NL is not None:
            self._host_token_ids_NL[slots, columns] = on_host(token_ids)
        else:
            self.token_ids_NL[self._index(slots, columns)] = token_ids.to(torch.int32)

    def _index(self, slots: Int32Array, columns: Int32Array) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns_of_rows = to_device(np.stack((slots, columns)), self.device)
        return rows, columns_of_rows
