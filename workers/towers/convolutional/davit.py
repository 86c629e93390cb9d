"""A vision tower whose places attend in windows, and channels to each other (DaViT in Florence-2), in torch.

Shapes: H rows and W columns of places, C channels, G heads or groups.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.davit import DavitSpec, DavitStage
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, wrong_size
from ..pixels import normalized_pixels
from ..weights import Linear, Norm, VisionWeights, find_activation
from .convolution import Block, Convolution, chained

_NORM_EPS: Final = 1e-5
_MARKER: Final = "convs.0.conv.weight"
_PROJECTION: Final = "multi_modal_projector."


class DavitTower(ImageTower):
    """The tower described by `spec` and its projection."""

    def __init__(self, spec: DavitSpec, source: TowerSource) -> None:
        side = 1
        while not spec.num_places(side):
            side *= 2
        super().__init__(source, spec.output_size, side)
        self.spec = spec
        tensors, inputs = source.weights(_MARKER, spec.tensor_names), 3
        self._activation = find_activation(source.checkpoint, spec.activation)
        self._steps: list[Block] = []
        for index, stage in enumerate(spec.stages):
            self._steps.append(_Reduce(tensors, f"convs.{index}.", stage, inputs))
            for number in range(stage.depth):
                self._steps += self._block(tensors, f"blocks.{index}.{number}.", stage)
            inputs = stage.size
        names = source.weights(f"{_PROJECTION}image_projection.weight", spec.tensor_names)
        half = inputs // 2
        self._rows, self._columns = (
            names.read(
                f"{_PROJECTION}image_position_embed.{name}_embeddings.weight",
                spec.num_positions,
                size,
            )
            for name, size in (("row", half), ("column", inputs - half))
        )
        self._time = names.read_rows(
            f"{_PROJECTION}visual_temporal_embed.pos_idx_to_embed", (0,), spec.num_times, inputs
        )
        shape = spec.output_size, inputs
        if spec.has_transposed_projection:
            matrix = names.read(f"{_PROJECTION}image_projection.weight", *shape[::-1])
            self._project = Linear(matrix.t().contiguous())
        else:
            self._project = names.read_linear(
                f"{_PROJECTION}image_projection", *shape, has_bias=False
            )
        self._norm: Norm = names.read_layer_norm(
            f"{_PROJECTION}image_proj_norm", spec.output_size, _NORM_EPS
        )

    def _encode(self, image: ImagePayload) -> Tensor:
        most = self.spec.num_positions
        sides = self.spec.num_places(image.width), self.spec.num_places(image.height)
        if not (min(sides) > 0 and max(sides) <= most):
            raise wrong_size(image, f"1 to {most} embeddings in each direction")
        pixels = normalized_pixels(image, self._device, self._dtype)[0]
        x_HWC = chained(self._steps, pixels.permute(1, 2, 0).contiguous())
        height, width = x_HWC.shape[:2]
        columns = self._columns[:width].expand(height, -1, -1)
        rows = self._rows[:height, None].expand(-1, width, -1)
        x = (x_HWC + torch.cat((columns, rows), -1)).flatten(0, 1) + self._time
        return self._norm(self._project(torch.cat((x.mean(0, keepdim=True), x))))

    def _block(self, tensors: VisionWeights, prefix: str, stage: DavitStage) -> list[Block]:
        steps: list[Block] = []
        attentions: tuple[tuple[str, str, type[_Windows | _Channels]], ...] = (
            ("spatial_block.", "window_attn", _Windows),
            ("channel_block.", "channel_attn", _Channels),
        )
        for part, name, kind in attentions:
            attention = kind(self.spec, stage, tensors, f"{prefix}{part}{name}.")
            inner = int(stage.size * self.spec.mlp_ratio)
            mlp: list[Block] = [
                tensors.read_linear(f"{prefix}{part}ffn.fc1", inner, stage.size),
                self._activation,
                tensors.read_linear(f"{prefix}{part}ffn.fc2", stage.size, inner),
            ]
            for number, inside in ((1, [attention]), (2, mlp)):
                where = f"{prefix}{part}conv{number}."
                weight = tensors.read(f"{where}weight", stage.size, 1, 3, 3)
                bias = tensors.read(f"{where}bias", stage.size)
                norm = tensors.read_layer_norm(f"{prefix}{part}norm{number}", stage.size, _NORM_EPS)
                steps.append(_Added([Convolution(weight, bias, is_centered=True)]))
                steps.append(_Added([norm, *inside]))
        return steps


class _Added:
    """Steps whose result is added to their input."""

    def __init__(self, steps: list[Block]) -> None:
        self._steps = steps

    def __call__(self, x_HWC: Tensor) -> Tensor:
        return x_HWC + chained(self._steps, x_HWC)


class _Reduce:
    """The convolution at the beginning of a stage, with a norm before it or after it."""

    def __init__(self, tensors: VisionWeights, prefix: str, stage: DavitStage, inputs: int) -> None:
        side, self._stage = stage.kernel, stage
        self._weight = tensors.read(f"{prefix}conv.weight", stage.size, inputs, side, side)
        self._bias = tensors.read(f"{prefix}conv.bias", stage.size)
        size = inputs if stage.norms_first else stage.size
        self._norm: Norm = tensors.read_layer_norm(f"{prefix}norm", size, _NORM_EPS)

    def __call__(self, x_HWC: Tensor) -> Tensor:
        stage = self._stage
        if stage.norms_first:
            x_HWC = self._norm(x_HWC)
        x = x_HWC.permute(2, 0, 1)[None]
        x = F.conv2d(x, self._weight, self._bias, stage.stride, stage.padding)
        x_HWC = x[0].permute(1, 2, 0)
        return x_HWC if stage.norms_first else self._norm(x_HWC)


class _Attention:
    """The products of an attention."""

    def __init__(
        self, spec: DavitSpec, stage: DavitStage, tensors: VisionWeights, prefix: str
    ) -> None:
        self._side, self._num_heads = spec.window_size, stage.num_heads
        self._num_groups = stage.num_groups
        size = stage.size
        self._qkv: Linear = tensors.read_linear(
            f"{prefix}qkv", 3 * size, size, has_bias=spec.qkv_bias
        )
        self._output: Linear = tensors.read_linear(f"{prefix}proj", size, size)


class _Windows(_Attention):
    """Attention between the places of each window. Windows at the edges are completed by zeros, which are seen."""

    def __call__(self, x_HWC: Tensor) -> Tensor:
        height, width, size = x_HWC.shape
        side = self._side
        padded = F.pad(x_HWC, (0, 0, 0, -width % side, 0, -height % side))
        cells = padded.unflatten(0, (-1, side)).unflatten(2, (-1, side)).transpose(1, 2)
        qkv = self._qkv(cells.reshape(-1, side * side, size))
        q, k, v = qkv.unflatten(2, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out = self._output(out).view(cells.shape).transpose(1, 2).reshape(padded.shape)
        return out[:height, :width]


class _Channels(_Attention):
    """Attention between the channels of each group, whose elements are their values at all places."""

    def __call__(self, x_HWC: Tensor) -> Tensor:
        qkv = self._qkv(x_HWC).flatten(0, 1).unflatten(1, (3, self._num_groups, -1))
        q, k, v = qkv.permute(1, 2, 3, 0)
        out = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1)
        return self._output(out.reshape(x_HWC.shape))
