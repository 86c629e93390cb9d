"""CUDA graphs of a model's forward pass, which launch its kernels without Python between them.

A graph reads and writes memory at the addresses it was captured with, and its shapes are fixed. So there is one for
each of some sizes, and a step runs in the smallest that holds it. Decoding is one graph where the attention backend can
be captured. Other steps are graphs of what is between the attentions, which are launched by themselves: their work
depends on every request's length. Steps too large for any graph have kernels that take longer than Python takes to
launch them.

T tokens, padded to a size.
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
    """Records what is launched between `begin` and `end`, while `recording`."""

    def recording(self) -> AbstractContextManager[None]: ...

    def begin(self) -> None: ...

    def end(self) -> Replay:
        """Return what launches the same again."""

    def abandon(self) -> None:
        """End what has begun, if anything, after an error."""

    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor at the same address, for replays. Graphs that are recorded later may use its memory, too."""

    def forget(self) -> None:
        """Nothing that was recorded will be launched again."""


class CUDAGraphRecorder:
    """Captures into one memory pool: graphs are replayed one after the other, so they may share it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.synchronize()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may do what a capture forbids.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        graph, self._graph = self._graph, None
        assert graph is not None
        graph.capture_end()
        return graph.replay

    def abandon(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            # A capture that the error has made invalid says so once more.
            with suppress(RuntimeError):
                graph.capture_end()

    def borrowed(self, tensor: Tensor) -> Tensor:
        # As long as there are graphs, the pool keeps the memory.
        return unowned(tensor)

    def forget(self) -> None:
        # The pool goes with the last of its graphs.
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
    """Let no cycle be collected: one may hold a graph or pinned memory, which cannot be freed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphBreaker:
    """Lets code that is being captured leave a call out of the graphs; it runs now, and at each replay."""

    def __init__(self) -> None:
        self._recorder: GraphRecorder | None = None
        self._segments: list[Replay] = []

    @property
    def is_capturing(self) -> bool:
        return self._recorder is not None

    def capture(self, recorder: GraphRecorder, run: Callable[[], None]) -> Replay:
        """Return what does the same as `run`, in graphs but for the calls that it gives to `run_eagerly`."""
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
        """Only while capturing. `run` is given tensors that the graphs write, and must not hold them itself."""
        assert self._recorder is not None
        self._segments.append(self._recorder.end())
        run(*tensors)
        self._segments.append(partial(run, *map(self._recorder.borrowed, tensors)))
        self._recorder.begin()


class SizedGraphs:
    """The graphs of `run`, which does a step of a given padded size and returns tensors."""

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
        """The smallest size that holds `count`; None if there is none, or it has not been captured yet."""
        index = bisect.bisect_left(self.sizes, count)
        is_captured = index < len(self.sizes) and self.sizes[index] in self._captured
        return self.sizes[index] if is_captured else None

    def capture(self, size: int) -> None:
        """The largest size should come first: the smaller ones then find their memory in the pool."""
        with uncollected(), self._recorder.recording():
            # What a kernel allocates or compiles at its first launch cannot be captured.
            self._run(size)
            results: list[Tensor] = []
            replay = self._breaker.capture(self._recorder, lambda: results.extend(self._run(size)))
            self._captured[size] = replay, [self._recorder.borrowed(x) for x in results]

    def replay(self, size: int) -> list[Tensor]:
        """Return what `run` does, good until any graph is replayed."""
        replay, results = self._captured[size]
        replay()
        return results

    def forget(self) -> None:
        self._captured.clear()
        self._recorder.forget()


def decode_sizes(largest: int) -> list[int]:
    """1, 2, 4, every 8th up to 256, and then every 16th, none above `largest`, which is one of them."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return sorted({size for size in sizes if size < largest} | {largest})


def chunk_sizes(largest: int) -> list[int]:
    """1, 2, 4 and so on up to 16, and from there also what is midway, none above `largest`, which is one of them."""
    powers = [1 << n for n in range(largest.bit_length())]
    midway = [power // 2 * 3 for power in powers if power >= 16]
    return sorted({size for size in (*powers, *midway) if size < largest} | {largest})
