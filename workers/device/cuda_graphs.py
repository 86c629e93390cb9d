"""CUDA graphs of a model's forward pass, which launch its kernels without Python between them.

A graph has fixed shapes, and reads and writes memory at the addresses of its capture. So there is one graph for each of
several sizes, and a step runs in the smallest one that it fits into. Decoding is a single graph if the attention
backend can be captured. Other steps are graphs of the parts between attentions. Attention itself is launched
separately, because its work depends on the length of every request. Steps too large for any graph have kernels that
take longer than Python needs to launch them.

Shapes: T tokens, padded to a size.
"""

from __future__ import annotations

import bisect
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], object]


class GraphRecorder(Protocol):
    """Records the work launched between `begin` and `end`, within `recording`."""

    def recording(self) -> AbstractContextManager[None]:
        """Prepare the device for captures, within the context."""

    def begin(self) -> None:
        """Begin a graph."""

    def end(self) -> Replay:
        """End the graph, and return a function that launches it."""

    def abandon(self) -> None:
        """End an unfinished graph, if there is one, after an error."""

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address for replays. Graphs that are recorded later may use its memory, too."""

    def drop_graphs(self) -> None:
        """Release the memory of all recorded graphs, which are not launched again."""


class CUDAGraphRecorder:
    """Captures into one memory pool, which graphs can share because they are replayed one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Synchronize before and after, and use a separate stream within the context."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def begin(self) -> None:
        """Begin a capture."""
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may call what a capture forbids in its own thread.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End the capture, and return a function that launches the graph."""
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph.replay

    def abandon(self) -> None:
        """End an unfinished capture after an error."""
        graph, self._graph = self._graph, None
        if graph is not None:
            # Ending a capture that the error has invalidated raises again.
            with suppress(RuntimeError):
                graph.capture_end()

    def borrow(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the same memory that does not keep it alive."""
        # The pool keeps the memory as long as there are graphs.
        return unowned(tensor)

    def drop_graphs(self) -> None:
        """Use a new pool. The old one is freed with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()


def unowned(tensor: Tensor) -> Tensor:
    """Return a tensor of the same memory that does not keep it alive."""
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


class GraphBreaker:
    """Excludes calls from the graphs being captured. They run during the capture and at each replay."""

    def __init__(self) -> None:
        self._recorder: GraphRecorder | None = None
        self._segments: list[Replay] = []

    @property
    def is_capturing(self) -> bool:
        """True during a capture."""
        return self._recorder is not None

    def capture(self, recorder: GraphRecorder, run: Callable[[], None]) -> Replay:
        """Return a function that replays `run`.

        It launches graphs and, between them, the calls that `run` passed to `run_eagerly`.
        """
        segments: list[Replay] = []
        self._recorder, self._segments = recorder, segments
        try:
            recorder.begin()
            run()
            segments.append(recorder.end())
        except BaseException:
            recorder.abandon()
            raise
        finally:
            self._recorder, self._segments = None, []
        if len(segments) == 1:
            return segments[0]

        def replay() -> None:
            for segment in segments:
                segment()

        return replay

    def run_eagerly(self, run: Callable[..., object], *tensors: Tensor) -> None:
        """Exclude a call from the graphs; only during a capture.

        `run` gets tensors that the graphs write, and must not hold them itself.
        """
        assert self._recorder is not None
        self._segments.append(self._recorder.end())
        run(*tensors)
        self._segments.append(partial(run, *map(self._recorder.borrow, tensors)))
        self._recorder.begin()


class SizedGraphs:
    """The graphs of `run`, which runs a step of a given padded size and returns tensors."""

    def __init__(
        self,
        run: Callable[[int], Sequence[Tensor]],
        sizes: Sequence[int],
        recorder: GraphRecorder,
        breaker: GraphBreaker,
    ) -> None:
        self._run = run
        self.sizes = sorted(sizes)
        self._recorder = recorder
        self._breaker = breaker
        self._captured: dict[int, tuple[Replay, list[Tensor]]] = {}

    def size_for(self, count: int) -> int | None:
        """Return the smallest captured size that holds `count`, or None."""
        index = bisect.bisect_left(self.sizes, count)
        is_captured = index < len(self.sizes) and self.sizes[index] in self._captured
        return self.sizes[index] if is_captured else None

    def capture(self, size: int) -> None:
        """Capture a size. The largest one should come first, so that the smaller ones find their memory in the pool."""
        with uncollected(), self._recorder.recording():
            # Run once before: allocations and compilations of first launches cannot be captured.
            self._run(size)
            results: list[Tensor] = []
            replay = self._breaker.capture(self._recorder, lambda: results.extend(self._run(size)))
            self._captured[size] = replay, [self._recorder.borrow(x) for x in results]

    def replay(self, size: int) -> list[Tensor]:
        """Return the tensors that `run` returns, valid until any graph is replayed."""
        replay, results = self._captured[size]
        replay()
        return results

    def drop_graphs(self) -> None:
        """Drop all graphs."""
        self._captured.clear()
        self._recorder.drop_graphs()


def decode_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, multiples of 8 up to 256, then multiples of 16, up to `largest`, which is included."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({size for size in sizes if size < largest} | {largest})


def chunk_sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, then powers of two and their midpoints, up to `largest`, which is included."""
    powers = [1 << n for n in range(largest.bit_length())]
    midway = [power // 2 * 3 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *midway) if size < largest} | {largest})
