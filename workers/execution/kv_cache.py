"""The KV cache of one worker's layers: its memory, its CPU offload, and the attention metadata of steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from ...protocol.arrays import Int32Array, Int64Array
from ...protocol.checkpoint.state_spaces.state_size import StatePart, StateParts
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import AttentionKind
from ...protocol.worker_messages import SchedulerOutput
from ..attention import CapturableAttention, DeviceBatch, PagedAttention
from ..batch import AttentionBatch, PersistentBatch, StepPlan
from ..cpu.attention import NativeAttention
from ..device import host_memory
from ..device.cpu_offload import CPUOffloadCache
from ..device.dtypes import AnyArray, HostDevice, dtype_name, on_host, torch_device, torch_dtype
from ..kv_transfer.block_memory import BlockMemory
from ..kv_transfer.block_regions import Numbers, Region
from ..layers.layer_spec import LayerSpec, windows_by_group
from ..layers.spec import ModelSpec
from ..models.kv_cache_groups import kv_cache_groups
from ..models.mixers import StateBatch
from .model_loader import Model


class KVCache:
    """The KV cache. It has no memory before `allocate`.

    `layers` has one tensor per KV-cache group that a layer of this worker reads, in the order of the layers. For
    attention it has the backend's shape, for a recurrent state it is uint8 [blocks, bytes]. The n-th tensors of all
    groups share the same memory, because each block belongs to one group. A layer that reads the keys and values of
    another layer has the same tensor. Several layers with few elements per token share one tensor.

    Raises:
        ConfigError: The state of a layer does not fit into a block.
    """

    def __init__(self, model: Model, max_model_len: int, device: torch.device | HostDevice) -> None:
        self.groups = kv_cache_groups(model.spec, max_model_len)
        self._kinds_of_state = {x for x in self.groups if x.kind is AttentionKind.STATE_SPACE}
        self.layers: list[AnyArray] = []
        self.memory: BlockMemory | None = None
        """The memory of all blocks as bytes, once it is allocated."""
        self._attention, self._model = model.attention, model
        self._device = device
        own_layers = model.spec.layers[model.shard.layers.start : model.shard.layers.stop]
        self._group_of_cache = [group for layer in own_layers for group in layer.cache_groups]
        self._attention_by_group = attention_by_group(own_layers, model)
        self._places = _places(own_layers, model)
        self._num_tensors = 1 + max((place.tensor for place in self._places), default=0)
        self.windows_by_group = windows_by_group(own_layers, len(self.groups))
        self._recurrent_by_group = model.spec.recurrent_by_group
        self._page_bytes = self._bytes_of_layer(own_layers, model)
        self._cpu_offload: CPUOffloadCache | None = None
        self.num_blocks = 0
        self._followers: list[KVCache] = []
        self._population: host_memory.Population | None = None
        self.num_used_blocks = 0
        """1 + the highest block that was ever assigned to a request. Blocks are first assigned in ascending order."""

    def add_follower(self, other: KVCache) -> None:
        """Allocate the cache `other` (of a draft model or head) together with this one, under the same block numbers.

        If blocks of `other` have the size of this cache's blocks in one layer, they are copied and offloaded as part of
        them.
        """
        self._followers.append(other)

    @property
    def has_states(self) -> bool:
        """True if the model has recurrent layers."""
        return any(self._recurrent_by_group)

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes, over all layers of a group in this worker, including followers."""
        own = self._page_bytes * self._num_tensors
        return own + sum(other.block_bytes for other in self._followers)

    def _bytes_of_layer(self, layers: Sequence[LayerSpec], model: Model) -> int:
        """Return the size in bytes of a block in one layer, the same for attention and for states."""
        attention = self._attention
        num_bytes = math.prod(attention.kv_cache_shape(1)) * attention.dtype.itemsize
        ranks, input_bytes = model.shard.tensor_parallel.size, model.hidden_dtype.itemsize
        largest = max(
            (
                layer.recurrent.state_parts.size(ranks).num_bytes(input_bytes)
                for layer in layers
                if layer.recurrent is not None
            ),
            default=0,
        )
        if largest > num_bytes:
            needed = -(-largest * attention.block_size // num_bytes)
            raise ConfigError(
                f"--block-size {attention.block_size}: a recurrent layer's state has {largest} bytes, but a "
                f"layer's block has only {num_bytes}; use at least --block-size {needed}, or omit it"
            )
        return num_bytes

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the cache and, if `num_host_blocks` is not 0, the CPU offload."""
        self.num_blocks = num_blocks
        shape = self._attention.kv_cache_shape(num_blocks)
        memories = _zeros(self._num_tensors, num_blocks * self._page_bytes, self._device)
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
            self._population = host_memory.Population([on_host(memory) for memory in memories])
        if num_host_blocks:
            self._cpu_offload = CPUOffloadCache(num_host_blocks, pages)

    def regions(self) -> list[Region]:
        """Return the parts of a block that tensor-parallel ranks divide, including followers that are copied.

        The cache must be allocated.
        """
        regions = self._own_regions()
        num_pages = self._num_tensors
        for number, other in enumerate(self._followers):
            memory = other.memory
            if memory is not None and memory.page_bytes == self._page_bytes:
                regions += [
                    replace(each, name=f"{number}.{each.name}", page=num_pages + each.page)
                    for each in other.regions()
                ]
                num_pages += memory.num_pages
        return regions

    def _own_regions(self) -> list[Region]:
        model, size = self._model, self._page_bytes
        if model.spec.compressed is not None:
            # All ranks have all of a block that several layers share.
            own = f"{model.shard.layers.start}-{model.shard.layers.stop}"
            numbers = Numbers(dtype_name(self._attention.dtype))
            return [
                Region(f"{own}.{group}.{page}", group, page, 0, (1,), (size,), 1, size, numbers)
                for group in sorted(set(self._group_of_cache))
                for page in range(self._num_tensors)
            ]
        regions: dict[tuple[int, int, int], list[Region]] = {}
        caches = iter(zip(self._group_of_cache, self._places, strict=True))
        for index in model.shard.layers:
            layer = model.spec.layers[index]
            for group in layer.cache_groups:
                _, place = next(caches)
                name = f"{index}.{group}"
                if layer.recurrent is not None and group == layer.state_group:
                    parts = layer.recurrent.state_parts
                    found = self._state_regions(name, group, place.tensor, parts)
                else:
                    found = self._head_regions(name, group, place, model.spec.for_layer(layer))
                # A layer may read the cache of another one.
                regions.setdefault((group, place.tensor, place.first_element), found)
        return [region for found in regions.values() for region in found if region.counts[0]]

    def _head_regions(self, name: str, group: int, place: _Place, layer: ModelSpec) -> list[Region]:
        item = self._attention.dtype.itemsize
        attention = self._attention.for_layer(layer, self._model.shard)
        return [
            Region(
                f"{name}.{number}",
                group,
                place.tensor,
                (place.first_element + each.first_element) * item,
                (each.count,),
                (each.stride_elements * item,),
                each.num_heads,
                each.unit_elements * item,
                Numbers("float32", each.period, each.num_scale_bytes)
                if each.period
                else Numbers(dtype_name(self._attention.dtype)),
            )
            for number, each in enumerate(attention.head_regions(layer.num_kv_heads))
        ]

    def _state_regions(
        self, name: str, group: int, page: int, parts: StateParts, offset: int = 0
    ) -> list[Region]:
        ranks = self._model.shard.tensor_parallel.size
        inputs_dtype = self._model.hidden_dtype
        item = inputs_dtype.itemsize
        regions: list[Region] = []

        def add(part: StatePart, rows: int, row_bytes: int, element_bytes: int, dtype: str) -> None:
            nonlocal offset
            run_bytes = part.num_elements(ranks) // part.runs * element_bytes
            regions.append(
                Region(
                    f"{name}.{len(regions)}",
                    group,
                    page,
                    offset,
                    (rows, part.runs),
                    (row_bytes, run_bytes),
                    part.units,
                    part.width * element_bytes,
                    Numbers(dtype),
                )
            )
            offset += part.runs * run_bytes

        for part in parts.recurrent:
            add(part, 1, 0, 4, "float32")
        is_native = isinstance(self._attention, NativeAttention)
        tables = (is_native and parts.native_tables) or (len(parts.inputs),)
        inputs, first = iter(parts.inputs), offset
        for num_parts in tables:
            offset, table = first, list(islice(inputs, num_parts))
            row_bytes = sum(part.num_elements(ranks) for part in table) * item
            for part in table:
                add(part, parts.num_inputs, row_bytes, item, dtype_name(inputs_dtype))
            first += parts.num_inputs * row_bytes
        if parts.beside is not None:
            regions += self._state_regions(f"{name}.beside", group, page, parts.beside, first)
        return regions

    def announce_blocks(self, output: SchedulerOutput) -> None:
        """Let the memory be populated in time for the blocks that a step assigns to requests."""
        if not output.new_requests and not output.block_updates:
            return
        of_new = b"".join(chain.from_iterable(new.block_ids for new in output.new_requests))
        last = max(
            np.frombuffer(of_new, np.int32).max(initial=0),
            np.frombuffer(output.block_updates, np.int32)[3::4].max(initial=0),
        )
        if last >= self.num_used_blocks:
            self.num_used_blocks = int(last) + 1
            self.use_blocks(self.num_used_blocks)

    def use_blocks(self, num_blocks: int) -> None:
        """Let the memory of the first `num_blocks` blocks be populated quickly."""
        if self._population is not None:
            self._population.use(num_blocks * self._page_bytes)
        for other in self._followers:
            other.use_blocks(num_blocks)

    @property
    def _element_type(self) -> Any:
        """The dtype of keys and values, or a numpy dtype of the same size in workers without torch."""
        dtype = self._attention.dtype
        if isinstance(self._device, HostDevice):
            return np.dtype(f"u{dtype.itemsize}")
        return torch_dtype(dtype)

    def limit_drafts(self, num_drafts_S: Int32Array, num_tokens_S: Int32Array) -> Int32Array:
        """Return how many drafts a step may compute after the known tokens of each row.

        Within this limit, rejected drafts leave nothing to undo. Code that verifies drafts must not compute more.
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

        Proposing writes keys and values of the last known token and of all drafts but the last `num_unwritten`. With
        recurrent states, a request may have no block after that of its last computed token.
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
        """Copy the blocks that the step lists to the CPU offload."""
        if self._cpu_offload is not None and output.host_copies_out:
            self._cpu_offload.copy_out(output.host_copies_out)

    def copy_in(self, output: SchedulerOutput) -> None:
        """Copy the blocks that the step lists back from the CPU offload."""
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
            attention.build(group_batch if is_native else _with_source(group_batch), windows)
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

    def captured_metadata(self, groups: Sequence[DeviceBatch], max_queries: int) -> list[Any]:
        """Return the metadata of each group for a graph in which a request has up to `max_queries` tokens.

        With recurrent layers it has one. The attention must be capturable.
        """
        captured: list[Any] = []
        for batch, windows, layer, attention in zip(
            groups,
            self.windows_by_group,
            self._recurrent_by_group,
            self._attention_by_group,
            strict=True,
        ):
            if layer is not None:
                captured.append(StateBatch.build_captured(batch, attention.block_size, layer))
                continue
            assert isinstance(attention, CapturableAttention)
            captured.append(attention.build_captured(batch, windows, max_queries))
        return captured

    def storing_metadata(self, group: int, batch: AttentionBatch) -> Any:
        """Return the metadata to store `batch` in a group without computing attention."""
        return self._attention_by_group[group].build(batch, ())

    def _clear_new_blocks(self, batches: Sequence[AttentionBatch]) -> None:
        """Clear the blocks whose first token is computed in a step.

        They may have contained a recurrent state, whose bytes can be NaN if read as keys and values. Attention on the
        CPU multiplies the unused part of a block by 0, which does not remove NaNs.
        """
        block_size = self._attention.block_size
        for cache, group in zip(self.layers, self._group_of_cache, strict=True):
            if self._recurrent_by_group[group] is None:
                slots_T = batches[group].slot_mapping
                blocks = slots_T[slots_T % block_size == 0] // block_size
                cache[torch.from_numpy(blocks)] = 0


def _with_source(batch: AttentionBatch) -> AttentionBatch:
    """Return a batch in which every request has at least one key. The model ignores the effect of a missing one."""
    return batch if batch.seq_lens.all() else replace(batch, seq_lens=batch.seq_lens.clip(min=1))


class _Place(msgspec.Struct, frozen=True):
    """The tensor that contains a layer's cache, and the index of the layer's first element in it."""

    tensor: int
    first_element: int = 0


def _places(layers: Sequence[LayerSpec], model: Model) -> list[_Place]:
    ranks = model.shard.tensor_parallel.size
    num_caches: Counter[int] = Counter()
    place_of_layer: dict[int, _Place] = {}
    places = []
    for index, layer in zip(model.shard.layers, layers, strict=True):
        if layer.cache_source is not None:
            places.append(place_of_layer[layer.cache_source])
            continue
        size, *_ = model.spec.token_elements(layer, ranks)
        for group in layer.cache_groups:
            if layer.compression is not None and group == layer.entries_group:
                first_element = layer.compression.first_element * model.attention.block_size
                places.append(_Place(0, first_element))
                continue
            cache = num_caches[group]
            num_caches[group] += 1
            place = _Place(cache)
            is_state = layer.recurrent is not None and group == layer.state_group
            if model.attention.spec.tensor_elements and not is_state:
                tensor, position = divmod(cache, model.attention.spec.tensor_elements // size)
                own = model.attention.for_layer(model.spec.for_layer(layer), model.shard)
                elements = own.elements_of_layer
                if model.spec.compressed is not None:
                    elements = size * model.attention.block_size
                place = _Place(tensor, position * elements)
            place_of_layer.setdefault(index, place)
            places.append(place)
    return places


def attention_by_group(layers: Sequence[LayerSpec], model: Model) -> list[PagedAttention]:
    """Return the attention of each group's layers, which have equal heads. `layers` are all or some of the model's."""
    by_group = {
        layer.kv_cache_group: model.attention.for_layer(model.spec.for_layer(layer), model.shard)
        for layer in layers
        if layer.attends
    }
    if model.spec.source is not None:
        # Every decoder token may read all outputs of the encoder, so there is no causal mask.
        cross = model.attention.as_bidirectional()
        by_group |= {layer.cross_group: cross for layer in layers if layer.reads_source}
    num_groups = len(model.spec.windows_by_group)
    return [by_group.get(group, model.attention) for group in range(num_groups)]


def _zeros(count: int, num_bytes: int, device: torch.device | HostDevice) -> list[AnyArray]:
    """Return arrays of zeros, each uint8 [num_bytes], of numpy if `device` is a `HostDevice`."""
    if not isinstance(device, HostDevice) and device.type != "cpu":
        return [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
    # In memory of its own, each layer would take up to 2 MiB more than it needs.
    memories = host_memory.allocate_together(count, num_bytes)
    return memories if isinstance(device, HostDevice) else [torch.from_numpy(x) for x in memories]
