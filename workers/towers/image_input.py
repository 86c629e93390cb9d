"""Decode the data of an encoder input for a vision tower: an image, or embeddings that a client sent instead."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from ...protocol.errors import EngineError
from ...protocol.messages import EmbeddingPayload, ImagePayload

_decoder = msgspec.msgpack.Decoder(ImagePayload | EmbeddingPayload)


def read_image_input(
    data: bytes, size: int, max_frames: int, device: torch.device, dtype: torch.dtype
) -> ImagePayload | Tensor:
    """Return the image in `data`, of at most `max_frames` frames, or the embeddings [K, size] in it.

    Raises:
        EngineError: The data is neither an image nor embeddings of this size. A correct frontend never sends such data.
    """
    try:
        image = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"an encoder input is not an image: {error}") from error
    if isinstance(image, EmbeddingPayload):
        return _given_embeddings(image, size, device, dtype)
    if not 0 < image.num_frames <= max_frames:
        raise EngineError(
            f"an image has {image.num_frames} frames, but the model reads at most {max_frames}"
        )
    expected = 3 * image.width * image.height * image.num_frames
    if len(image.pixels) != expected:
        raise EngineError(f"an image has {len(image.pixels)} bytes, expected {expected}")
    return image


def _given_embeddings(
    image: EmbeddingPayload, size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if image.columns != size or len(image.values) != 4 * image.rows * size:
        raise EngineError(f"embeddings have {image.columns} elements, but the model reads {size}")
    # Copy the values, because torch requires a writable array, and the bytes of the message are read-only.
    values = torch.frombuffer(bytearray(image.values), dtype=torch.float32)
    return values.view(image.rows, size).to(device, dtype)
