"""The interface of encoders: what turns images, sounds and source texts into outputs that a decoder reads."""

from __future__ import annotations

from typing import Protocol

import torch


class Encoder(Protocol):
    """Computes embeddings for the data of encoder inputs, or the outputs that cross attention reads."""

    def encode(self, data: bytes) -> torch.Tensor:
        """Return the outputs [rows, D] for the data of an input."""

    def warm_up(self) -> None:
        """Encode an input that no request has."""
