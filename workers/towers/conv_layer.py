"""A layer of a tower that convolves the patches of an image (LFM3-VL), in torch.

Shapes: P patches of an image, D hidden size of the tower.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.grid import GridVisionSpec
from .weights import VisionWeights, activation


class ConvLayer:
    """A gated convolution of each channel over the grid of patches, and a gated MLP, each with a norm before it."""

    def __init__(self, spec: GridVisionSpec, tensors: VisionWeights, prefix: str) -> None:
        size, inner, side = spec.hidden_size, spec.intermediate_size, spec.conv_size
        self._merge = spec.merge_size
        self._norms = [
            tensors.read_norm(f"{prefix}norm{i}", size, spec.norm_kind, spec.norm_eps)
            for i in (1, 2)
        ]
        self._inputs, self._output, self._gate, self._up, self._down = (
            tensors.read_linear(f"{prefix}{name}", rows, columns, has_bias=spec.has_biases)
            for name, rows, columns in (
                ("conv.in_proj", 3 * size, size),
                ("conv.out_proj", size, size),
                ("mlp.gate_proj", inner, size),
                ("mlp.up_proj", inner, size),
                ("mlp.down_proj", size, inner),
            )
        )
        self._taps = tensors.read(f"{prefix}conv.spatial_conv.weight", size, 1, side, side)
        self._activation = activation(spec.activation)

    def __call__(self, x_PD: Tensor, num_rows: int, num_columns: int) -> Tensor:
        """Return the hidden states [P, D] after the layer, given the rows and columns of cells.

        Patches are ordered by cells, which are squares of them.
        """
        before_PD, after_PD, in_PD = self._inputs(self._norms[0](x_PD)).chunk(3, -1)
        merge = self._merge
        cells = (before_PD * in_PD).view(num_rows, num_columns, merge, merge, -1)
        grid = cells.permute(4, 0, 2, 1, 3).flatten(3, 4).flatten(1, 2)
        convolved = F.conv2d(
            grid[None], self._taps, padding=self._taps.shape[-1] // 2, groups=len(grid)
        )[0]
        cells = convolved.view(-1, num_rows, merge, num_columns, merge)
        x_PD = x_PD + self._output(after_PD * cells.permute(1, 3, 2, 4, 0).reshape(x_PD.shape))
        normed = self._norms[1](x_PD)
        return x_PD + self._down(self._activation(self._gate(normed)) * self._up(normed))
