"""Products of many rows with one packed matrix, outside of a native program.

Shapes: R rows, K columns of the matrix, N outputs.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from ...cpu.library import native_library
from ...cpu.packing import WeightFormat, WeightMemory, pack_tensor
from ...device.dtypes import dtype_name

_ROWS_AT_ONCE: Final = 64
_FORMATS: Final = {
    "bfloat16": WeightFormat.BF16,
    "float16": WeightFormat.F16,
    "float32": WeightFormat.F32,
}


class NativeProduct:
    """A product with a matrix [N, K]. A row's sums do not depend on other rows, nor on the number of threads.

    Args:
        matrix: The matrix, of 16 or 32 bits, which is packed in its dtype.
        num_threads: The threads that share the rows.
    """

    def __init__(self, matrix: Tensor, num_threads: int) -> None:
        # Formats of fewer bits cannot represent NaN.
        packed = pack_tensor(
            _FORMATS[dtype_name(matrix.dtype)], matrix, WeightMemory()
        ) or pack_tensor(WeightFormat.F32, matrix.float(), WeightMemory())
        assert packed is not None
        self._weight = packed
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="products")

    def __call__(self, x_RK: Tensor) -> Tensor:
        """Return the product [R, N] in float32. Rows of `x_RK`, float32, may overlap."""
        weight, kind = self._weight, self._weight.activation_kind
        num_rows = len(x_RK)
        assert x_RK.dtype == torch.float32 and x_RK.shape[1] == weight.k and x_RK.stride(1) == 1
        library = native_library()
        row_bytes = library.engine_activation_row_bytes(kind, weight.k)
        out_RN = torch.empty(num_rows, weight.n)

        def compute(first: int) -> None:
            # Native code releases the lock of the interpreter.
            activations = torch.empty(_ROWS_AT_ONCE * row_bytes, dtype=torch.uint8)
            for start in range(first, num_rows, self._num_threads * _ROWS_AT_ONCE):
                rows = min(_ROWS_AT_ONCE, num_rows - start)
                at = x_RK[start].data_ptr(), x_RK.stride(0)
                library.engine_quantize_rows(kind, *at, rows, weight.k, activations.data_ptr())
                library.engine_linear_rows(
                    ctypes.byref(weight),
                    kind,
                    activations.data_ptr(),
                    rows,
                    0,
                    weight.n,
                    out_RN[start].data_ptr(),
                    weight.n,
                )

        firsts = range(0, self._num_threads * _ROWS_AT_ONCE, _ROWS_AT_ONCE)
        list(self._threads.map(compute, firsts))
        return out_RN
