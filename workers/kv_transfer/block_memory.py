"""The blocks of a worker's KV cache as bytes.

Shapes: N blocks, L cache tensors (the layers of a group), P bytes of one block in one of them, k copied blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..device import host_memory
from ..device.dtypes import AnyArray, on_host
from ..device.pinned_memory import pin
from ..device.transfers import to_device

Fence: TypeAlias = "torch.cuda.Event | None"
"""A point in the device's queue of work, for which threads can wait; None on the CPU, which has no queue."""


class BlockMemory:
    """Reads and writes whole blocks. In every group, a block has `block_bytes` bytes: L parts of P bytes.

    Args:
        pages: The cache tensors, uint8 [N, P].
    """

    def __init__(self, pages: Sequence[AnyArray]) -> None:
        self._pages = list(pages)
        is_on_host = isinstance(pages[0], np.ndarray) or pages[0].device.type == "cpu"
        self.num_blocks, self.page_bytes = pages[0].shape
        self.num_pages = len(pages)
        self.block_bytes = self.num_pages * self.page_bytes
        self._host_pages: list[NDArray[np.uint8]] = []
        self._stream: torch.cuda.Stream | None = None
        self._copy_1B: NDArray[np.uint8] | None = None
        if is_on_host:
            self._host_pages = [on_host(page) for page in pages]
        elif pages[0].device.type == "cuda":
            self.device = pages[0].device
            self._stream = torch.cuda.Stream(self.device)

    @property
    def pages(self) -> list[AnyArray]:
        """The cache tensors, uint8 [N, P]."""
        return self._pages

    @property
    def is_on_host(self) -> bool:
        """True if blocks are in host memory, so that `views` can return them."""
        return self._stream is None

    def views(self, block: int) -> list[memoryview]:
        """Return the L parts of a block in host memory, which may be read and written in place."""
        return [memoryview(page[block]) for page in self._host_pages]

    def host_buffer(self, num_blocks: int) -> NDArray[np.uint8]:
        """Return host memory for copies, uint8 [num_blocks, L * P]. A GPU can copy to it during steps."""
        memory = host_memory.allocate(num_blocks * self.block_bytes)
        if self._stream is not None:
            pin(memory, self.block_bytes, self, self._stream.synchronize)
        return memory.reshape(num_blocks, self.block_bytes)

    def fence(self) -> Fence:
        """Return a fence for all work that the device has been given so far."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def page_of(self, blocks: Sequence[int], page: int) -> NDArray[np.uint8]:
        """Return copies of the parts of blocks in a cache tensor, uint8 [k, P], after the steps that were started."""
        return on_host(self._pages[page][list(blocks)])

    def read(self, blocks: Sequence[int], out_kB: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Copy blocks to the rows `rows` of `out_kB`, after all steps that have been started.

        Later steps may overwrite the blocks as soon as this method returns. On a GPU, the rows are filled after
        `synchronize`.
        """
        parts_kLP = out_kB.reshape(len(out_kB), self.num_pages, self.page_bytes)
        if self._stream is None:
            for layer, page in enumerate(self._host_pages):
                parts_kLP[rows, layer] = page[blocks]
            return
        current = torch.cuda.current_stream(self.device)
        blocks_k = to_device(np.array(blocks, np.int64), self.device)
        gathered_kLP = torch.stack([page.index_select(0, blocks_k) for page in self._pages], 1)
        self._stream.wait_stream(current)
        target_kLP = torch.from_numpy(parts_kLP)
        with torch.cuda.stream(self._stream):
            for index, row in enumerate(rows):
                target_kLP[row].copy_(gathered_kLP[index], non_blocking=True)
        gathered_kLP.record_stream(self._stream)

    def copy_out(self, block: int, out_1B: NDArray[np.uint8], fence: Fence) -> None:
        """Copy a block that was complete at `fence` to a `host_buffer`, and wait. May be called from any thread."""
        parts_LP = out_1B.reshape(self.num_pages, self.page_bytes)
        if self._stream is None or fence is None:
            for layer, page in enumerate(self._host_pages):
                parts_LP[layer] = page[block]
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            gathered_LP = torch.stack([page[block] for page in self._pages])
            torch.from_numpy(parts_LP).copy_(gathered_LP, non_blocking=True)
        self._stream.synchronize()

    def write(self, blocks: Sequence[int], data_kB: NDArray[np.uint8], fence: Fence) -> None:
        """After `fence`, copy the first rows of `data_kB` to blocks that no later step uses.

        May be called from any thread. Waits for the copy.
        """
        parts_kLP = data_kB.reshape(len(data_kB), self.num_pages, self.page_bytes)[: len(blocks)]
        if self._stream is None or fence is None:
            for layer, page in enumerate(self._host_pages):
                page[blocks] = parts_kLP[:, layer]
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            blocks_k = torch.tensor(blocks, device=self.device)
            arrived_kLP = torch.from_numpy(parts_kLP).to(self.device)
            for layer, cache_NP in enumerate(self._pages):
                cache_NP.index_copy_(0, blocks_k, arrived_kLP[:, layer])
        self._stream.synchronize()

    def clear(self, blocks: Sequence[int], fence: Fence) -> None:
        """After `fence`, fill blocks that no later step uses with zeros. May be called from any thread."""
        if self._stream is None or fence is None:
            for page in self._host_pages:
                page[blocks] = 0
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(fence)
            blocks_k = torch.tensor(blocks, device=self.device)
            for cache_NP in self._pages:
                cache_NP.index_fill_(0, blocks_k, 0)
        self._stream.synchronize()

    def change(self, block: int, change: Callable[[list[memoryview]], None], fence: Fence) -> None:
        """Let a function change the L parts of a block that no step uses. Called by one thread at a time."""
        if self._stream is None or fence is None:
            change(self.views(block))
            return
        copy_1B = self.host_buffer(1) if self._copy_1B is None else self._copy_1B
        self._copy_1B = copy_1B
        self.copy_out(block, copy_1B, fence)
        change(self.parts(memoryview(copy_1B[0])))
        self.write([block], copy_1B, fence)

    def parts(self, data: memoryview) -> list[memoryview]:
        """Return the L parts of a block, given all of its bytes."""
        size = self.page_bytes
        return [data[start : start + size] for start in range(0, self.block_bytes, size)]

    def synchronize(self) -> None:
        """Wait until all that `read` copies has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
