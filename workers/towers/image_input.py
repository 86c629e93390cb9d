"""Decode the data of an encoder input for a vision tower: an image, or embeddings that a client sent instead."""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec
import torch
from torch import Tensor

from ...protocol.errors import EngineError
from ...protocol.messages import EmbeddingPayload, ImagePayload

_decoder = msgspec.msgpack.Decoder(ImagePayload | EmbeddingPayload)


class ImageReader(ABC):
    """A tower that reads the images in encoder inputs.

    Args:
        size: The number of elements of an output.
        device: The device of the outputs.
        dtype: The data type of the outputs.
        max_frames: The maximum number of frames that it reads together.
    """

    def __init__(
        self, size: int, device: torch.device, dtype: torch.dtype, max_frames: int = 1
    ) -> None:
        self._size, self._max_frames = size, max_frames
        self._device, self._dtype = device, dtype

    def encode(self, data: bytes) -> Tensor:
        """Return the outputs [K, size] of the image in an encoder input, or the embeddings that it contains.

        Raises:
            EngineError: The data is neither an image nor embeddings of this size, which a correct frontend never sends.
        """
        image = _read(data, self._max_frames)
        if isinstance(image, EmbeddingPayload):
            return _given_embeddings(image, self._size, self._device, self._dtype)
        return self(image)

    @abstractmethod
    def __call__(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, size] of an image.

        Raises:
            EngineError: The tower cannot read images of this size.
        """


def _read(data: bytes, max_frames: int) -> ImagePayload | EmbeddingPayload:
    try:
        image = _decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise EngineError(f"an encoder input is not an image: {error}") from error
    if isinstance(image, EmbeddingPayload):
        return image
    if not 0 < image.num_frames <= max_frames:
        raise EngineError(
            f"an image has {image.num_frames} frames, but the model reads at most {max_frames}"
        )
    for each in (image, image.fine):
        if each is None:
            continue
        expected = 3 * each.width * each.height * each.num_frames
        if len(each.pixels) != expected:
            raise EngineError(f"an image has {len(each.pixels)} bytes, expected {expected}")
    return image


def _given_embeddings(
    image: EmbeddingPayload, size: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    if image.columns != size or len(image.values) != 4 * image.rows * size:
        raise EngineError(f"embeddings have {image.columns} elements, but the model reads {size}")
    # Copy the values, because torch requires a writable array, and the bytes of the message are read-only.
    values = torch.frombuffer(bytearray(image.values), dtype=torch.float32)
    return values.view(image.rows, size).to(device, dtype)
