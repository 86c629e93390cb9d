"""The CPU KV offload: copy blocks from the device's KV cache to host memory, and back.

Shapes: N host blocks, L cache tensors (the layers of a group), P words of one block in one of them, k copied blocks.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.arrays import Int64Array, int32_view
from . import host_memory
from .dtypes import AnyArray, on_host
from .pinned_memory import pin
from .transfers import to_device

STAGED_BYTES: Final = 128 * 1024 * 1024
"""Number of bytes that are copied at once.

This limit keeps a long prefix from needing as much device memory again for its copy.
"""


def staging_bytes(block_bytes: int) -> int:
    """Return the maximum device memory that copies take during a step: one batch of blocks going out, two coming in."""
    return 3 * _blocks_at_once(block_bytes, STAGED_BYTES) * block_bytes


def _blocks_at_once(block_bytes: int, staged_bytes: int) -> int:
    return max(1, staged_bytes // block_bytes)


class CPUOffloadCache:
    """Host blocks. Each contains all layers of a block contiguously, so that a block moves in one copy.

    On CUDA the memory is pinned and copied on a separate stream, so that copies out overlap with the step.
    """

    def __init__(
        self,
        num_blocks: int,
        device_caches: list[AnyArray],
        staged_bytes: int = STAGED_BYTES,
    ) -> None:
        # View the tensors as int64 words, because torch does not support indexing for every dtype.
        caches = [
            cache.reshape(len(cache), -1).view(
                np.int64 if isinstance(cache, np.ndarray) else torch.int64
            )
            for cache in device_caches
        ]
        is_on_host = isinstance(caches[0], np.ndarray) or caches[0].device.type == "cpu"
        self._host_caches: list[NDArray[np.int64]] = []
        self._caches: list[torch.Tensor] = []
        if is_on_host:
            self._host_caches = [on_host(cache) for cache in caches]
        else:
            self._caches, self._device = caches, caches[0].device
        shape = (num_blocks, len(caches), caches[0].shape[1])
        block_bytes = math.prod(shape[1:]) * np.dtype(np.int64).itemsize
        self._blocks_at_once = _blocks_at_once(block_bytes, staged_bytes)
        # Pages that were never written take no memory, unless they are pinned.
        memory = host_memory.allocate(num_blocks * block_bytes)
        self._host_blocks_NLP = memory.view(np.int64).reshape(shape)
        self._stream: torch.cuda.Stream | None = None
        if not is_on_host:
            self._blocks_NLP = torch.from_numpy(self._host_blocks_NLP)
            self._stream = torch.cuda.Stream(self._device)
            pin(memory, block_bytes, self, self._stream.synchronize)

    def copy_out(self, pairs: bytes) -> None:
        """Copy blocks to host blocks: int32 [k, 2] pairs (from, to), at least one."""
        *parts, last = self._parts(pairs)
        if self._stream is None:
            for sources_k, targets_k in (*parts, last):
                for layer, cache_NP in enumerate(self._host_caches):
                    self._host_blocks_NLP[targets_k, layer] = cache_NP[sources_k]
            return
        for part in parts:
            self._send(*part, self._stream)
            # The next part reuses the memory of this one.
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._send(*last, self._stream).record_stream(self._stream)

    def copy_in(self, pairs: bytes) -> None:
        """Copy host blocks to blocks, int32 [k, 2] pairs (from, to), before the next step runs."""
        for sources_k, targets_k in self._parts(pairs):
            if self._stream is not None:
                self._fetch(sources_k, targets_k, self._stream)
                continue
            for layer, cache_NP in enumerate(self._host_caches):
                cache_NP[targets_k] = self._host_blocks_NLP[sources_k, layer]

    def _send(
        self, sources_k: Int64Array, targets_k: Int64Array, stream: torch.cuda.Stream
    ) -> torch.Tensor:
        """Start to send blocks. Return the memory that the stream reads from now on."""
        # Send a copy, because the step may overwrite the cache before the blocks have been sent.
        gathered_kLP = self._gather(sources_k)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for block_LP, target in zip(gathered_kLP, targets_k.tolist(), strict=True):
                self._blocks_NLP[target].copy_(block_LP, non_blocking=True)
        return gathered_kLP

    def _fetch(
        self, sources_k: Int64Array, targets_k: Int64Array, stream: torch.cuda.Stream
    ) -> None:
        current = torch.cuda.current_stream(self._device)
        # Use the stream of the copies out, so that a block is written before it is read here.
        with torch.cuda.stream(stream):
            arrived_kLP = torch.stack(
                [
                    self._blocks_NLP[source].to(self._device, non_blocking=True)
                    for source in sources_k.tolist()
                ]
            )
        current.wait_stream(stream)
        targets_on_device_k = to_device(targets_k, self._device)
        for layer, cache_NP in enumerate(self._caches):
            cache_NP.index_copy_(0, targets_on_device_k, arrived_kLP[:, layer])
        # Tell torch that this stream reads the memory, so that it is not reused before.
        stream.wait_stream(current)

    def _gather(self, blocks_k: Int64Array) -> torch.Tensor:
        """Return copies of the blocks in contiguous memory, [k, L, P] on the device."""
        blocks_on_device_k = to_device(blocks_k, self._device)
        selected = [cache_NP.index_select(0, blocks_on_device_k) for cache_NP in self._caches]
        return torch.stack(selected, 1)

    def _parts(self, pairs: bytes) -> list[tuple[Int64Array, Int64Array]]:
        """Yield sources and targets, int64, in batches, each of which is copied in one operation."""
        indices_2k = int32_view(pairs).reshape(-1, 2).T.astype(np.int64, order="C")
        count = self._blocks_at_once
        starts = range(0, indices_2k.shape[1], count)
        return [(part[0], part[1]) for part in (indices_2k[:, i : i + count] for i in starts)]
