"""Products of the rows of a mixture of experts with the quantized matrices of their experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...loaders.quantization.matrix import QuantizedMatrix
from ..float8 import Float8Rows
from ..quantized.linear import quantized_product

_COMBINED_COLUMNS = 512


class GroupedLinear:
    """Computes the products [A, O] of rows x [A, I], each with the matrix of its expert, in `dtype`.

    `matrix` has the matrices of all experts, stacked by rows, and `bias_EO` their biases.
    """

    def __init__(
        self,
        matrix: QuantizedMatrix,
        num_experts: int,
        bias_EO: Tensor | None,
        dtype: torch.dtype,
        *,
        is_batch_invariant: bool,
    ) -> None:
        self._matrix = quantized_product(
            matrix, num_experts=num_experts, is_batch_invariant=is_batch_invariant
        )
        self._bias_EO = bias_EO
        self._num_rows = matrix.shape[0] // num_experts
        self._dtype = dtype

    def __call__(self, x_AI: Tensor, ends_E: Tensor) -> Tensor:
        """Return the products [A, O]. The rows after those of the last expert are undefined."""
        out_AO = torch.empty((len(x_AI), self._num_rows), dtype=self._dtype, device=x_AI.device)
        if len(x_AI):
            rounding = self._matrix.rounding
            x = Float8Rows(x_AI, None) if rounding is None else rounding(x_AI)
            self._matrix.multiply(x, self._bias_EO, out_AO, ends_E)
        return out_AO


@triton.jit
def _combine_kernel(
    y_ptr, place_ptr, weights_ptr, out_ptr, num_columns, num_chosen, BLOCK_D: tl.constexpr
):
    """Add up the weighted rows of one token in the order of its choices. Grid (T, ceil(D / BLOCK_D))."""
    token = tl.program_id(0).to(tl.int64)
    columns_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_D = columns_D < num_columns
    total_D = tl.zeros((BLOCK_D,), tl.float32)
    for i in range(num_chosen):
        choice = token * num_chosen + i
        weight = tl.load(weights_ptr + choice)
        row = tl.load(place_ptr + choice).to(tl.int64)
        y_D = tl.load(y_ptr + row * num_columns + columns_D, mask=mask_D, other=0.0)
        # Choices of weight 0 may belong to another rank, so their rows may be undefined.
        total_D += tl.where(weight == 0.0, 0.0, y_D.to(tl.float32) * weight)
    out_row = out_ptr + token * num_columns
    tl.store(out_row + columns_D, total_D.to(out_ptr.dtype.element_ty), mask=mask_D)


def combine(y_AD: Tensor, place_A: Tensor, weights_TC: Tensor) -> Tensor:
    """Return the weighted sum [T, D] of each token's rows; see `LayerKernels.combine`."""
    num_tokens, num_chosen = weights_TC.shape
    num_columns = y_AD.shape[1]
    out_TD = torch.empty((num_tokens, num_columns), dtype=y_AD.dtype, device=y_AD.device)
    if num_tokens:
        grid = (num_tokens, triton.cdiv(num_columns, _COMBINED_COLUMNS))
        _combine_kernel[grid](
            y_AD,
            place_A,
            weights_TC.contiguous(),
            out_TD,
            num_columns,
            num_chosen,
            BLOCK_D=_COMBINED_COLUMNS,
        )
    return out_TD
