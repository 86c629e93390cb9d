"""float8 (e4m3) weights, as vLLM, DeepSeek and compressed-tensors store them.

A module has `weight` [O, D] in float8 and, in any float type, its scales: `weight_scale`, one number or one for each
output, or `weight_scale_inv` (in spite of its name a factor, too) or `weight_scale`, one for each block. With static
activations it has a number `input_scale`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .matrix import ActivationScheme, QuantizedMatrix
from .scheme import ColumnGroups, QuantizationScheme, StoredModule, covering, shape_of


class Float8Scheme(QuantizationScheme):
    """`block_size` is that of a scale's rows and columns, where scales have blocks."""

    marker = "weight"
    marker_dtypes = frozenset({"F8_E4M3"})
    companions = frozenset({"weight_scale", "weight_scale_inv", "input_scale"})

    def __init__(self, activations: ActivationScheme, block_size: tuple[int, int] | None) -> None:
        self._activations = activations
        self._block_size = block_size

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        return shape_of(module, "weight")

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        shape = self.matrix_shape(module)
        weight_OD = module.read("weight", shape, rows, columns)
        if self._block_size is None:
            scale_OG, group_size = self._scale_of_rows(module, shape[0], rows), len(columns)
        else:
            scale_OG, group_size = self._scale_of_blocks(module, shape, rows, columns)
        input_scale = None
        if self._activations is ActivationScheme.STATIC:
            input_scale = float(_number(module, "input_scale"))
        return QuantizedMatrix(
            weight_OD,
            None,
            scale_OG,
            group_size,
            activations=self._activations,
            input_scale=input_scale,
        )

    @staticmethod
    def _scale_of_rows(module: StoredModule, num_rows: int, rows: range) -> Tensor:
        found = module.shape("weight_scale") or ()
        if math.prod(found) == num_rows and len(found) in (1, 2):
            # Of one output it does not matter which it is.
            scale = module.read("weight_scale", found, rows).float()
            return scale.reshape(-1, 1)
        return _number(module, "weight_scale").expand(len(rows), 1)

    def _scale_of_blocks(
        self, module: StoredModule, shape: tuple[int, int], rows: range, columns: range
    ) -> tuple[Tensor, int]:
        assert self._block_size is not None
        block_rows, block_columns = self._block_size
        name = "weight_scale_inv" if module.has("weight_scale_inv") else "weight_scale"
        groups = ColumnGroups.of(columns, block_columns, shape[1])
        num_blocks = (-(-shape[0] // block_rows), -(-shape[1] // block_columns))
        blocks = module.read(name, num_blocks, covering(rows, block_rows), groups.stored)
        scale_OG = blocks.float()[
            torch.arange(rows.start, rows.stop) // block_rows - rows.start // block_rows
        ]
        return groups.expand(scale_OG), groups.size


def _number(module: StoredModule, tensor: str) -> Tensor:
    """Read a tensor of one number."""
    found = module.shape(tensor)
    return module.read(tensor, (1,) if found == (1,) else ()).float().reshape(())
