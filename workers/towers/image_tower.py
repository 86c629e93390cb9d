"""The base class of vision towers, their common arguments, and the data that they read.

The data of an encoder input are an image, or embeddings that a client sent instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ...protocol.encoder_inputs.payloads import EmbeddingPayload, ImagePayload
from ...protocol.errors import EngineError
from ..device.torch_threads import torch_threads
from ..loaders import Checkpoint
from ..loaders.tensor_names import TensorNames
from .layers import MakeLayers, TorchLayers
from .weights import VisionWeights

_decoder = msgspec.msgpack.Decoder(ImagePayload | EmbeddingPayload)


class TowerSource(NamedTuple):
    """The checkpoint of a tower, and its device and dtype. `make_layers` returns its layers."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    num_threads: int = 1
    make_layers: MakeLayers = TorchLayers

    def weights(self, marker: str, names: TensorNames = ()) -> VisionWeights:
        """Return the tensors that have the same prefix as the tensor `marker`, after `names` translates their names.

        Raises:
            CheckpointError: There is no such tensor.
        """
        return VisionWeights(self.checkpoint, marker, self.device, self.dtype, names)


class ImageTower(ABC):
    """A tower that reads the images in encoder inputs.

    It computes one image or tile at a time, so that results do not depend on other images.

    Args:
        source: The weights of the tower, with their device and dtype.
        size: The number of elements of an output.
        side: The side of the square image to warm up with.
        max_frames: The maximum number of frames that it reads together.
    """

    def __init__(self, source: TowerSource, size: int, side: int, max_frames: int = 1) -> None:
        self._size, self._side, self._max_frames = size, side, max_frames
        self._device, self._dtype = source.device, source.dtype
        self._num_threads = source.num_threads

    def encode(self, data: bytes) -> Tensor:
        """Return the outputs [K, size] of the image in an encoder input, or the embeddings that it contains.

        Raises:
            EngineError: The data is neither an image nor embeddings of this size, which a correct frontend never sends.
        """
        image = _read(data, self._max_frames)
        if isinstance(image, EmbeddingPayload):
            return _given_embeddings(image, self._size, self._device, self._dtype)
        return self(image)

    @torch.inference_mode()
    def __call__(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, size] of an image. Raise EngineError if the tower cannot read images of this size."""
        with torch_threads(self._device, self._num_threads):
            return self._encode(image)

    def warm_up(self) -> None:
        """Encode a black image."""
        self(self._black_image())

    def _black_image(self) -> ImagePayload:
        return black_image(self._side)

    @abstractmethod
    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the outputs [K, size] of an image, or raise the error of `wrong_size`."""


def black_image(width: int, height: int = 0) -> ImagePayload:
    """Return an image to warm up with, which is square by default."""
    height, ones = height or width, (1.0, 1.0, 1.0)
    pixels = bytes(3 * width * height)
    return ImagePayload(
        width, height, pixels, 1.0, ones, ones, original_width=width, original_height=height
    )


def verify_square(image: ImagePayload, side: int) -> None:
    """Raise EngineError unless an image has this side."""
    if (image.width, image.height) != (side, side):
        raise wrong_size(image, f"{side} x {side}")


def wrong_size(image: ImagePayload, needed: str) -> EngineError:
    """Return an error that says which sizes the model reads."""
    return EngineError(
        f"an image has {image.width} x {image.height} pixels, but the model reads {needed}"
    )


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
        expected = 3 * each.width * each.height * each.num_frames * (4 if each.is_float32 else 1)
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
