"""The ternary weights of BitNet (arXiv 2402.17764).

A module has `weight` [O / 4, D], with O output and D input features. Row i of the matrix is in the bits
2 * (i // (O / 4)) of row i % (O / 4), as 0, 1 or 2 for -1, 0 or 1. `weight_scale` has one number for the whole matrix.
"""

from __future__ import annotations

import torch

from .matrix import QuantizedMatrix
from .scheme import QuantizationScheme, StoredModule, shape_of

_VALUES_PER_BYTE = 4
_ZERO = 128


class TernaryScheme(QuantizationScheme):
    """The scheme of ternary weights. If `divides`, the matrix is divided by its scale instead of multiplied."""

    marker = "weight"
    marker_dtypes = frozenset({"U8"})
    companions = frozenset({"weight_scale"})

    def __init__(self, *, divides: bool) -> None:
        self._divides = divides

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_rows, num_columns = shape_of(module, "weight")
        return num_rows * _VALUES_PER_BYTE, num_columns

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        stored = shape_of(module, "weight")
        packed = module.read("weight", stored, None, columns)
        values_OD = torch.cat([packed >> 2 * i & 3 for i in range(_VALUES_PER_BYTE)])
        if int(values_OD.max()) > 2:
            raise module.problem(
                f"the tensor '{module.name}.weight' has values other than -1, 0, 1"
            )
        scale = module.read("weight_scale", (1,)).float().reshape(1, 1)
        # In formats of 4 bits, zero would not be exact.
        return QuantizedMatrix(
            values_OD[rows.start : rows.stop] + (_ZERO - 1),
            8,
            (1 / scale if self._divides else scale).expand(len(rows), 1),
            len(columns),
            zero_OG=_ZERO,
        )


class RoundedScheme(QuantizationScheme):
    """The scheme of ternary weights that are stored as the floats of training, which are rounded at load."""

    marker = "weight"
    marker_dtypes = frozenset({"BF16", "F16", "F32"})
    companions = frozenset()

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        return shape_of(module, "weight")

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix. The scale depends on the whole matrix."""
        weight_OD = module.load("weight").float()
        scale = weight_OD.abs().mean().clamp(min=1e-5)
        part_OD = weight_OD[rows.start : rows.stop, columns.start : columns.stop]
        values_OD = (part_OD / scale).round().clamp(-1, 1) + _ZERO
        scale_O1 = scale.expand(len(rows), 1)
        return QuantizedMatrix(values_OD.to(torch.uint8), 8, scale_O1, len(columns), zero_OG=_ZERO)
