"""Embeddings that a client sent instead of an image."""

from __future__ import annotations

import torch
from torch import Tensor

from ...protocol.errors import EngineError
from ...protocol.messages import EmbeddingPayload


def given_embeddings(
    image: EmbeddingPayload, size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return the embeddings [K, size] of a payload.

    Raises:
        EngineError: They have another size, which a correct frontend never sends.
    """
    if image.columns != size or len(image.values) != 4 * image.rows * size:
        raise EngineError(f"embeddings have {image.columns} elements, the model reads {size}")
    # Copied, because torch requires a writable array, and the message's bytes are read-only.
    values = torch.frombuffer(bytearray(image.values), dtype=torch.float32)
    return values.view(image.rows, size).to(device, dtype)
