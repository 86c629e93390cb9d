"""Explain GPU errors in messages that include a remedy.

Any such error ends the worker, and recovery determines whether a request caused it. After a failed step the worker's
state is inconsistent, and after an illegal access nothing on the device can be used anymore.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...protocol.errors import EngineError
from .lazy_torch import is_torch_loaded

_SIGNS = ("CUDA error", "Triton Error [CUDA]")
"""Texts that identify other errors of CUDA libraries, and failed launches, by their messages."""


@contextmanager
def explaining_device_errors(doing: str) -> Iterator[None]:
    """Raise EngineError if a device runs out of memory or fails while `doing` something."""
    try:
        yield
    except RuntimeError as error:
        if not is_torch_loaded():
            raise
        if isinstance(error, torch.OutOfMemoryError):
            raise EngineError(
                f"the GPU is out of memory {doing} ({_first_line(error)}); lower --gpu-memory-utilization to "
                "leave more beside the KV cache, or --max-num-batched-tokens or --max-num-seqs to need less"
            ) from error
        is_device_error = isinstance(error, torch.AcceleratorError | torch.cuda.CudaError)
        if not (is_device_error or any(sign in str(error) for sign in _SIGNS)):
            raise
        raise EngineError(f"the GPU failed {doing}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
