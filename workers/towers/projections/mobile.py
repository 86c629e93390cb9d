"""The projections of MobileVLM, which halve both sides of an image by convolutions or means.

Shapes: P patches, D output size, R rows and C columns of patches.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ...loaders import Checkpoint
from ..weights import VisionWeights

_MLP = "multi_modal_projector."
_NORM_EPS = 1e-5


def read_convolved_mlp(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection of MobileVLM (arXiv 2312.16886): an MLP, and two blocks of convolutions."""
    weights = read(f"{_MLP}linear_1.weight")
    mlp = _mlp(spec, weights)
    blocks = [
        _Block(weights, f"{_MLP}blocks.{index}.", spec.output_size, stride)
        for index, stride in enumerate((1, spec.merge_factor))
    ]

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_DRC = mlp(x_PD).T.unflatten(1, (-1, num_columns))
        for block in blocks:
            x_DRC = block(x_DRC)
        return x_DRC.flatten(1).T

    return project


def read_pooled_mlp(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection of MobileVLM V2 (arXiv 2402.03766): an MLP, means of squares, and a convolution."""
    weights, size = read(f"{_MLP}linear_1.weight"), spec.output_size
    mlp = _mlp(spec, weights)
    kernel = weights.read(f"{_MLP}depthwise.weight", size, 1, 3, 3)
    bias = weights.read(f"{_MLP}depthwise.bias", size)

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_DRC = mlp(x_PD).T.unflatten(1, (-1, num_columns))
        x_DRC = F.avg_pool2d(x_DRC, spec.merge_factor)
        x_DRC = x_DRC + F.conv2d(x_DRC, kernel, bias, padding=1, groups=size)
        return x_DRC.flatten(1).T

    return project


def _mlp(spec: VisionSpec, weights: VisionWeights) -> Callable[[Tensor], Tensor]:
    size = spec.output_size
    first = weights.read_linear(f"{_MLP}linear_1", size, spec.hidden_size)
    second = weights.read_linear(f"{_MLP}linear_2", size, size)
    return lambda x_PD: second(F.gelu(first(x_PD)))


class _Block:
    """An inverted residual of MobileNetV3 (arXiv 1905.02244) that does not change the number of channels."""

    def __init__(self, weights: VisionWeights, prefix: str, size: int, stride: int) -> None:
        self._stride = stride
        self._kernel = weights.read(f"{prefix}depthwise.weight", size, 1, 3, 3)
        self._norms = [weights.read_layer_norm(f"{prefix}norm{i}", size, _NORM_EPS) for i in (1, 2)]
        inner = _whole_eights(size // 4)
        self._squeeze = weights.read_linear(f"{prefix}fc1", inner, size)
        self._excite = weights.read_linear(f"{prefix}fc2", size, inner)
        self._pointwise = weights.read_linear(f"{prefix}pointwise", size, size, has_bias=False)

    def __call__(self, x_DRC: Tensor) -> Tensor:
        y_DRC = F.conv2d(x_DRC, self._kernel, stride=self._stride, padding=1, groups=len(x_DRC))
        y_RCD = F.hardswish(self._norms[0](y_DRC.movedim(0, -1)))
        factors_D = F.hardsigmoid(self._excite(F.relu(self._squeeze(y_RCD.mean((0, 1))))))
        y_DRC = self._norms[1](self._pointwise(y_RCD * factors_D)).movedim(-1, 0)
        return y_DRC + x_DRC if self._stride == 1 else y_DRC


def _whole_eights(count: int) -> int:
    """Return the multiple of 8 that is nearest to a number of channels, at least 8, and not below nine tenths of it."""
    found = max(8, (count + 4) // 8 * 8)
    return found + 8 if found < 0.9 * count else found
