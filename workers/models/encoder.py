"""The interface of encoders, which turn images, audio clips and source texts into outputs that a decoder reads."""

from __future__ import annotations

from typing import Protocol

import torch


class Encoder(Protocol):
    """Computes the embeddings of encoder inputs, or the outputs that cross attention reads."""

    def encode(self, data: bytes) -> torch.Tensor:
        """Return the outputs [rows, D] for the data of one input."""

    def warm_up(self) -> None:
        """Encode a dummy input, because kernels are prepared on first use."""
