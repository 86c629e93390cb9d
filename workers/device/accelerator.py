"""The interface of a device that processes a queue of work while the host continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from .cuda_graphs import CUDAGraphRecorder, GraphRecorder
from .transfers import Download


class Accelerator(Protocol):
    """A device with its own memory. All results are in bytes.

    `allocated` memory belongs to tensors; `reserved` memory also includes what torch keeps for later tensors.
    """

    def total_memory(self) -> int:
        """Return the memory of the device."""

    def used_memory(self) -> int:
        """Return the used memory of the whole device, including other processes."""

    def reserved_memory(self) -> int:
        """Return the memory that torch has reserved."""

    def allocated_memory(self) -> int:
        """Return the memory of tensors."""

    def peak_memory(self) -> int:
        """Return the maximum allocated memory since `reset_peak`."""

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""

    def release_memory(self) -> None:
        """Return reserved memory that no tensor uses to the device."""

    def graph_recorder(self) -> GraphRecorder:
        """Return a recorder of graphs."""

    def download(self) -> AbstractContextManager[Download]:
        """A context in which results of the work queued so far are copied to the host."""


class CUDAAccelerator:
    """One GPU, the current device of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._download_stream = torch.cuda.Stream(device)

    def total_memory(self) -> int:
        """Return the memory of the GPU."""
        return torch.cuda.mem_get_info(self._device)[1]

    def used_memory(self) -> int:
        """Return the used memory of the whole GPU."""
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reserved_memory(self) -> int:
        """Return the memory that torch has reserved."""
        return torch.cuda.memory_reserved(self._device)

    def allocated_memory(self) -> int:
        """Return the memory of tensors."""
        return torch.cuda.memory_allocated(self._device)

    def peak_memory(self) -> int:
        """Return the maximum allocated memory since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Restart the measurement of the peak."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_memory(self) -> None:
        """Return reserved memory that no tensor uses to the GPU."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def graph_recorder(self) -> GraphRecorder:
        """Return a recorder of CUDA graphs."""
        return CUDAGraphRecorder(self._device)

    @contextmanager
    def download(self) -> Iterator[Download]:
        """A context in which results are copied to the host on a separate stream."""
        # Use a separate stream, so that the next step does not wait for the copies.
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        download = _CUDADownload(self._device)
        with torch.cuda.stream(self._download_stream):
            yield download
            download.arrived.record()


class _CUDADownload:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # While it waits for a blocking event, a thread sleeps instead of spinning.
        self.arrived = torch.cuda.Event(blocking=True)
        self._sources: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        # Keep the tensor alive until it is copied. Otherwise the next step could reuse its memory.
        self._sources.append(tensor)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return target.copy_(tensor, non_blocking=True)

    def has_arrived(self) -> bool:
        return self.arrived.query()

    def wait(self) -> None:
        # Each thread has its own current device, and this may be another thread than the model's.
        with torch.cuda.device(self._device):
            self.arrived.synchronize()
