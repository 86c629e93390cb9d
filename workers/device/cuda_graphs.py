"""CUDA graphs of a model's forward pass, which launch its kernels without Python in between.

A graph has fixed shapes, and reads and writes memory at the addresses of its capture. So there is one graph for each of
several sizes, and a step runs in the smallest one into which it fits. Steps too large for any graph have kernels that
take longer than Python needs to launch them.

Shapes: T tokens, padded to a size.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor

Replay = Callable[[], object]


class GraphRecorder:
    """Captures the work that is launched between `begin` and `end`, inside the context `recording`.

    It captures into one memory pool, which graphs can share because they are replayed one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context that synchronizes the device before and after, and uses a separate stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Start a capture."""
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may make calls that a capture forbids only in its own thread.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """Finish the capture, and return a function that launches the graph."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph.replay

    def abandon(self) -> None:
        """Discard an unfinished capture after an error."""
        graph, self._graph = self._graph, None
        if graph is not None:
            # Ending a capture that the error has invalidated raises another error.
            with suppress(RuntimeError):
                graph.capture_end()

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address for use in replays.

        Graphs that are recorded later may reuse its memory.
        """
        # The pool keeps the memory alive as long as there are graphs.
        return unowned(tensor)

    def drop_graphs(self) -> None:
        """Capture later graphs in a new memory pool. The old pool is freed with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory that does not keep the memory alive."""
    owned = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        owned.data_ptr(), tensor.device, owned.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable garbage collection, which could free a graph or pinned memory during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class SizedGraphs:
    """The graphs of the function `run`, which runs a step of a given padded size and returns tensors."""

    def __init__(
        self,
        run: Callable[[int], Sequence[Tensor]],
        sizes: Sequence[int],
        recorder: GraphRecorder,
    ) -> None:
        self._run = run
        self.sizes = sorted(sizes)
        self._recorder = recorder
        self._captured: dict[int, tuple[Replay, list[Tensor]]] = {}

    def size_for(self, count: int) -> int | None:
        """Return the smallest captured size that is at least `count`, or None."""
        index = bisect.bisect_left(self.sizes, count)
        is_captured = index < len(self.sizes) and self.sizes[index] in self._captured
        return self.sizes[index] if is_captured else None

    def capture(self, size: int) -> None:
        """Capture a size. Capture the largest one first, so that smaller ones can use its memory from the pool."""
        with uncollected(), self._recorder.recording():
            # Run it once before, because allocations and compilations at a first launch cannot be captured.
            self._run(size)
            try:
                self._recorder.begin()
                results = self._run(size)
                replay = self._recorder.end()
            except BaseException:
                self._recorder.abandon()
                raise
            self._captured[size] = replay, [self._recorder.borrow(x) for x in results]

    def replay(self, size: int) -> list[Tensor]:
        """Replay the graph of a size.

        Return the tensors of `run`, which are valid until the next replay of any graph.
        """
        replay, results = self._captured[size]
        replay()
        return results

    def drop_graphs(self) -> None:
        """Drop all graphs."""
        self._captured.clear()
        self._recorder.drop_graphs()


def decode_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, multiples of 8 up to 256, then multiples of 16, up to and including `largest`."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({size for size in sizes if size < largest} | {largest})


def chunk_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, then powers of two and their midpoints, up to and including `largest`."""
    powers = [1 << n for n in range(largest.bit_length())]
    midway = [power // 2 * 3 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *midway) if size < largest} | {largest})
