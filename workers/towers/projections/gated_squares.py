"""The projection of GLM-4V 9B, which reads squares of patches and adds two embeddings.

Shapes: P patches, D output size, R rows and C columns of patches, M embeddings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ...loaders import Checkpoint
from ..weights import Linear, VisionWeights

_NAME = "multi_modal_projector."
_NORM_EPS = 1e-5


def read_gated_squares(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection: a convolution of squares, a product, a norm and a gated MLP, between stored embeddings."""
    weights, size, side = read(f"{_NAME}conv.weight"), spec.output_size, spec.merge_factor

    def product(name: str, rows: int, columns: int) -> Linear:
        return weights.read_linear(f"{_NAME}linear_proj.{name}", rows, columns, has_bias=False)

    kernel = weights.read(f"{_NAME}conv.weight", size, spec.hidden_size, side, side)
    bias = weights.read(f"{_NAME}conv.bias", size)
    first = product("linear_proj", size, size)
    norm = weights.read_layer_norm(f"{_NAME}linear_proj.norm1", size, _NORM_EPS)
    gate, up = (product(name, spec.adapter_size, size) for name in ("gate_proj", "dense_h_to_4h"))
    down = product("dense_4h_to_h", size, spec.adapter_size)
    start_1D, end_1D = (weights.read(f"{_NAME}{name}", 1, size) for name in ("boi", "eoi"))

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        x_DRC = x_PD.T.unflatten(1, (-1, num_columns))
        x_MD = F.conv2d(x_DRC, kernel, bias, stride=side).flatten(1).T
        x_MD = F.gelu(norm(first(x_MD)))
        x_MD = down(F.silu(gate(x_MD)) * up(x_MD))
        return torch.cat((start_1D, x_MD, end_1D)) * spec.output_scale

    return project
