"""A GPU, which processes a queue of work while the host continues."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .cuda_graphs import GraphRecorder
from .transfers import Download


class Accelerator:
    """One GPU, the current device of this process. All results are in bytes.

    `allocated` memory belongs to tensors; `reserved` memory also includes what torch keeps for later tensors.
    """

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
        return GraphRecorder(self._device)

    @contextmanager
    def download(self) -> Iterator[Download]:
        """A context in which results are copied to the host on a separate stream."""
        # Use a separate stream, so that the next step does not wait for the copies.
        self._download_stream.wait_stream(torch.cuda.current_stream(self._device))
        download = Download(self._device)
        with torch.cuda.stream(self._download_stream):
            yield download
            download.arrived.record()
