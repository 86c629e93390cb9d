"""Matrices of integers of any number of bits, or of floats, as `plane_kernels.py` reads them.

If both factors are float8, torch has faster products for many tokens, which may sum in another order
(`library_products.py`).

Shapes: O output and D input features, G groups of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ...loaders.quantization.matrix import ActivationScheme, QuantizedMatrix
from ..float8 import Float8Rows, Rounding
from .bit_planes import pack_plane, planes_of
from .library_products import LibraryProduct, library_product
from .plane_kernels import dequantize_kernel, linear_kernel
from .product import QuantizedProduct, Tile

_SMALLEST_GROUP = 16
_SMALLEST_FLOAT8_GROUP = 32
_WHOLE_ROW = 1 << 30
_BLOCK_ROWS, _BLOCK_COLUMNS = 64, 128


def kept_group_size(matrix: QuantizedMatrix) -> int:
    """Return how many columns share a scale in the kernel: all of them, or a power of two."""
    if matrix.scale_OG.shape[1] == 1:
        return matrix.shape[1]
    return matrix.group_size & -matrix.group_size


def can_keep(matrix: QuantizedMatrix) -> bool:
    """Return whether the kernels support the matrix without dequantizing it."""
    smallest = _SMALLEST_GROUP
    if matrix.activations is ActivationScheme.GROUP:
        smallest = _SMALLEST_FLOAT8_GROUP
    return matrix.scale_OG.shape[1] == 1 or kept_group_size(matrix) >= smallest


class PlaneMatrix(QuantizedProduct):
    """A matrix that `can_keep` accepts, or the matrices of several experts."""

    tiles = (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3))
    invariant_tiles = tiles

    def __init__(
        self, matrix: QuantizedMatrix, *, num_experts: int = 1, is_batch_invariant: bool = False
    ) -> None:
        super().__init__(matrix, num_experts=num_experts, is_batch_invariant=is_batch_invariant)
        self._pack_values(matrix)
        self._set_groups(matrix)
        self._block_columns = _BLOCK_COLUMNS
        if matrix.activations is not ActivationScheme.NONE:
            self.rounding = Rounding(None, matrix.input_scale)
            if matrix.activations is ActivationScheme.GROUP and self._num_groups > 1:
                self.rounding = Rounding(self._group_size)
                self._block_columns = min(_BLOCK_COLUMNS, self._group_size)
        # Scaling after the product costs less, and scaled elements need not be rounded.
        if self._offset_OG is not None:
            self._scaled = "elements"
        elif self._num_groups == 1:
            self._scaled = "rows"
        else:
            is_wide = self._group_size >= self._block_columns
            self._scaled = "groups" if is_wide else "elements"
        self._library: LibraryProduct | None = None
        if not is_batch_invariant and num_experts == 1 and matrix.column_order_D is None:
            self._library = library_product(self._low, self._scale_OG, self.rounding)

    def _pack_values(self, matrix: QuantizedMatrix) -> None:
        values_OD, bits = matrix.values_OD, matrix.bits
        self._bits, self._high_bits = (0, 0) if bits is None else planes_of(bits)
        self._high: Tensor | None = None
        if bits is None:
            self._low = values_OD.contiguous()
            return
        self._low = pack_plane(values_OD & ((1 << self._bits) - 1), self._bits)
        if self._high_bits:
            self._high = pack_plane(values_OD >> self._bits, self._high_bits)

    def _set_groups(self, matrix: QuantizedMatrix) -> None:
        self._group_size = size = kept_group_size(matrix)
        self._num_groups = triton.cdiv(self.num_columns, size)

        def regrouped(x_OG: Tensor) -> Tensor:
            repeated = x_OG.repeat_interleave(max(1, matrix.group_size // size), 1)
            return repeated[:, : self._num_groups].contiguous()

        self._scale_OG = regrouped(matrix.scale_OG)
        if matrix.input_scale is not None:
            self._scale_OG = self._scale_OG * matrix.input_scale
        zero = matrix.zero_OG
        self._zero = zero if isinstance(zero, int) else 0
        self._zero_OG = None if isinstance(zero, int) else regrouped(zero)
        self._offset_OG = None if matrix.offset_OG is None else regrouped(matrix.offset_OG)

    def multiply(
        self, x: Float8Rows, bias_O: Tensor | None, out_TO: Tensor, ends_E: Tensor | None = None
    ) -> None:
        """Write the product; see `QuantizedProduct.multiply`."""
        # Torch's products output only bfloat16.
        dtypes = {out_TO.dtype, out_TO.dtype if bias_O is None else bias_O.dtype}
        is_large = len(x.values_TD) > self.tiles[-1].tokens
        fits_library = is_large and ends_E is None and dtypes == {torch.bfloat16}
        if self._library is not None and fits_library:
            self._library(x, bias_O, out_TO)
        else:
            super().multiply(x, bias_O, out_TO, ends_E)

    @property
    def _stored(self) -> dict[str, Any]:
        """The arguments of kernels that describe the stored matrix."""
        return {
            "low_ptr": self._low,
            "low_stride": self._low.stride(0),
            "high_ptr": self._high,
            "high_stride": 0 if self._high is None else self._high.stride(0),
            "scale_ptr": self._scale_OG,
            "zero_ptr": self._zero_OG,
            "offset_ptr": self._offset_OG,
            "num_groups": self._num_groups,
            "BITS": self._bits,
            "HIGH_BITS": self._high_bits,
            "ZERO": self._zero,
            "GROUP": _WHOLE_ROW if self._num_groups == 1 else self._group_size,
        }

    def launch(
        self, grid: tuple[int, int, int], x_scale_TG: Tensor | None, arguments: dict[str, Any]
    ) -> None:
        """Multiply tokens by the matrix."""
        linear_kernel[grid](
            x_scale_ptr=x_scale_TG,
            one=1.0,
            SCALED=self._scaled,
            BLOCK_D=self._block_columns,
            **self._stored,
            **arguments,
        )

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [O, D] in floats."""
        shape = (self.num_rows, self.num_columns)
        numbers_OD = torch.empty(shape, dtype=dtype, device=self._low.device)
        grid = (
            triton.cdiv(self.num_columns, _BLOCK_COLUMNS),
            triton.cdiv(self.num_rows, _BLOCK_ROWS),
        )
        dequantize_kernel[grid](
            out_ptr=numbers_OD,
            num_rows=self.num_rows,
            num_columns=self.num_columns,
            BLOCK_O=_BLOCK_ROWS,
            BLOCK_D=_BLOCK_COLUMNS,
            **self._stored,
        )
        return numbers_OD
