"""Copy tensors quickly from the page cache to a GPU, filling one part of pinned memory while another is sent."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

STAGING_BYTES: Final = 64 * 1024 * 1024
NUM_STAGING_BUFFERS: Final = 2


class PinnedUpload:
    """Copies tensors to `device`. The source memory may be unmapped as soon as a call returns."""

    def __init__(self, device: torch.device, staging_bytes: int = STAGING_BYTES) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._buffers = [
            torch.empty(staging_bytes, dtype=torch.uint8, pin_memory=is_cuda)
            for _ in range(NUM_STAGING_BUFFERS)
        ]
        self._sent = [torch.cuda.Event() for _ in self._buffers] if is_cuda else []
        self._next = 0

    def __call__(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a contiguous copy of the tensor on the device, in `dtype`."""
        target = torch.empty(source.shape, dtype=dtype, device=self._device)
        source_N, target_N = source.reshape(-1), target.view(-1)
        at_once = len(self._buffers[0]) // dtype.itemsize
        for start in range(0, len(source_N), at_once):
            self._send(source_N[start : start + at_once], target_N[start : start + at_once])
        return target

    def _send(self, source_N: Tensor, target_N: Tensor) -> None:
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        if self._sent:
            self._sent[index].synchronize()
        staged_N = self._buffers[index].view(target_N.dtype)[: len(source_N)]
        staged_N.copy_(source_N)
        target_N.copy_(staged_N, non_blocking=True)
        if self._sent:
            self._sent[index].record()
