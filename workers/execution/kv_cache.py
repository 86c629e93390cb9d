"""The KV cache of one worker's layers: its memory, its CPU offload and the attention metadata of steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import torch

from ...protocol.worker_messages import SchedulerOutput
from ..batch import PersistentBatch, StepPlan
from ..device import host_memory
from ..device.cpu_offload import CPUOffloadCache
from ..models.kv_cache_groups import kv_cache_groups
from .model_loader import Model


class KVCache:
    """The KV cache, without memory until `allocate`. `layers` has a tensor for each of the worker's layers.

    The n-th layers of all groups share one tensor, because each block belongs to one group.
    """

    def __init__(self, model: Model, max_model_len: int, device: torch.device) -> None:
        self.groups = kv_cache_groups(model.spec, max_model_len)
        self.layers: list[torch.Tensor] = []
        self._attention = model.attention
        self._device = device
        own_layers = model.spec.layers[model.shard.layers.start : model.shard.layers.stop]
        self._group_of_layer = [layer.kv_cache_group for layer in own_layers]
        self._num_tensors = max(Counter(self._group_of_layer).values())
        self.windows_by_group = [
            frozenset(layer.window for layer in own_layers if layer.kv_cache_group == group)
            for group in range(len(self.groups))
        ]
        self._cpu_offload: CPUOffloadCache | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a group in this worker."""
        elements = math.prod(self._attention.kv_cache_shape(1))
        return elements * self._attention.dtype.itemsize * self._num_tensors

    def allocate(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        """Allocate the cache and, if `num_host_blocks` is not 0, the CPU offload."""
        shape, dtype = self._attention.kv_cache_shape(num_blocks), self._attention.dtype
        memories = [
            _zeros(math.prod(shape) * dtype.itemsize, self._device)
            for _ in range(self._num_tensors)
        ]
        tensors = [memory.view(dtype).view(shape) for memory in memories]
        next_tensor = {group: iter(tensors) for group in self._group_of_layer}
        self.layers = [next(next_tensor[group]) for group in self._group_of_layer]
        if self._device.type == "cpu":
            host_memory.populate([memory.numpy() for memory in memories])
        if num_host_blocks:
            self._cpu_offload = CPUOffloadCache(num_host_blocks, tensors)

    def free(self) -> None:
        """Free the cache."""
        self.layers = []

    def copy_blocks(self, output: SchedulerOutput) -> None:
        """Copy blocks to the CPU offload and back, as the step says."""
        if self._cpu_offload is not None:
            if output.host_copies_out:
                self._cpu_offload.copy_out(output.host_copies_out)
            if output.host_copies_in:
                self._cpu_offload.copy_in(output.host_copies_in)

    def attention_metadata(self, batch: PersistentBatch, plan: StepPlan) -> list[Any]:
        """Return the attention backend's metadata of the step for each group."""
        return [
            self._attention.build(group_batch, windows)
            for group_batch, windows in zip(
                batch.attention_batches(plan), self.windows_by_group, strict=True
            )
        ]


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(host_memory.allocate(num_bytes))
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
