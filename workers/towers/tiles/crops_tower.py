"""A vision tower for an image that is cut into tiles and read as a whole besides (Phi-3-Vision, Phi-4-multimodal).

Shapes: H rows and W columns of features, D hidden size of the tower.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ....protocol.errors import EngineError
from ..image_tower import ImageTower, TowerSource
from ..pixels import normalized_pixels
from ..vision_tower import VisionTower
from ..weights import find_activation

_PREFIX = "image_embed."


class CropsTower(ImageTower):
    """The tower described by `spec`, with the layers that `make_layers` returns.

    Features are those of 2 x 2 patches, or their means. Each row of features ends with a learned one, and another one
    separates the features of the tiles, without those of margins, from the features of the whole image. An MLP projects
    them all.
    """

    def __init__(self, spec: VisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        size = spec.hidden_size * (spec.merge_factor**2 if spec.projection == "squares" else 1)
        self._tower = VisionTower(replace(spec, has_crops=False, output_size=size), source)
        marker = f"{_PREFIX}img_projection_up.weight"
        tensors = source.weights(marker, spec.tensor_names)
        output = spec.output_size
        self._row_end_D = tensors.read(f"{_PREFIX}sub_img_feature_extensor", size)
        self._separator_D = tensors.read(f"{_PREFIX}global_img_feature_extensor", size)
        self._up = tensors.read_linear(f"{_PREFIX}img_projection_up", output, size)
        self._activation = find_activation(source.checkpoint, spec.projection_activation)
        self._down = tensors.read_linear(f"{_PREFIX}img_projection_down", output, output)

    def _encode(self, image: ImagePayload) -> Tensor:
        spec, side = self.spec, self.spec.image_size
        if (
            image.width % side
            or image.height % side
            or not 0 < image.original_width <= image.width
            or not 0 < image.original_height <= image.height
        ):
            raise EngineError(
                f"an image has {image.width} x {image.height} pixels, of which {image.original_width} x "
                f"{image.original_height} are no margin, the model reads multiples of {side} x {side}"
            )
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        shown = [
            -(-size // spec.patch_size) for size in (image.original_height, image.original_width)
        ]
        per_side = side // spec.patch_size
        rows = []
        for top in range(-(-shown[0] // per_side)):
            tiles = []
            for left in range(-(-shown[1] // per_side)):
                tile = pixels[:, top * side :, left * side :][:, :side, :side]
                used = [
                    min(count - at * per_side, per_side)
                    for count, at in zip(shown, (top, left), strict=True)
                ]
                tiles.append(self._features(tile, (used[0], used[1])))
            rows.append(torch.cat(tiles, 1))
        # A feature belongs to the image if the first of its patches does.
        features_HWD = torch.cat(rows)[: -(-shown[0] // 2), : -(-shown[1] // 2)]
        whole = F.interpolate(pixels[None].float(), (side, side), mode="bicubic")[0].to(self._dtype)
        parts = (
            self._with_row_ends(features_HWD),
            self._separator_D[None],
            self._with_row_ends(self._features(whole, (per_side, per_side))),
        )
        return self._down(self._activation(self._up(torch.cat(parts))))

    def _features(self, pixels: Tensor, shown: tuple[int, int]) -> Tensor:
        """Return the features [H, W, D] of a tile [3, side, side] with this many rows and columns of patches."""
        has_margins = self.spec.margins is not None
        features = self._tower.encode_pixels(pixels, shown if has_margins else None)
        return features.unflatten(0, (-1, self.spec.image_size // self.spec.patch_size // 2))

    def _with_row_ends(self, x_HWD: Tensor) -> Tensor:
        """Return the features row by row, each row followed by the learned one."""
        ends = self._row_end_D.expand(len(x_HWD), 1, -1)
        return torch.cat((x_HWD, ends), 1).flatten(0, 1)
