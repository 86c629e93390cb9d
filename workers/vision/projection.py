"""The projection of a vision tower's features into the hidden size of the decoder.

Shapes: P patches, D hidden size of the tower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from ...protocol.checkpoint.vision.spec import VisionSpec
from ..loaders import Checkpoint
from .weights import VisionWeights, find_activation

_MATRIX: Final = "connector.modality_projection.proj.weight"
_MLP: Final = "multi_modal_projector."
_NORM_EPS: Final = 1e-5


def read_projection(
    spec: VisionSpec, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return the function from features [P, D] to embeddings.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    size = spec.output_size
    columns = spec.hidden_size * len(spec.feature_layers) * spec.shuffle_factor**2
    factor = spec.shuffle_factor
    if spec.projection == "matrix":
        weights = VisionWeights(checkpoint, _MATRIX, device, dtype)
        weight = weights.read(_MATRIX, size, columns)
        return lambda x_PD: F.linear(_shuffle(x_PD, factor), weight)
    weights = VisionWeights(checkpoint, f"{_MLP}linear_1.weight", device, dtype)
    has_bias = spec.projection_bias
    first = weights.read_linear(f"{_MLP}linear_1", size, columns, has_bias=has_bias)
    second = weights.read_linear(f"{_MLP}linear_2", size, size, has_bias=has_bias)
    activation = find_activation(checkpoint, spec.projection_activation)
    norm: Callable[[Tensor], Tensor] = lambda x: x  # noqa: E731
    if spec.has_projection_norm:
        norm = weights.read_layer_norm(f"{_MLP}layer_norm", columns, _NORM_EPS)
    return lambda x_PD: F.linear(
        activation(F.linear(norm(_shuffle(x_PD, factor)), *first)), *second
    )


def _shuffle(x_PD: Tensor, factor: int) -> Tensor:
    """Return the features of each square of `factor` by `factor` patches as one row."""
    if factor == 1:
        return x_PD
    side = int(len(x_PD) ** 0.5)
    x = x_PD.view(side // factor, factor, side // factor, factor, x_PD.shape[1])
    return x.permute(0, 2, 1, 3, 4).reshape((side // factor) ** 2, -1)
