"""Merges squares of patches between two layers of a tower (MiniCPM-V 4.6).

Shapes: P patches, D hidden size of the tower, M merged patches, H heads.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ..weights import Linear, VisionWeights, attend
from .merging import squares

_SIDE = 2


class WindowMerger:
    """Lets the patches of each square attend to each other, and projects them to one patch."""

    def __init__(self, spec: VisionSpec, tensors: VisionWeights) -> None:
        size, joined, prefix = spec.hidden_size, spec.hidden_size * _SIDE**2, "vit_merger."
        self._num_heads = spec.num_heads
        self._norm = tensors.read_layer_norm(f"{prefix}layer_norm1", size, spec.norm_eps)
        self._qkv = Linear.join(
            [tensors.read_linear(f"{prefix}self_attn.{n}_proj", size, size) for n in "qkv"]
        )
        self._output = tensors.read_linear(f"{prefix}self_attn.out_proj", size, size)
        self._joined_norm = tensors.read_layer_norm(f"{prefix}pre_norm", joined, spec.norm_eps)
        inner = spec.intermediate_size * _SIDE**2
        self._first = tensors.read_linear(f"{prefix}linear_1", inner, joined)
        self._second = tensors.read_linear(f"{prefix}linear_2", size, inner)

    def __call__(self, x_PD: Tensor, num_columns: int) -> Tensor:
        """Return the merged patches [M, D] of an image with this number of patches per row."""
        x = squares(x_PD, num_columns, _SIDE)
        q, k, v = self._qkv(self._norm(x)).chunk(3, -1)
        x = x + self._output(attend(q, k, v, self._num_heads))
        inner = F.gelu(self._first(self._joined_norm(x.flatten(1))), approximate="tanh")
        return self._second(inner) + x.mean(1)
