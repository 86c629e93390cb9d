"""A vision tower of convolutions and attention (MobileNet-V5 in Gemma 3n), in torch.

Shapes: H rows and W columns of places, C channels, D hidden size of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.convolutional.mobilenet import ConvBlock, ConvVisionSpec
from ....protocol.encoder_inputs.payloads import ImagePayload
from ..image_tower import ImageTower, TowerSource, wrong_size
from ..pixels import normalized_pixels
from ..weights import Norm
from .mobilenet_blocks import read_block, read_inverted, read_norm, read_stem


class MobileNetTower(ImageTower):
    """The tower described by `spec` and its projection."""

    def __init__(self, spec: ConvVisionSpec, source: TowerSource) -> None:
        super().__init__(source, spec.output_size, 16 * spec.output_side)
        self.spec = spec
        tensors = source.weights("conv_stem.conv.weight")
        self._stem = read_stem(tensors, spec.stem_size)
        self._stages = [
            [read_block(tensors, f"blocks.{i}.{j}.", block) for j, block in enumerate(stage)]
            for i, stage in enumerate(spec.stages)
        ]
        joined = sum(stage[-1].outputs for stage in spec.stages[-2:])
        fuse = ConvBlock("inverted", joined, spec.hidden_size, spec.fused_size)
        self._fuse = read_inverted(tensors, "msfa.ffn.", fuse)
        self._fused_norm = read_norm(tensors, "msfa.norm", spec.hidden_size)
        name, size = "embed_vision.embedding.weight", spec.hidden_size
        projection = source.weights(name)
        prefix = "embed_vision."

        def norm(name: str) -> Norm:
            return projection.read_rms_norm(prefix + name, size, spec.norm_eps)

        self._norm = norm("soft_embedding_norm")
        self._project = projection.read_linear(
            f"{prefix}embedding_projection", spec.output_size, size, has_bias=False
        )
        table = projection.read(name, spec.vocab_size, size)
        self._end_1D = self._projected(norm("hard_embedding_norm")(table[spec.end_row][None]))

    def _encode(self, image: ImagePayload) -> Tensor:
        """Return the embeddings [outputs, output size] of an image and of the token after it."""
        side = self.spec.output_side
        if min(image.width, image.height) < side:
            raise wrong_size(image, f"sides of at least {side}")
        features = self._features(normalized_pixels(image, self._device, self._dtype)[0])
        soft = self._norm(features * self.spec.hidden_size**0.5)
        return torch.cat((self._projected(soft), self._end_1D))

    def _features(self, pixels: Tensor) -> Tensor:
        """Return the features [places, D] of an image [3, height, width]."""
        x_HWC = self._stem(pixels.permute(1, 2, 0).contiguous())
        stages = []
        for blocks in self._stages:
            for block in blocks:
                x_HWC = block(x_HWC)
            stages.append(x_HWC.permute(2, 0, 1)[None])
        high, low = stages[-2:]
        joined = torch.cat((high, F.interpolate(low, high.shape[2:], mode="nearest")), 1)
        fused = self._fuse(joined[0].permute(1, 2, 0)).permute(2, 0, 1)[None]
        side = self.spec.output_side
        num_rows, num_columns = fused.shape[2:]
        if (num_rows, num_columns) != (side, side):
            if num_rows % side or num_columns % side:
                fused = F.interpolate(fused, (side, side), mode="bilinear")
            else:
                fused = F.avg_pool2d(fused, (num_rows // side, num_columns // side))
        return self._fused_norm(fused[0].flatten(1).T)

    def _projected(self, x: Tensor) -> Tensor:
        return F.rms_norm(self._project(x), (self.spec.output_size,), None, self.spec.norm_eps)
