"""A vision tower that pools the patches of an image and of overlapping tiles by attention (Molmo).

Shapes: H rows and W columns of patches, D elements of their features, M squares of patches, S patches of a square, N
heads, K head dimension, T tokens of an image.
"""

from __future__ import annotations

import itertools
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.tiled.molmo import MARGINS, POOL_SIDE, PooledVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ....protocol.errors import EngineError
from ...device.torch_threads import torch_threads
from ..image_tower import ImageTower, TowerSource, verify_square
from ..pixels import normalized_pixels
from ..vision_tower import VisionTower
from ..weights import Linear, find_activation
from .windows import join_windows

_POOLING: Final = "image_pooling_2d."
_MLP: Final = "image_projector."


class PooledTower(ImageTower):
    """The tower described by `spec`, with the layers that `make_layers` returns."""

    def __init__(self, spec: PooledVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.tower.image_size)
        self.spec = spec
        names = spec.tower.tensor_names
        self._tower = VisionTower(spec.tower, source)
        tensors = source.weights(f"{_POOLING}q_proj.weight", names)
        inputs, inner = spec.tower.output_size, spec.num_heads * spec.head_dim
        self._q, self._k, self._v = (
            tensors.read_linear(
                f"{_POOLING}{name}_proj", inner, inputs, has_bias=spec.attention_bias
            )
            for name in "qkv"
        )
        size, middle = spec.hidden_size, spec.intermediate_size
        self._output: Linear = tensors.read_linear(
            f"{_POOLING}o_proj", size, inner, has_bias=spec.attention_bias
        )
        self._gate, self._up = (
            tensors.read_linear(f"{_MLP}{name}_proj", middle, size, has_bias=spec.mlp_bias)
            for name in ("gate", "up")
        )
        self._down: Linear = tensors.read_linear(
            f"{_MLP}down_proj", spec.output_size, middle, has_bias=False
        )
        self._activation = find_activation(source.checkpoint, spec.activation)
        # The rows for patches that show the image, and for those that are margins, whole or in part.
        self._margins_3D: Tensor | None = None
        if spec.has_margins:
            margins = source.weights("pad_embed", names).read("pad_embed", 2, inputs)
            self._margins_3D = F.pad(margins, (0, 0, 1, 0))
        embedding = source.weights("embed_tokens.weight", names)
        ids = sorted(set(spec.token_ids))
        self._ids = torch.tensor(ids)
        self._embeddings_D = embedding.read_rows(
            "embed_tokens.weight", ids, spec.vocab_size, spec.output_size
        )

    def warm_up(self) -> None:
        """Encode a black image."""
        with torch.inference_mode(), torch_threads(self._device, self._num_threads):
            self._features(self._black_image())

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [T, output size] of the tokens of an image."""
        side, fine = self.spec.tower.image_size, image.fine
        verify_square(image, side)
        step = self.spec.window * self.spec.tower.patch_size
        if fine is None or any(
            length < side or (length - side) % step for length in (fine.width, fine.height)
        ):
            raise EngineError(f"the canvas must have {side} pixels and multiples of {step} more")
        kinds_KHW = None if self._margins_3D is None else self._find_margins(fine)
        features = torch.cat(
            (self._features(image, kinds_KHW), self._features(fine, kinds_KHW, start=1))
        )
        ids_T = torch.frombuffer(bytearray(image.token_ids), dtype=torch.int32)
        is_feature_T = ids_T == self.spec.token_ids[0]
        if int(is_feature_T.sum()) != len(features) or not torch.isin(ids_T, self._ids).all():
            raise EngineError(f"the tokens of an image do not match its {len(features)} features")
        rows_T = torch.searchsorted(self._ids, ids_T.long())
        embeddings = self._embeddings_D[rows_T.to(self._device)]
        return embeddings.index_add(0, is_feature_T.nonzero()[:, 0].to(self._device), features)

    def _find_margins(self, canvas: ImagePayload) -> Tensor:
        """Return for each patch of the whole image and of each tile which stored row is added to it, [K, H, W].

        The whole image has the margins of the first tile, and each tile those of the next one, as in training. All
        patches of the last tile count as margins in part.
        """
        size, step = self.spec.tower.patch_size, self.spec.window
        shown = torch.zeros(canvas.height, canvas.width)
        height, width = canvas.original_height, canvas.original_width
        top, left = (canvas.height - height) // 2, (canvas.width - width) // 2
        shown[top : top + height, left : left + width] = 1
        shares = F.avg_pool2d(shown[None], size)[0]
        kinds = torch.where(shares == 0, 1, torch.where(shares < 1, 2, 0))
        side = self.spec.num_patches
        tiles = kinds.unfold(0, side, step).unfold(1, side, step).flatten(0, 1)
        return torch.cat((tiles, torch.full_like(tiles[:1], 2))).to(self._device)

    def _features(
        self, image: ImagePayload, kinds_KHW: Tensor | None = None, start: int = 0
    ) -> Tensor:
        """Return the features [M, output size] of an image that consists of one or several tiles.

        `kinds_KHW` are the kinds of its patches, of which those from `start` on are read.
        """
        return self._project(self._pool(self._patches(image, kinds_KHW, start)))

    def _patches(self, image: ImagePayload, kinds_KHW: Tensor | None, start: int) -> Tensor:
        """Return the features of patches, [H, W, D]."""
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        side, per_side = self.spec.tower.image_size, self.spec.num_patches
        step = self.spec.window * self.spec.tower.patch_size
        numbers = itertools.count(start)

        def encode(tile: Tensor) -> Tensor:
            features = self._tower.encode_pixels(tile).unflatten(0, (per_side, per_side))
            if self._margins_3D is not None and kinds_KHW is not None:
                features = features + self._margins_3D[kinds_KHW[next(numbers)]]
            return features

        return join_windows(pixels, side, step, MARGINS, encode)

    def _pool(self, x_HWD: Tensor) -> Tensor:
        """Return the pooled features [M, D] of each square of patches, some of which are incomplete."""
        missing = [-length % POOL_SIDE for length in x_HWD.shape[:2]]
        padding = [part for each in reversed(missing) for part in (each // 2, each - each // 2)]
        x_MSD = _squares(F.pad(x_HWD, (0, 0, *padding)))
        is_patch = F.pad(x_HWD.new_ones((*x_HWD.shape[:2], 1)), (0, 0, *padding))
        is_patch_MS1 = _squares(is_patch)
        mean_M1D = x_MSD.sum(1, keepdim=True) / is_patch_MS1.sum(1, keepdim=True)
        q_MN1K, k_MNSK, v_MNSK = (
            product(x).unflatten(2, (self.spec.num_heads, -1)).transpose(1, 2)
            for product, x in ((self._q, mean_M1D), (self._k, x_MSD), (self._v, x_MSD))
        )
        mask_M11S = is_patch_MS1.transpose(1, 2)[:, None] > 0
        pooled = F.scaled_dot_product_attention(q_MN1K, k_MNSK, v_MNSK, attn_mask=mask_M11S)
        return self._output(pooled.transpose(1, 2).flatten(1))

    def _project(self, x_MD: Tensor) -> Tensor:
        return self._down(self._activation(self._gate(x_MD)) * self._up(x_MD))


def _squares(x_HWD: Tensor) -> Tensor:
    """Return the patches of each square, [M, S, D]."""
    cells = x_HWD.unflatten(1, (-1, POOL_SIDE)).unflatten(0, (-1, POOL_SIDE))
    return cells.transpose(1, 2).flatten(2, 3).flatten(0, 1)
