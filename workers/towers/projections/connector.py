"""A projection with a part for each of several layers of a tower (Granite for Docling).

Shapes: P patches, D hidden size of the tower, M merged rows, E output size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec
from ...loaders import Checkpoint
from ..weights import VisionWeights
from .merging import side_by_side, waves

_NORM_EPS = 1e-5
_PREFIX = "connector."
_PATH = f"{_PREFIX}coarse."


def read_connector(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection of the features of several layers, of which those of the last layer come last."""
    tensors = read(f"{_PREFIX}ln_in.weight")
    inner, factor = spec.hidden_size, spec.merge_factor
    size, merged = spec.output_size // (1 + len(spec.added_after)), inner * factor**2
    last_norm = tensors.read_layer_norm("post_layernorm", inner, spec.norm_eps)
    first_norm = tensors.read_layer_norm(f"{_PREFIX}ln_in", inner, _NORM_EPS)
    first = tensors.read_linear(f"{_PATH}projection", size, merged, has_bias=False)
    middle_norm, output_norm = (
        tensors.read_layer_norm(f"{_PREFIX}{name}", size, _NORM_EPS)
        for name in ("ln_mid", "ln_out")
    )
    second = tensors.read_linear(f"{_PREFIX}mlp_fc2", size, size, has_bias=False)
    others = [
        _MergedMlp(tensors, f"{_PATH}deepstack_mergers.{index}.", merged, size)
        for index in range(len(spec.added_after))
    ]

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        *features, last = x_PD.split(inner, 1)
        x_ME = first(side_by_side(first_norm(last_norm(last)), num_columns, factor))
        columns = num_columns // factor
        x_ME = x_ME + waves(len(x_ME) // columns, columns, size).to(x_ME)
        x_ME = output_norm(second(F.gelu(middle_norm(x_ME)))) * spec.output_scale
        parts = [
            part(side_by_side(each, num_columns, factor))
            for each, part in zip(features, others, strict=True)
        ]
        return torch.cat((x_ME, *parts), 1)

    return project


class _MergedMlp:
    def __init__(self, tensors: VisionWeights, prefix: str, columns: int, size: int) -> None:
        self._norm = tensors.read_layer_norm(f"{prefix}layer_norm", columns, _NORM_EPS)
        self._first = tensors.read_linear(f"{prefix}linear_1", size, columns)
        self._second = tensors.read_linear(f"{prefix}linear_2", size, size)

    def __call__(self, x: Tensor) -> Tensor:
        return self._second(F.gelu(self._first(self._norm(x))))
