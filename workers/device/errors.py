"""Errors of a GPU, with their remedy.

The worker ends with any of them, and recovery finds out whether a request was the reason: no state of a step that
failed half-way is worth keeping, and after an illegal access nothing on the device can be used again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...protocol.errors import EngineError

_DEVICE_ERRORS = (torch.AcceleratorError, torch.cuda.CudaError)
_SIGNS = ("CUDA error", "Triton Error [CUDA]")
"""What the messages of other errors of CUDA's libraries, and of a failed launch, contain."""


@contextmanager
def explaining_device_errors(doing: str) -> Iterator[None]:
    """Raise EngineError for a device that is out of memory, or has failed, while `doing` something."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise EngineError(
            f"the GPU is out of memory {doing} ({_first_line(error)}); lower --gpu-memory-utilization to "
            "leave more beside the KV cache, or --max-num-batched-tokens or --max-num-seqs to need less"
        ) from error
    except RuntimeError as error:
        if not (isinstance(error, _DEVICE_ERRORS) or any(sign in str(error) for sign in _SIGNS)):
            raise
        raise EngineError(f"the GPU failed {doing}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
