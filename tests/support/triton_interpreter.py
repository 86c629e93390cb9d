"""Triton's kernels on a machine without a GPU: its interpreter runs them on CPU tensors."""

from __future__ import annotations

import os

import torch


def interpret_without_gpu() -> torch.device:
    """Return the device that tests of kernels run on. To be called before the kernels are imported."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
