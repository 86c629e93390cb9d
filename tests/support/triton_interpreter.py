"""Run Triton kernels without a GPU, in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os

import torch


def interpret_without_gpu() -> torch.device:
    """Return the device that tests of kernels run on. Call this before the kernels are imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
