"""A projection of several parts, in each of which queries read windows of patches (Granite 4 Vision).

Shapes: P patches, D hidden size of the tower, F feature layers, W windows, K embeddings, E output size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ....protocol.checkpoint.vision.spec import VisionSpec, WindowQueries, WindowsSpec
from ...loaders import Checkpoint
from ..weights import VisionWeights
from .query_former import QueryFormer

_NORM_EPS = 1e-6


def read_window_queries(
    spec: VisionSpec, checkpoint: Checkpoint, read: Callable[[str], VisionWeights]
) -> Callable[[Tensor, int], Tensor]:
    """Return the projection that `spec.windows` describes."""
    windows, size = spec.windows, spec.output_size // (1 + len(spec.added_after))
    assert windows is not None
    parts = [
        _Part(windows, each, spec.hidden_size, size, read(f"{each.name}.query"), checkpoint)
        for each in windows.parts
    ]

    def project(x_PD: Tensor, num_columns: int) -> Tensor:
        features = x_PD.split(spec.hidden_size, 1)
        outputs = [part(features[part.feature]) for part in parts]
        if windows.begins_with_zeros:
            outputs.insert(0, torch.zeros_like(outputs[0]))
        return torch.cat(outputs, 1)

    return project


class _Part:
    def __init__(
        self,
        spec: WindowsSpec,
        queries: WindowQueries,
        size: int,
        output_size: int,
        tensors: VisionWeights,
        checkpoint: Checkpoint,
    ) -> None:
        name, self._spec = f"{queries.name}.", spec
        self.feature, self._offset = queries.feature, queries.offset
        self._norm = tensors.read_layer_norm(f"{name}norm", size, _NORM_EPS)
        self._queries = tensors.read(f"{name}query", spec.query_side**2, size)
        self._places = tensors.read(f"{name}image_positions", spec.window_side**2, size)
        self._former = QueryFormer(spec.queries, tensors, f"{name}qformer.", checkpoint)
        self._output = tensors.read_linear(f"{name}out_linear", output_size, size)

    def __call__(self, x_PD: Tensor) -> Tensor:
        """Return a part of the embeddings [K, E] of a square image."""
        spec, side = self._spec, math.isqrt(len(x_PD))
        x_PD = self._norm(x_PD)
        grid = x_PD.unflatten(0, (side, side))
        num_windows = side // spec.window_side
        if self._offset < 0:
            count = num_windows * spec.query_side
            small = F.interpolate(grid.permute(2, 0, 1)[None], (count, count), mode="area")
            first = small[0].permute(1, 2, 0)
        else:
            row, column = divmod(self._offset, 2)
            first = grid[row::2, column::2]
        queries = self._queries + _windows(first, spec.query_side)
        outputs = self._former(queries, _windows(grid, spec.window_side) + self._places)
        # Put the outputs of the windows in the order of the whole grid.
        shape = (num_windows, num_windows, spec.query_side, spec.query_side)
        rows = outputs.flatten(0, 1).unflatten(0, shape).transpose(1, 2).flatten(0, 3)
        return self._output(rows)


def _windows(grid: Tensor, side: int) -> Tensor:
    """Return the rows of each window [W, side ** 2, D] of a grid [rows, columns, D]."""
    cells = grid.unflatten(1, (-1, side)).unflatten(0, (-1, side))
    return cells.transpose(1, 2).flatten(2, 3).flatten(0, 1)
