"""The KV cache of one worker's layers: its memory, its CPU offload and the attention metadata of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...protocol.arrays import Int32Array, Int64Array
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import AttentionKind
from ...protocol.worker_messages import SchedulerOutput
from ..attention import PagedAttention
from ..batch import AttentionBatch, PersistentBatch, StepPlan
from ..cpu.attention import NativeAttention
from ..device import host_memory
from ..device.cpu_offload import CPUOffloadCache
from ..dtypes import AnyArray, HostDevice, on_host, torch_device, torch_dtype
from ..kv_transfer.block_memory import BlockMemory
from ..layers.spec import LayerSpec, windows_by_group
from ..models.kv_cache_groups import kv_cache_groups
from ..models.mixers import StateBatch
from .model_loader import Model


class KVCache:
    """The KV cache, without memory until `allocate`.

    `layers` has a tensor for each group that a layer of this worker reads, in the order of the layers: the backend's
    for attention, and uint8 [blocks, bytes] for a recurrent state. The n-th tensors of all groups share one memory,
    because each block belongs to one group. A layer that reads the keys and values of another has the other's tensor.
    Several layers with few elements for a token are parts of one tensor.

    Raises:
        ConfigError: A layer's state does not fit into a block.
    """

    def __init__(self, model: Model, max_model_len: int, device: torch.device | HostDevice) -> None:
        self.groups = kv_cache_groups(model.spec, max_model_len)
        self._kinds_of_state = {x for x in self.groups if x.kind is AttentionKind.STATE_SPACE}
        self.layers: list[AnyArray] = []
        self.memory: BlockMemory | None = None
        """The blocks as bytes, once they are allocated."""
        self._attention = model.attention
        self._device = device
        own_layers = model.spec.layers[model.shard.layers.start : model.shard.layers.stop]
        self._group_of_cache = [group for layer in own_layers for group in layer.cache_groups]
        self._attention_by_group = _attention_by_group(own_layers, model)
        self._places = _places(own_layers, model)
        self._num_tensors = 1 + max((place.tensor for place in self._places), default=0)
        self.windows_by_group = windows_by_group(own_layers, len(self.groups))
        self._recurrent_by_group = model.spec.recurrent_by_group
        self._page_bytes = self._bytes_of_layer(own_layers, model)
        self._cpu_offload: CPUOffloadCache | None = None
        self.num_blocks = 0
        self._followers: list[KVCache] = []

    def add_follower(self, other: KVCache) -> None:
        """Allocate `other` with this cache. Its layers are at the places of this cache's blocks of full attention.

        If its blocks have the size of this cache's in one layer, they are copied and stored as parts of these.
        """
        self._followers.append(other)

    @property
    def has_states(self) -> bool:
        """True if the model has recurrent layers."""
        return any(self._recurrent_by_group)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group in this worker, and over those of followers."""
        own = self._page_bytes * self._num_tensors
        return own + sum(other.block_bytes for other in self._followers)

    def _bytes_of_layer(self, layers: Sequence[LayerSpec], model: Model) -> int:
        """Return the bytes of a block in one layer, which are equal for attention and states."""
        attention = self._attention
        num_bytes = math.prod(attention.kv_cache_shape(1)) * attention.dtype.itemsize
        ranks, input_bytes = model.shard.tensor_parallel.size, model.hidden_dtype.itemsize
        largest = max(
            (
                layer.recurrent.state_size(ranks).num_bytes(input_bytes)
                for layer in layers
                if layer.recurrent is not None
            ),
            default=0,
        )
        if largest > num_bytes:
            needed = -(-largest * attention.block_size // num_bytes)
            raise ConfigError(
                f"--block-size {attention.block_size}: the state of a recurrent layer has {largest} bytes, and a block of "
                f"one layer {num_bytes}; use at least --block-size {needed}, or omit it"
            )
        return num_bytes

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the cache and, if `num_host_blocks` is not 0, the CPU offload."""
        self.num_blocks = num_blocks
        shape = self._attention.kv_cache_shape(num_blocks)
        memories = [
            _zeros(num_blocks * self._page_bytes, self._device) for _ in range(self._num_tensors)
        ]
        tensors = [memory.view(self._element_type) for memory in memories]
        pages = [memory.reshape(num_blocks, self._page_bytes) for memory in memories]
        for other in self._followers:
            other.allocate(num_blocks)
            if other.memory is not None and other.memory.page_bytes == self._page_bytes:
                pages += other.memory.pages
        self.memory = BlockMemory(pages)
        self.layers = []
        for group, place in zip(self._group_of_cache, self._places, strict=True):
            if self._recurrent_by_group[group] is not None:
                self.layers.append(pages[place.tensor])
            elif self._attention.spec.tensor_elements:
                self.layers.append(tensors[place.tensor][place.first_element :])
            else:
                self.layers.append(tensors[place.tensor].reshape(shape))
        if self._device.type == "cpu":
            host_memory.populate([on_host(memory) for memory in memories])
        if num_host_blocks:
            self._cpu_offload = CPUOffloadCache(num_host_blocks, pages)

    @property
    def _element_type(self) -> Any:
        """The dtype of keys and values, or one of numpy with elements of that size."""
        dtype = self._attention.dtype
        if isinstance(self._device, HostDevice):
            return np.dtype(f"u{dtype.itemsize}")
        return torch_dtype(dtype)

    def limit_drafts(self, num_drafts_S: Int32Array, num_tokens_S: Int32Array) -> Int32Array:
        """Return how many drafts a step may compute after the known tokens of each row.

        Rejected drafts then leave nothing to undo. Whatever verifies drafts must not compute more.
        """
        for group in self._kinds_of_state:
            num_drafts_S = group.limit_drafts(
                num_drafts_S, num_tokens_S, self._attention.block_size
            )
        return num_drafts_S

    def limit_proposals(
        self, num_drafts_S: Int32Array, num_tokens_S: Int64Array, num_unwritten: int
    ) -> Int32Array:
        """Return how many drafts may be proposed after the known tokens of each row, at most `num_drafts_S`.

        A proposer writes keys and values of the last known token and of its drafts but the last `num_unwritten` ones.
        With states, a request may have no block behind that of its last computed token.
        """
        if not self.has_states:
            return num_drafts_S
        tokens_S: Int32Array = num_tokens_S.astype(np.int32)
        most_S = (1 - tokens_S) % self._attention.block_size + num_unwritten - 1
        return np.minimum(self.limit_drafts(num_drafts_S, tokens_S), most_S.clip(0))

    def free(self) -> None:
        """Free the cache."""
        self.layers = []
        self.memory = None

    def copy_out(self, output: SchedulerOutput) -> None:
        """Copy blocks to the CPU offload, as the step says."""
        if self._cpu_offload is not None and output.host_copies_out:
            self._cpu_offload.copy_out(output.host_copies_out)

    def copy_in(self, output: SchedulerOutput) -> None:
        """Copy blocks back from the CPU offload, as the step says."""
        if self._cpu_offload is not None and output.host_copies_in:
            self._cpu_offload.copy_in(output.host_copies_in)

    def attention_metadata(self, batch: PersistentBatch, plan: StepPlan) -> list[Any]:
        """Return the metadata of the step for each group: the attention backend's, or a `StateBatch`."""
        batches = batch.attention_batches(plan)
        # A native program reads states by their block tables, and clears new blocks itself.
        is_native = isinstance(self._attention, NativeAttention)
        if self.has_states and self._device.type == "cpu" and not is_native:
            self._clear_new_blocks(batches)
        return [
            attention.build(group_batch, windows)
            if layer is None or is_native
            else StateBatch.build(
                group_batch, self._attention.block_size, layer, torch_device(self._device)
            )
            for group_batch, windows, layer, attention in zip(
                batches,
                self.windows_by_group,
                self._recurrent_by_group,
                self._attention_by_group,
                strict=True,
            )
        ]

    def storing_metadata(self, group: int, batch: AttentionBatch) -> Any:
        """Return the metadata with which `batch`, which attends to nothing, is stored in a group."""
        return self._attention_by_group[group].build(batch, ())

    def _clear_new_blocks(self, batches: Sequence[AttentionBatch]) -> None:
        """Clear the blocks whose first token is computed in a step.

        They may have held a state, which is no number as keys and values. The attention on the CPU multiplies the
        unused part of a block by 0, which is not 0 for a value that is no number.
        """
        block_size = self._attention.block_size
        for cache, group in zip(self.layers, self._group_of_cache, strict=True):
            if self._recurrent_by_group[group] is None:
                slots_T = batches[group].slot_mapping
                blocks = slots_T[slots_T % block_size == 0] // block_size
                cache[torch.from_numpy(blocks)] = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """The tensor of a layer's cache, and the first of the layer's elements in the tensor."""

    tensor: int
    first_element: int = 0


def _places(layers: Sequence[LayerSpec], model: Model) -> list[_Place]:
    """Return the place of each tensor in `KVCache.layers`."""
    ranks = model.shard.tensor_parallel.size
    num_caches: Counter[int] = Counter()
    place_of_layer: dict[int, _Place] = {}
    places = []
    for index, layer in zip(model.shard.layers, layers, strict=True):
        if layer.kv_source is not None:
            places.append(place_of_layer[layer.kv_source])
            continue
        for group in layer.cache_groups:
            cache = num_caches[group]
            num_caches[group] += 1
            place = _Place(cache)
            if model.attention.spec.tensor_elements:
                size = model.spec.token_elements(layer, ranks)
                tensor, position = divmod(cache, model.attention.spec.tensor_elements // size)
                own = model.attention.for_layer(model.spec.for_layer(layer), model.shard)
                place = _Place(tensor, position * own.elements_of_layer)
            place_of_layer.setdefault(index, place)
            places.append(place)
    return places


def _attention_by_group(layers: Sequence[LayerSpec], model: Model) -> list[PagedAttention]:
    """Return the attention of each group's layers, which have equal heads."""
    by_group = {
        layer.kv_cache_group: model.attention.for_layer(model.spec.for_layer(layer), model.shard)
        for layer in layers
        if layer.attends
    }
    if model.spec.source is not None:
        # The outputs of the encoder have no order among the tokens of the decoder.
        cross = model.attention.as_bidirectional()
        by_group |= {layer.cross_group: cross for layer in layers if layer.reads_source}
    num_groups = len(model.spec.windows_by_group)
    return [by_group.get(group, model.attention) for group in range(num_groups)]


def _zeros(num_bytes: int, device: torch.device | HostDevice) -> AnyArray:
    """Return zeros, uint8 [num_bytes]: an array of numpy on a device that stands for torch's."""
    if isinstance(device, HostDevice):
        return host_memory.allocate(num_bytes)
    if device.type == "cpu":
        return torch.from_numpy(host_memory.allocate(num_bytes))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
