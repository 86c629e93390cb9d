"""A vision tower that reads an image as a whole and in overlapping tiles, patch by patch side by side (Moondream).

Shapes: H rows and W columns of patches, D hidden size of the tower.
"""

from __future__ import annotations

from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.tiled.moondream import WindowsVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ....protocol.errors import EngineError
from ..image_tower import ImageTower, TowerSource, verify_square
from ..pixels import normalized_pixels
from ..vision_tower import VisionTower
from ..weights import find_activation
from .windows import join_windows

_MLP: Final = "projector."


class WindowsTower(ImageTower):
    """The tower described by `spec`, with the layers that `make_layers` returns."""

    def __init__(self, spec: WindowsVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.tower.image_size)
        self.spec = spec
        names, size = spec.tower.tensor_names, spec.tower.hidden_size
        self._tower = VisionTower(spec.tower, source)
        tensors = source.weights(f"{_MLP}fc1.weight", names)
        self._up = tensors.read_linear(f"{_MLP}fc1", spec.intermediate_size, 2 * size)
        self._down = tensors.read_linear(f"{_MLP}fc2", spec.output_size, spec.intermediate_size)
        self._activation = find_activation(source.checkpoint, spec.activation)
        embedding = source.weights("embed_tokens.weight", names)
        self._start_1D = embedding.read_rows(
            "embed_tokens.weight", [spec.start_id], spec.vocab_size, spec.output_size
        )

    def _black_image(self) -> ImagePayload:
        whole = super()._black_image()
        return replace(whole, fine=whole)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embedding of the first token, and those of the patches of the whole image."""
        side, fine = self.spec.tower.image_size, image.fine
        verify_square(image, side)
        step = self.spec.window * self.spec.tower.patch_size
        if fine is None or any(
            length < side or (length - side) % step for length in (fine.width, fine.height)
        ):
            raise EngineError(f"the canvas must have {side} pixels and multiples of {step} more")
        whole_PD = self._features(image).flatten(0, 1)
        canvas_DHW = self._features(fine).permute(2, 0, 1)
        means_DHW = F.adaptive_avg_pool2d(canvas_DHW, self.spec.num_patches)
        means_PD = means_DHW.permute(1, 2, 0).flatten(0, 1)
        both = torch.cat((whole_PD, means_PD), -1)
        return torch.cat((self._start_1D, self._down(self._activation(self._up(both)))))

    def _features(self, image: ImagePayload) -> Tensor:
        """Return the features [H, W, D] of the patches of an image that consists of one or several tiles."""
        spec, per_side = self.spec, self.spec.num_patches
        pixels = normalized_pixels(image, self._device, self._dtype, in_bfloat16=True)[0]
        return join_windows(
            pixels,
            spec.tower.image_size,
            spec.window * spec.tower.patch_size,
            (spec.margin, spec.margin),
            lambda tile: self._tower.encode_pixels(tile).unflatten(0, (per_side, per_side)),
        )
