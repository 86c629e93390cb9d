"""HQQ: integers with float zeros; Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models".

O output and D input features. The flattened matrix has `group_size` neighbors in each row of a new one (axis 1), or as
many rows (axis 0). `W_q` has several blocks of that matrix's rows in the bits of one block, the first in the
highest: of uint8, or for 3 bits ten blocks of int32. An element is (value - `zero`) * `scale`. Other tensors are the
numbers and texts of HQQ's configuration.
"""

from __future__ import annotations

import torch

from .matrix import QuantizedMatrix
from .scheme import ColumnGroups, QuantizationScheme, StoredModule, middle_shift

_BLOCKS = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}
"""The number of bits -> the number of blocks of rows in one."""


class HQQScheme(QuantizationScheme):
    """The scheme of HQQ's checkpoints. If each group is within a row, matrices stay quantized."""

    marker = "W_q"
    marker_dtypes = frozenset({"U8", "I32"})
    companions = frozenset(
        {
            *("nbits", "group_size", "shape", "scale", "zero", "axis", "packing", "offload_meta"),
            *("unpack_view_dtype", "view_as_float", "quant_scale", "quant_zero", "compute_dtype"),
            *("encoded_state_dict", "stores_quant_config", "channel_wise", "optimize"),
            "round_zero",
        }
    )

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_rows, num_columns = module.read("shape", (2,)).tolist()
        return num_rows, num_columns

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read a module's matrix, and return these rows and columns of it."""
        shape, axis = self.matrix_shape(module), int(module.load("axis").item())
        bits = int(module.load("nbits").item())
        words = module.load("W_q")
        if bits not in _BLOCKS or words.dim() != 2 or axis not in (0, 1):
            raise module.problem(f"'{module.name}' has nbits {bits} and axis {axis}")
        places = bits * torch.arange(_BLOCKS[bits]).flip(0).to(words.dtype)
        values = (words >> places.view(-1, 1, 1) & (1 << bits) - 1).flatten(0, 1).to(torch.uint8)
        scale, zero = (module.load(name).float() for name in ("scale", "zero"))
        size = int(module.load("group_size").item()) if module.has("group_size") else shape[1]
        count = shape[0] * shape[1]
        # Zeros fill the last block of three bits.
        num_rows = size if axis == 0 else count // max(size, 1)
        sizes = (scale.numel(), zero.numel(), values.shape[1] * num_rows)
        is_whole = size > 0 and count % size == 0 and len(values) >= num_rows
        if not is_whole or sizes != (count // size, count // size, count):
            raise module.problem(
                f"'{module.name}' has groups of {size} that do not fit its tensors"
            )
        own = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        values = values[:num_rows]
        if axis == 0 or shape[1] % size:
            values_OD = ((values - zero) * scale).reshape(shape)[own].contiguous()
            return QuantizedMatrix.dequantized(values_OD, "HQQ with groups across rows")
        values_OD = values.reshape(shape)[own].contiguous()
        groups = ColumnGroups.from_part(columns, size, shape[1])
        scale_OG, zero_OG = (
            x.reshape(shape[0], -1)[own[0], groups.stored.start : groups.stored.stop]
            for x in (scale, zero)
        )
        shift = middle_shift(bits)
        return QuantizedMatrix(
            values_OD + shift,
            max(bits, 4),
            groups.expand(scale_OG),
            groups.size,
            offset_OG=groups.expand(-(zero_OG + shift) * scale_OG),
        )
