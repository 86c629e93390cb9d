"""A vision tower for an image that is read as a whole and as a grid of tiles, whose rows have ends (DeepSeek-VL2)."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor

from ....protocol.checkpoint.vision.spec import VisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, black_image, wrong_size
from ..pixels import normalized_pixels
from ..vision_tower import VisionTower
from .anyres import end_rows, place_tiles


class RowsTower(ImageTower):
    """The tower described by `spec`, with the layers that `make_layers` returns."""

    def __init__(self, spec: VisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.image_size)
        self.spec = spec
        self._tower = VisionTower(spec, source)
        # The name of the other one is misspelled in all checkpoints.
        self._row_end_D, self._separator_D = (
            source.weights(name).read(name, spec.output_size)
            for name in ("image_newline", "view_seperator")
        )

    def _black_image(self) -> ImagePayload:
        return replace(black_image(self._side, 2 * self._side), grid_columns=1)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [K, output size] of the whole image, a separator and the grid of tiles."""
        side, columns = self.spec.image_size, image.grid_columns
        num_tiles = image.height // side - 1
        if (
            image.width != side
            or image.height % side
            or not 0 < columns <= num_tiles
            or num_tiles % columns
        ):
            raise wrong_size(image, f"a grid of {side} x {side} after the whole")
        size = 3 * side**2
        tiles = [image.pixels[i : i + size] for i in range(0, len(image.pixels), size)]
        x_TPD = torch.stack(
            [self._encode_tile(replace(image, height=side, pixels=tile)) for tile in tiles]
        )
        whole, grid = place_tiles(x_TPD[:1], 1), place_tiles(x_TPD[1:], columns)
        ends = self._row_end_D
        separator = self._separator_D[None].to(x_TPD.dtype)
        return torch.cat((end_rows(whole, ends), separator, end_rows(grid, ends)))

    def _encode_tile(self, tile: ImagePayload) -> Tensor:
        return self._tower.encode_pixels(normalized_pixels(tile, self._device, self._dtype)[0])
