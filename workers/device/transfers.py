"""Asynchronous copies between host and device."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.worker_messages import ModelRunnerOutput
from .errors import explaining_device_errors


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Return the array on the device. On the CPU, the result may share the array's memory.

    On CUDA it is copied from pinned memory, which torch's host allocator reuses once the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Download:
    """Copies of tensors to the host that are in progress."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # While it waits for a blocking event, a thread sleeps instead of spinning.
        self.arrived = torch.cuda.Event(blocking=True)
        self._sources: list[torch.Tensor] = []

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return host memory that will contain the tensor once all copies have arrived."""
        # Keep the tensor alive until it is copied. Otherwise the next step could reuse its memory.
        self._sources.append(tensor)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return target.copy_(tensor, non_blocking=True)

    def has_arrived(self) -> bool:
        """Return whether all copies have arrived."""
        return self.arrived.query()

    def wait(self) -> None:
        """Wait until all copies have arrived."""
        # Each thread has its own current device, and this may be another thread than the model's.
        with torch.cuda.device(self._device):
            self.arrived.synchronize()


class DownloadedOutput:
    """The output of a step that the device may still be computing."""

    def __init__(
        self, step: int, download: Download, make_output: Callable[[], ModelRunnerOutput]
    ) -> None:
        self._step = step
        self._download = download
        self._make_output = make_output

    def is_ready(self) -> bool:
        """Return whether the output has arrived."""
        with explaining_device_errors(f"in step {self._step} or the next one"):
            return self._download.has_arrived()

    def wait(self) -> None:
        """Wait until the output has arrived."""
        with explaining_device_errors(f"in step {self._step} or the next one"):
            self._download.wait()

    def output(self) -> ModelRunnerOutput:
        """Wait for the output and return it."""
        self.wait()
        return self._make_output()
