"""What the model runner needs of a device that works through a queue of its own, beside the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from .cuda_graphs import CUDAGraphRecorder, GraphRecorder
from .transfers import Download


class Accelerator(Protocol):
    """Memory in bytes. `allocated` is what tensors take; `reserved` is that and what torch keeps for later ones."""

    def total_memory(self) -> int: ...

    def used_memory(self) -> int:
        """Of the whole device, other processes' memory included."""

    def reserved_memory(self) -> int: ...

    def allocated_memory(self) -> int: ...

    def peak_memory(self) -> int:
        """The most that was ever allocated since `forget_peak`."""

    def forget_peak(self) -> None: ...

    def release_memory(self) -> None:
        """Give the device back the reserved memory that no tensor takes."""

    def graph_recorder(self) -> GraphRecorder: ...

    def download(self) -> AbstractContextManager[Download]:
        """Copy what the work queued so far yields."""


class CUDAAccelerator:
    """One GPU, the current device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._download_stream = torch.cuda.Stream(device)

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def used_memory(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved_memory(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def allocated_memory(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_memory(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def graph_recorder(self) -> GraphRecorder:
        return CUDAGraphRecorder(self._device)

    @contextmanager
    def download(self) -> Iterator[Download]:
        # A stream of its own: the next step need not wait for the copies.
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        download = _CUDADownload(self._device)
        with torch.cuda.stream(self._download_stream):
            yield download
            download.arrived.record()


class _CUDADownload:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Blocking: a thread that waits for it sleeps, where it would spin otherwise.
        self.arrived = torch.cuda.Event(blocking=True)
        self._sources: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # Kept alive until it is read: else the next step may get its memory.
        self._sources.append(tensor)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return target.copy_(tensor, non_blocking=True)

    def has_arrived(self) -> bool:
        return self.arrived.query()

    def wait(self) -> None:
        # The current device is each thread's own, and this may be another thread than the model's.
        with torch.cuda.device(self._device):
            self.arrived.synchronize()
