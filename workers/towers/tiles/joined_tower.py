"""A vision tower with two encoders, of which the second reads the features of the first (DeepSeek-OCR).

Shapes: P places of a tile, T tiles, D hidden size of the reader or the decoder.
"""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.deepseek import JoinedVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..clip_layers import layers_spec, read_layer
from ..image_tower import ImageTower, TowerSource, wrong_size
from ..layers import Patches
from ..pixels import normalized_pixels
from ..query_tower import NAMES
from ..sam_encoder import SamEncoder
from ..weights import VisionWeights, check_activation
from .anyres import end_rows, place_tiles


class JoinedTower(ImageTower):
    """The tower described by `spec`: an image encoder in torch, and a reader with the layers of `make_layers`."""

    def __init__(self, spec: JoinedVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.sam.image_size)
        self.spec = spec
        reader = spec.reader
        for activation in (spec.sam.activation, reader.activation):
            check_activation(source.checkpoint, activation)

        def read(marker: str) -> VisionWeights:
            return source.weights(marker, (*NAMES, *_READER_NAMES))

        self._encode_image = SamEncoder(spec.sam, read("patch_embed.projection.weight"))
        tensors, size = read("pre_layrnorm.weight"), reader.hidden_size
        self._class_D = tensors.read("embeddings.class_embedding", size)
        self._positions = tensors.read(
            "embeddings.position_embedding.weight", reader.num_patches + 1, size
        )
        self._norm = tensors.read_layer_norm("pre_layrnorm", size, reader.norm_eps)
        [num_layers] = reader.feature_layers
        self._layers = source.make_layers(
            layers_spec(reader),
            (read_layer(reader, tensors, f"encoder.layers.{i}.") for i in range(num_layers)),
        )
        name, joined = "multi_modal_projector", size + spec.sam.output_size
        self._project = read(f"{name}.weight").read_linear(name, spec.output_size, joined)
        self._newline_D, self._separator_D = (
            read(name).read(name, spec.output_size) for name in ("image_newline", "view_separator")
        )

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [K, output size] of a grid of tiles, or of a whole image and the separator after it."""
        side, unit = image.width, self.spec.sam.unit
        num_tiles, columns = image.height // side, image.grid_columns or 1
        if side % unit or image.height != side * num_tiles or num_tiles % columns:
            raise wrong_size(image, f"grids of squares whose sides are multiples of {unit}")
        size = 3 * side**2
        tiles = [image.pixels[i : i + size] for i in range(0, len(image.pixels), size)]
        x_TPD = torch.stack(
            [self._encode_tile(replace(image, height=side, pixels=tile)) for tile in tiles]
        )
        x = end_rows(place_tiles(x_TPD, columns), self._newline_D)
        return torch.cat((x, self._separator_D[None].to(x.dtype))) if image.is_last else x

    def _encode_tile(self, tile: ImagePayload) -> Tensor:
        """Return the embeddings [P, output size] of a tile."""
        features_PD = self._encode_image(normalized_pixels(tile, self._device, self._dtype)[0])
        side = round(len(features_PD) ** 0.5)
        x = torch.cat((self._class_D[None], features_PD)) + self._interpolated(side)
        [x] = self._layers(self._norm(x), Patches()).values()
        return self._project(torch.cat((x[1:], features_PD), 1))

    def _interpolated(self, side: int) -> Tensor:
        """Return the learned positions of the class token and of a square of places."""
        stored = round((len(self._positions) - 1) ** 0.5)
        if side == stored:
            return self._positions
        table = self._positions[1:].float().T.unflatten(1, (stored, stored))[None]
        resized = F.interpolate(table, (side, side), mode="bicubic", antialias=True)
        places = resized[0].flatten(1).T.to(self._positions.dtype)
        return torch.cat((self._positions[:1], places))


_READER_NAMES = (
    (r"(vision_model|vision_encoder)\.transformer\.layers\.", r"\1.encoder.layers."),
    (r"(encoder\.layers\..*\.self_attn)\.qkv_proj\.", r"\1.qkv."),
)
