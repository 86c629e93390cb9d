"""A vision tower that consists of two transformers, which read the same image (OpenVLA).

Shapes: P patches of an image, D hidden size of the decoder.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.pairs.prismatic import PairVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, verify_square
from ..pixels import normalized_pixels
from ..vision_tower import VisionTower


class PairTower(ImageTower):
    """The towers described by `spec`, with the layers of `make_layers`, and the projection of their features."""

    def __init__(self, spec: PairVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        self._towers = [VisionTower(each, source) for each in spec.towers]
        tensors = source.weights("projector.fc1.weight")
        size, output = sum(each.hidden_size for each in spec.towers), spec.output_size
        sizes = ((4 * size, size), (output, 4 * size), (output, output))
        self._products = [
            tensors.read_linear(f"projector.fc{number}", *shape)
            for number, shape in enumerate(sizes, 1)
        ]

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [P, D] of an image."""
        verify_square(image, self.spec.image_size)
        images = image, replace(image, mean=self.spec.mean, std=self.spec.std)
        features = [
            tower.encode_pixels(normalized_pixels(each, self._device, self._dtype)[0])
            for tower, each in zip(self._towers, images, strict=True)
        ]
        first, second, third = self._products
        return third(F.gelu(second(F.gelu(first(torch.cat(features, 1))))))
