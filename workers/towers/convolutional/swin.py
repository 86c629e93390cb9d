"""A vision tower whose places attend in windows, which every other block shifts (Swin in Donut), in torch.

Shapes: H rows and W columns of places, C channels, P places of a window, G heads, K windows.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.swin import SwinSpec, SwinStage
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, black_image, wrong_size
from ..pixels import normalized_pixels
from ..weights import Linear, Norm, VisionWeights, find_activation
from .convolution import Block, Convolution, chained

_NORM_EPS: Final = 1e-5
_MARKER: Final = "embeddings.patch_embeddings.projection.weight"
_HIDDEN: Final = -100.0
"""The number that is added to the scores of places that are not neighbors."""


class SwinTower(ImageTower):
    """The tower described by `spec`."""

    def __init__(self, spec: SwinSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, spec.height)
        self.spec = spec
        tensors, side = source.weights(_MARKER), spec.patch_size
        activation = find_activation(source.checkpoint, spec.activation)
        first, name = spec.stages[0].size, _MARKER.removesuffix("weight")
        weight = tensors.read(_MARKER, first, 3, side, side)
        bias = tensors.read(f"{name}bias", first)
        self._steps: list[Block] = [
            lambda x_HWC: F.pad(
                x_HWC, (0, 0, 0, -x_HWC.shape[1] % side, 0, -x_HWC.shape[0] % side)
            ),
            Convolution(weight, bias, side),
            tensors.read_layer_norm("embeddings.norm", first, _NORM_EPS),
        ]
        for index, stage in enumerate(spec.stages):
            is_small = min(spec.num_places(index)) <= spec.window_size
            for number in range(stage.depth):
                prefix = f"encoder.layers.{index}.blocks.{number}."
                shift = 0 if is_small or number % 2 == 0 else spec.window_size // 2
                inner = int(stage.size * spec.mlp_ratio)
                attention: list[Block] = [
                    tensors.read_layer_norm(f"{prefix}layernorm_before", stage.size, spec.norm_eps),
                    _Windows(spec, stage, tensors, f"{prefix}attention.", shift),
                ]
                mlp: list[Block] = [
                    tensors.read_layer_norm(f"{prefix}layernorm_after", stage.size, spec.norm_eps),
                    tensors.read_linear(f"{prefix}intermediate.dense", inner, stage.size),
                    activation,
                    tensors.read_linear(f"{prefix}output.dense", stage.size, inner),
                ]
                self._steps += [_Added(attention), _Added(mlp)]
            if index + 1 < len(spec.stages):
                self._steps.append(_Join(tensors, f"encoder.layers.{index}.downsample.", stage))

    def _black_image(self) -> ImagePayload:
        return black_image(self.spec.width, self.spec.height)

    def _encode(self, image: ImagePayload) -> Tensor:
        size = self.spec.width, self.spec.height
        if (image.width, image.height) != size:
            raise wrong_size(image, f"{size[0]} x {size[1]}")
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        return chained(self._steps, pixels.permute(1, 2, 0).contiguous()).flatten(0, 1)


class _Added:
    """Steps whose result is added to their input."""

    def __init__(self, steps: list[Block]) -> None:
        self._steps = steps

    def __call__(self, x_HWC: Tensor) -> Tensor:
        return x_HWC + chained(self._steps, x_HWC)


class _Join:
    """The end of a stage, which makes one place of 2 x 2, of which missing ones are zeros."""

    def __init__(self, tensors: VisionWeights, prefix: str, stage: SwinStage) -> None:
        size = 4 * stage.size
        self._norm: Norm = tensors.read_layer_norm(f"{prefix}norm", size, _NORM_EPS)
        self._product: Linear = tensors.read_linear(
            f"{prefix}reduction", size // 2, size, has_bias=False
        )

    def __call__(self, x_HWC: Tensor) -> Tensor:
        x = F.pad(x_HWC, (0, 0, 0, x_HWC.shape[1] % 2, 0, x_HWC.shape[0] % 2))
        x = torch.cat([x[row::2, column::2] for column in range(2) for row in range(2)], -1)
        return self._product(self._norm(x))


class _Windows:
    """Attention between the places of each window.

    Windows at the edges are completed by zeros. Shifted windows at one edge continue at the opposite one, whose places
    are hidden from each other.
    """

    def __init__(
        self, spec: SwinSpec, stage: SwinStage, tensors: VisionWeights, prefix: str, shift: int
    ) -> None:
        self._side, self._shift, self._num_heads = spec.window_size, shift, stage.num_heads
        size, side = stage.size, spec.window_size
        self._q, self._k, self._v = (
            tensors.read_linear(f"{prefix}self.{name}", size, size, has_bias=spec.qkv_bias)
            for name in ("query", "key", "value")
        )
        self._output: Linear = tensors.read_linear(f"{prefix}output.dense", size, size)
        distances = 2 * side - 1
        table = tensors.read(
            f"{prefix}self.relative_position_bias_table", distances**2, stage.num_heads
        )
        rows_P, columns_P = (
            x.flatten() for x in torch.meshgrid(*[torch.arange(side)] * 2, indexing="ij")
        )
        rows_PP, columns_PP = (x[:, None] - x + side - 1 for x in (rows_P, columns_P))
        at_PP = (rows_PP * distances + columns_PP).to(table.device)
        self._biases_GPP = table[at_PP].permute(2, 0, 1)

    def __call__(self, x_HWC: Tensor) -> Tensor:
        height, width, size = x_HWC.shape
        side, shift = self._side, self._shift
        x = F.pad(x_HWC, (0, 0, 0, -width % side, 0, -height % side))
        if shift:
            x = x.roll((-shift, -shift), (0, 1))
        cells = x.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
        windows_KPC = cells.reshape(-1, side * side, size)
        q, k, v = (
            product(windows_KPC).unflatten(2, (self._num_heads, -1)).transpose(1, 2)
            for product in (self._q, self._k, self._v)
        )
        added = self._biases_GPP[None]
        if shift:
            added = added + self._hidden(x.shape[0], x.shape[1]).to(added)
        out = F.scaled_dot_product_attention(q, k, v, added).transpose(1, 2).flatten(2)
        out = self._output(out).view(cells.shape).transpose(1, 2).reshape(x.shape)
        if shift:
            out = out.roll((shift, shift), (0, 1))
        return out[:height, :width]

    def _hidden(self, height: int, width: int) -> Tensor:
        """Return what is added to the scores of the places of windows, [K, 1, P, P]."""
        side, shift = self._side, self._shift
        # The last windows of each direction have places from both edges.
        rows_H, columns_W = (torch.arange(x) >= x - shift for x in (height, width))
        parts = rows_H[:, None] * 2 + columns_W
        parts_KP = (
            parts.view(height // side, side, width // side, side)
            .transpose(1, 2)
            .reshape(-1, side**2)
        )
        is_other = parts_KP[:, :, None] != parts_KP[:, None]
        return is_other[:, None] * _HIDDEN
