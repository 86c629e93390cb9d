"""The integers of a step on the device.

They are in one buffer, which is filled by one copy and keeps its address, as captured graphs require.

Shapes: T tokens and S requests of a step, R sampled rows, G KV-cache groups, B blocks per row; T and S may be padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
import torch

from ...protocol.arrays import Int32Array
from ...protocol.errors import ConfigError
from ..attention.interface import DeviceBatch
from ..batch import PersistentBatch, StepPlan

NO_SLOT: Final = -1
"""Value in `slot_mapping` for padding tokens, whose keys and values are not stored."""

NO_ADAPTER: Final = -1
"""The adapter number of a token without a LoRA adapter."""

MAX_TOKENS: Final = 2**31 - 1
"""Maximum number of tokens of all slots together, because a token's index among them is a 32-bit integer."""

_ALIGNMENT: Final = 4
"""Alignment of arrays in bytes, so that kernels can load 16-byte words."""


class DeviceStep(msgspec.Struct, frozen=True):
    """One step, int32 on the device. Padding tokens use the slot after the last; padding requests have no tokens.

    `token_index_T` is the index of each token in the flattened `PersistentBatch.token_ids_NL`. If that is on the host,
    `input_ids_T` are the tokens, else it is empty. `rotary_T3` are the rotary positions, for models in which these have
    three dimensions. `adapters_T` is the number of each token's LoRA adapter, or -1.
    """

    token_index_T: torch.Tensor
    input_ids_T: torch.Tensor
    positions_T: torch.Tensor
    rotary_T3: torch.Tensor | None
    adapters_T: torch.Tensor
    slots_S: torch.Tensor
    logit_rows_R: torch.Tensor
    groups: list[DeviceBatch]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, including padding."""
        return len(self.token_index_T)


class StepBuffers:
    """Buffers for steps of up to `max_tokens` tokens and as many requests as the batch has slots.

    `num_token_ids` is the size of the model's vocabulary. `adapter_by_slot` has the number of each slot's LoRA
    adapter; None if LoRA is disabled.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        max_tokens: int,
        num_token_ids: int,
        adapter_by_slot: Int32Array | None = None,
    ) -> None:
        self._batch = batch
        self._num_token_ids = num_token_ids
        self._adapter_by_slot = adapter_by_slot
        self._num_groups = len(batch.block_tables)
        num_slots, device = batch.num_slots, batch.device
        if (num_slots + 1) * batch.max_model_len > MAX_TOKENS:
            raise ConfigError(
                f"--max-num-seqs {num_slots} times --max-model-len {batch.max_model_len} exceeds "
                f"{MAX_TOKENS} tokens; lower one of them"
            )
        size = _layout(self._sizes(max_tokens, num_slots, num_slots))[-1].stop
        self._integers = torch.zeros(size, dtype=torch.int32, device=device)
        self._block_tables = [torch.zeros_like(table_NB) for table_NB in batch.device_block_tables]

    def fill(self, plan: StepPlan, num_tokens: int, num_requests: int) -> DeviceStep:
        """Start to copy a plan to the device, padded to these numbers of tokens and requests."""
        layout = _layout(self._sizes(num_tokens, num_requests, len(plan.sampling_rows)))
        is_cuda = self._integers.device.type == "cuda"
        host = torch.empty(layout[-1].stop, dtype=torch.int32, pin_memory=is_cuda)
        array = host.numpy()
        self._pack(plan, [array[section] for section in layout])
        self._integers[: len(host)].copy_(host, non_blocking=True)
        return self.view(num_tokens, num_requests, len(plan.sampling_rows))

    def view(self, num_tokens: int, num_requests: int, num_rows: int = 0) -> DeviceStep:
        """Return the arrays that `fill` writes for a step of this size.

        The array of sampled rows comes last, so that its length does not move the other arrays.
        """
        sizes = self._sizes(num_tokens, num_requests, num_rows)
        sections = [self._integers[section] for section in _layout(sizes)]
        token_index_T, input_ids_T, positions_T, rotary, adapters_T, *requests = sections
        slots_S, seq_lens_S, query_start_loc, *mappings, rows_R = requests
        rotary_T3 = None if self._batch.rotary is None else rotary.view(-1, 3)
        groups = [
            DeviceBatch(query_start_loc, seq_lens_S, block_table[:num_requests], slot_mapping_T)
            for block_table, slot_mapping_T in zip(self._block_tables, mappings, strict=True)
        ]
        return DeviceStep(
            token_index_T,
            input_ids_T,
            positions_T,
            rotary_T3,
            adapters_T,
            slots_S,
            rows_R,
            groups,
        )

    def gather_block_tables(self, step: DeviceStep) -> None:
        """Copy the block-table rows of the step's requests to the step's contiguous table."""
        for group, table_NB in zip(step.groups, self._batch.device_block_tables, strict=True):
            torch.index_select(table_NB, 0, step.slots_S, out=group.block_table)

    def _sizes(self, num_tokens: int, num_requests: int, num_rows: int) -> list[int]:
        mappings = [num_tokens] * self._num_groups
        requests = [num_requests, num_requests, num_requests + 1]
        num_rotary = 0 if self._batch.rotary is None else 3 * num_tokens
        num_adapters = 0 if self._adapter_by_slot is None else num_tokens
        num_inputs = num_tokens if self._batch.keeps_tokens_on_host else 0
        tokens = [num_tokens, num_inputs, num_tokens, num_rotary, num_adapters]
        return [*tokens, *requests, *mappings, num_rows]

    def _pack(self, plan: StepPlan, sections: Sequence[Int32Array]) -> None:
        token_index_T, input_ids_T, positions_T, rotary, adapters_T, *requests = sections
        slots_S, seq_lens_S, query_start_loc, *mappings, rows_R = requests
        max_model_len, num_slots = self._batch.max_model_len, self._batch.num_slots
        index_T = plan.slots_T * max_model_len + plan.positions_T
        _pad(token_index_T, index_T, num_slots * max_model_len)
        if self._batch.keeps_tokens_on_host:
            # A draft model may know fewer tokens than the model.
            ids_T = np.minimum(self._batch.input_ids(plan), np.int32(self._num_token_ids - 1))
            _pad(input_ids_T, ids_T, 0)
        _pad(positions_T, plan.positions_T, 0)
        if self._batch.rotary is not None:
            rotary_T3 = plan.rotary_T3
            _pad(
                rotary,
                np.repeat(plan.positions_T, 3) if rotary_T3 is None else rotary_T3.ravel(),
                0,
            )
        if self._adapter_by_slot is not None:
            _pad(adapters_T, self._adapter_by_slot[plan.slots_T], NO_ADAPTER)
        _pad(slots_S, plan.slots_S, num_slots)
        _pad(seq_lens_S, plan.seq_lens_S, 0)
        _pad(query_start_loc, plan.query_start_loc, plan.query_start_loc[-1])
        for group, mapping_T in enumerate(mappings):
            _pad(mapping_T, self._batch.slot_mapping(plan, group), NO_SLOT)
        rows_R[:] = plan.logit_rows


def _layout(sizes: Sequence[int]) -> list[slice]:
    """Return the offsets of consecutive, aligned arrays with these sizes."""
    padded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
    starts = accumulate(padded, initial=0)
    return [slice(start, start + size) for start, size in zip(starts, sizes, strict=False)]


def _pad(target: Int32Array, values: Int32Array, padding: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = padding
