"""Products with quantized matrices, without dequantizing them in memory for few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ...loaders.quantization.matrix import QuantizedMatrix
from ..float8 import Float8Rows, Rows
from .plane_matrix import PlaneMatrix
from .product import QuantizedProduct
from .word_matrix import WordMatrix, supports_words


def quantized_product(
    matrix: QuantizedMatrix, *, num_experts: int = 1, is_batch_invariant: bool = False
) -> QuantizedProduct:
    """Return the product with a matrix that `can_keep` accepts, or with those of `num_experts` experts."""
    kind = WordMatrix if supports_words(matrix) else PlaneMatrix
    return kind(matrix, num_experts=num_experts, is_batch_invariant=is_batch_invariant)


class QuantizedLinear:
    """Computes x [T, D] -> x @ matrix.T + bias, in `dtype`, for matrices that together make up the rows.

    `can_keep` must accept every matrix. If all of them round their input in the same way, `rounding` describes it, and
    the input may be passed in rounded form.
    """

    def __init__(
        self,
        matrices: Sequence[QuantizedMatrix],
        bias_O: Tensor | None,
        dtype: torch.dtype,
        *,
        is_batch_invariant: bool = False,
    ) -> None:
        self._dtype = dtype
        self._bias_O = bias_O
        self._parts = [
            quantized_product(matrix, is_batch_invariant=is_batch_invariant) for matrix in matrices
        ]
        bounds = [0, *accumulate(matrix.shape[0] for matrix in matrices)]
        self._rows = [slice(*ends) for ends in pairwise(bounds)]
        self._num_rows = bounds[-1]
        roundings = {part.rounding for part in self._parts}
        self.rounding = roundings.pop() if len(roundings) == 1 else None

    def __call__(self, x: Rows) -> Tensor:
        """Return the product [T, O]."""
        if isinstance(x, Tensor) and self.rounding is not None:
            x = self.rounding(x)
        values_TD = x if isinstance(x, Tensor) else x.values_TD
        shape = (len(values_TD), self._num_rows)
        out_TO = torch.empty(shape, dtype=self._dtype, device=values_TD.device)
        if not len(values_TD):
            return out_TO
        for part, rows in zip(self._parts, self._rows, strict=True):
            bias_O = None if self._bias_O is None else self._bias_O[rows]
            own = x
            if isinstance(own, Tensor):
                own = Float8Rows(own, None) if part.rounding is None else part.rounding(own)
            part.multiply(own, bias_O, out_TO[:, rows])
        return out_TO
