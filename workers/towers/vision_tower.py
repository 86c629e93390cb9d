"""A vision tower, which turns the pixels of an image into embeddings for the decoder.

Shapes: P patches of an image and the class token, D hidden size of the tower, K output rows.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.spec import VisionSpec
from ...protocol.encoder_inputs.payloads import ImagePayload
from ...protocol.errors import EngineError
from .clip_layers import layers_spec, read_layer
from .image_tower import ImageTower, TowerSource, black_image, verify_square, wrong_size
from .layers import Layers, Patches
from .pixels import normalized_pixels, split_patches
from .projections.projection import WORDS, read_projection
from .projections.window_merger import WindowMerger
from .rotary import grid_places
from .sam_encoder import SamEncoder
from .tiles.anyres import join_tiles, reduce_frame
from .weights import Norm, check_activation


class VisionTower(ImageTower):
    """The tower described by `spec` and its projection, in torch, with the layers that `make_layers` returns."""

    def __init__(self, spec: VisionSpec, source: TowerSource) -> None:
        side = spec.side_factor if spec.max_outputs else spec.image_size
        if spec.query_counts:
            side = spec.query_counts[0][0] * spec.patch_size
        super().__init__(source, spec.output_size, side)
        self.spec = spec
        check_activation(source.checkpoint, spec.activation)
        tensors = source.weights("embeddings.patch_embedding.weight", spec.tensor_names)
        size, patch_size = spec.hidden_size, spec.patch_size
        name = "embeddings.patch_embedding.weight"
        if spec.has_channels_last:
            patches = tensors.read(name, size, patch_size**2 * 3)
            patches = patches.unflatten(1, (-1, 3)).transpose(1, 2)
        elif spec.has_flat_patches:
            patches = tensors.read(name, size, 3 * patch_size**2)
        else:
            patches = tensors.read(name, size, 3, patch_size, patch_size)
        self._patches = patches.flatten(1)
        self._patches_bias: Tensor | None = None
        if spec.has_patch_bias:
            self._patches_bias = tensors.read("embeddings.patch_embedding.bias", size)
        self._class_KD: Tensor | None = None
        if spec.has_class_token:
            self._class_KD = tensors.read("embeddings.class_embedding", 1, size)
        if spec.has_teacher_token:
            other_1D = tensors.read("embeddings.distillation_token", 1, size)
            first_1D = tensors.read("embeddings.class_embedding", 1, size)
            self._class_KD = torch.cat((first_1D, other_1D))
        self._registers_KD: Tensor | None = None
        if spec.num_registers:
            first_1D = tensors.read("embeddings.class_embedding", 1, size)
            others_KD = tensors.read("embeddings.registers", spec.num_registers - 1, size)
            self._registers_KD = torch.cat((first_1D, others_KD))
        self._positions: Tensor | None = None
        name = "embeddings.position_embedding.weight"
        if spec.positions == "tables":
            tables = (
                tensors.read(f"embeddings.{axis}_embedder.weight", spec.num_positions + 1, size)
                for axis in ("column", "row")
            )
            self._positions = torch.stack([table[1:] for table in tables])
        elif spec.positions not in ("axes", None):
            num_positions = spec.num_patches + spec.has_class_token + spec.has_teacher_token
            self._positions = tensors.read(name, num_positions, size)
            if spec.has_class_last:
                self._positions = self._positions.roll(1, 0)
        elif spec.positions == "axes":
            self._positions = tensors.read(name, 2, spec.num_positions, size)

        def norm(exists: bool, name: str, kind: Literal["layer", "rms"]) -> Norm | None:
            return tensors.read_norm(name, size, kind, spec.norm_eps) if exists else None

        self._patch_norm = norm(spec.has_patch_norm, "embeddings.rms_norm", "rms")
        # The name is misspelled in all checkpoints.
        self._pre_norm = norm(spec.has_pre_norm, "pre_layrnorm", spec.norm_kind)
        self._post_norm = norm(spec.has_post_norm, "post_layernorm", spec.post_norm_kind)
        layers = layers_spec(spec)

        def make(first: int, end: int) -> Layers:
            kept = tuple(
                number - first for number in layers.feature_layers if first < number <= end
            )
            return source.make_layers(
                msgspec.structs.replace(layers, feature_layers=kept or (end - first,)),
                (
                    read_layer(spec, tensors, f"encoder.layers.{index}.")
                    for index in range(first, end)
                ),
            )

        self._first_layers: Layers | None = None
        self._merge_windows: WindowMerger | None = None
        if spec.window_layer:
            self._first_layers = make(0, spec.window_layer)
            self._merge_windows = WindowMerger(spec, tensors)
        self._layers = make(spec.window_layer, layers.num_layers)
        self._fine: SamEncoder | None = None
        if spec.fine is not None:
            check_activation(source.checkpoint, spec.fine.activation)
            sam = source.weights("patch_embed.projection.weight", spec.tensor_names)
            self._fine = SamEncoder(spec.fine, sam)
        self._project = read_projection(spec, source)
        self._marks_MD: Tensor | None = None
        if spec.num_marks:
            words = source.weights(WORDS)
            self._marks_MD = words.read(WORDS, spec.num_words, spec.output_size)[-spec.num_marks :]
        self._newline_D: Tensor | None = None
        if spec.has_newlines:
            weights = source.weights("image_newline")
            num_parts = 1 + len(spec.added_after)
            newline_D = weights.read("image_newline", spec.output_size // num_parts)
            self._newline_D = newline_D.repeat(num_parts)
            if spec.windows is not None and spec.windows.begins_with_zeros:
                self._newline_D[: len(newline_D)] = 0

    def _black_image(self) -> ImagePayload:
        fine = self.spec.fine
        return replace(
            super()._black_image(), fine=None if fine is None else black_image(fine.image_size)
        )

    def _check_size(self, image: ImagePayload) -> None:
        spec, side = self.spec, self.spec.image_size
        if spec.has_newlines:
            num_tiles = image.height // side
            is_grid = (
                num_tiles > 1 and image.grid_columns and not (num_tiles - 1) % image.grid_columns
            )
            if (
                image.width != side
                or image.height != num_tiles * side
                or not (is_grid or (num_tiles == 1 and not image.grid_columns))
                or (is_grid and not (image.original_width > 0 and image.original_height > 0))
            ):
                raise wrong_size(image, f"a grid of {side} x {side}")
            return
        if spec.fine is not None:
            fine = spec.fine.image_size
            if image.fine is None or (image.fine.width, image.fine.height) != (fine, fine):
                raise EngineError(f"the larger copy of an image must have {fine} x {fine} pixels")
        if not spec.max_outputs:
            verify_square(image, side)
            return
        factor = spec.side_factor
        num_outputs = image.width // factor * (image.height // factor)
        size = spec.patch_size
        if spec.query_counts and (
            image.width != image.height
            or image.width // size not in dict(spec.query_counts)
            or not min(image.original_width, image.original_height) > 0
        ):
            sides = " or ".join(str(patches * size) for patches, _ in spec.query_counts)
            raise wrong_size(image, f"squares with sides of {sides}")
        if image.width % size or image.height % size or not num_outputs > 0:
            needed = f"multiples of {size} x {size}, at least {factor} x {factor}"
            raise wrong_size(image, needed)

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [K, output size] of an image, which may consist of a grid of tiles."""
        self._check_size(image)
        if self._marks_MD is not None:
            before, after = (self._marks_MD[list(numbers)] for numbers in image.marks)
            return torch.cat((before, self._encode_tile(image), after))
        if self._newline_D is None:
            return self._encode_tile(image)
        if image.is_frame:
            x_PD = reduce_frame(self._encode_tile(image))
            newline_1D = self._newline_D[None].to(x_PD.dtype)
            return torch.cat((x_PD, newline_1D)) if image.is_last else x_PD
        size = 3 * image.width**2
        pixels = [image.pixels[i : i + size] for i in range(0, len(image.pixels), size)]
        tiles = [replace(image, height=image.width, pixels=each) for each in pixels]
        x_TPD = torch.stack([self._encode_tile(tile) for tile in tiles])
        return join_tiles(x_TPD, self._newline_D, image, self.spec.max_tiles)

    def _encode_tile(self, image: ImagePayload) -> Tensor:
        pixels = normalized_pixels(
            image, self._device, self._dtype, in_bfloat16=self.spec.normalizes_in_bfloat16
        )[0]
        if self._fine is not None and image.fine is not None:
            fine = normalized_pixels(image.fine, self._device, self._dtype)[0]
            return self.encode_pixels(pixels, fine_PC=self._fine(fine))
        if self.spec.margins is None:
            return self.encode_pixels(pixels)
        size = self.spec.patch_size
        shown = (
            -(-min(image.original_height, image.height) // size),
            -(-min(image.original_width, image.width) // size),
        )
        return self.encode_pixels(pixels, shown)

    def encode_pixels(
        self,
        pixels: Tensor,
        shown: tuple[int, int] | None = None,
        fine_PC: Tensor | None = None,
    ) -> Tensor:
        """Return the embeddings [K, output size] of normalized pixels [3, height, width].

        Args:
            pixels: The image.
            shown: The rows and columns of patches that are not in margins; None if there are no margins.
            fine_PC: The features of a larger copy of the image, which the projection reads, too.
        """
        spec = self.spec
        # Like a convolution with a stride of one patch, ignore the pixels beyond the last whole patch.
        num_rows, row_length = (length // spec.patch_size for length in pixels.shape[1:])
        patches = split_patches(pixels, num_rows, row_length, spec.patch_size)
        num_columns = row_length
        order_P: Tensor | None = None
        if shown is not None and shown != (num_rows, num_columns):
            is_shown_PP = patches.new_zeros(num_rows, num_columns, dtype=torch.bool)
            is_shown_PP[: shown[0], : shown[1]] = True
            # Patches that others attend to come first.
            order_P = (~is_shown_PP).flatten().to(torch.uint8).argsort(stable=True)
            num_shown = min(shown[0], num_rows) * min(shown[1], num_columns)
            if spec.margins == "left out":
                num_rows, num_columns = shown
                order_P = order_P[:num_shown]
            patches = patches[order_P]
        x_PD = F.linear(patches, self._patches, self._patches_bias)
        if self._patch_norm is not None:
            x_PD = self._patch_norm(x_PD)
        if self._class_KD is not None:
            x_PD = torch.cat((self._class_KD, x_PD))
        if self._positions is not None and spec.positions in ("axes", "tables"):
            columns, rows = self._positions[0, :num_columns], self._positions[1, :num_rows]
            x_PD = x_PD + (columns + rows[:, None]).flatten(0, 1)
        elif self._positions is not None and spec.positions != "patches":
            side = spec.image_size // spec.patch_size
            rows, columns = (
                _nearest(count, side, spec) for count in shown or (num_rows, num_columns)
            )
            at = (rows[:, None] * side + columns).flatten()
            # Margins have the first position.
            x_PD = x_PD + self._positions[F.pad(at, (0, len(x_PD) - len(at)))]
        elif self._positions is not None:
            x_PD = x_PD + self._positions
        if self._registers_KD is not None:
            x_PD = torch.cat((self._registers_KD.to(x_PD.dtype), x_PD))
        if self._pre_norm is not None:
            x_PD = self._pre_norm(x_PD)
        places_P2: Tensor | None = None
        if spec.rope_theta:
            places_P2 = grid_places(num_rows, num_columns, self._device)
            if self._class_KD is not None:
                places_P2 = F.pad(places_P2 + 1, (0, 0, 1, 0))
        visible_P2: Tensor | None = None
        if order_P is not None and spec.margins == "unseen":
            visible_P2 = order_P.new_tensor([[0, num_shown]]).repeat(len(x_PD), 1)
        if self._first_layers is not None and self._merge_windows is not None:
            (x_PD,) = self._first_layers(x_PD, Patches(places_P2)).values()
            x_PD, row_length = self._merge_windows(x_PD, num_columns), num_columns // 2
        features = self._layers(x_PD, Patches(places_P2, visible_P2=visible_P2))
        x_PD = torch.cat(
            [features[number - spec.window_layer] for number in spec.feature_layers], -1
        )
        if order_P is not None and spec.margins == "unseen":
            x_PD = torch.empty_like(x_PD).index_copy_(0, order_P, x_PD)
        if self._post_norm is not None:
            x_PD = self._post_norm(x_PD)
        if spec.has_class_token and not spec.keeps_class_token:
            x_PD = x_PD[1:]
        x_PD = x_PD[spec.num_registers :]
        if fine_PC is not None:
            x_PD = torch.cat((x_PD, fine_PC), 1)
        outputs = self._project(x_PD, row_length)
        if spec.has_columns_first:
            side = math.isqrt(len(outputs))
            outputs = outputs.unflatten(0, (side, side)).transpose(0, 1).flatten(0, 1)
        return outputs


def _nearest(count: int, side: int, spec: VisionSpec) -> Tensor:
    """Return the place among `side` learned ones that is nearest to each of `count` places, int64 [count].

    The bounds and places are rounded in the same way as in the models' own code.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    at = torch.arange(count)
    if spec.positions == "stepped":
        places = torch.arange(0, 1 - 1e-6, 1 / count)[:count]
    elif spec.positions == "inverse":
        places = (at * (1.0 / torch.tensor(count))).clamp(max=1.0 - 1e-6)
    else:
        places = at / count
    return torch.bucketize(places, bounds, right=True)
