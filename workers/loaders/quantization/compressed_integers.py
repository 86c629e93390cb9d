"""Integer weights of compressed-tensors.

O output and D input features, G groups of inputs (one where a row has one scale), F = 32 / bits fields in a word.
`int-quantized` modules have `weight` int8 [O, D]; `pack-quantized` ones `weight_packed` int32 [O, D / F], whose fields
are the signed integers plus 2 ** (bits - 1), and `weight_shape`. Both have `weight_scale` [O, G] and may have
`weight_zero_point`, int8 [O, G] or packed along the outputs [O / F, G], and, for each input, its group in
`weight_g_idx` [D].
"""

from __future__ import annotations

import torch
from torch import Tensor

from .matrix import QuantizedMatrix
from .scheme import (
    ColumnGroups,
    QuantizationScheme,
    StoredModule,
    covering,
    groups_of_columns,
    in_group_order,
    shape_of,
    unpack_bytes,
    within,
)


class CompressedIntegerScheme(QuantizationScheme):
    """The scheme of compressed-tensors' integer weights. `group_size` is None if each row has one scale."""

    companions = frozenset(
        {"weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale"}
    )

    def __init__(self, bits: int, group_size: int | None, *, is_packed: bool) -> None:
        self._bits = bits
        self._fields = 32 // bits
        self._group_size = group_size
        self._is_packed = is_packed
        self.marker = "weight_packed" if is_packed else "weight"
        self.marker_dtypes = frozenset({"I32" if is_packed else "I8"})

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_rows, num_words = shape_of(module, self.marker)
        if not self._is_packed:
            return num_rows, num_words
        if not module.has("weight_shape"):
            return num_rows, num_words * self._fields
        stored_rows, num_columns = module.read("weight_shape", (2,)).tolist()
        if stored_rows != num_rows or -(-num_columns // self._fields) != num_words:
            raise module.problem(
                f"'{module.name}.weight_shape' is {[stored_rows, num_columns]}, but "
                f"'{module.name}.weight_packed' has shape {[num_rows, num_words]}"
            )
        return num_rows, num_columns

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        group_size = self._group_size or num_columns
        num_groups = -(-num_columns // group_size)
        groups = ColumnGroups.from_part(columns, group_size, num_columns)
        group_of_column = groups_of_columns(module, "weight_g_idx", num_columns, group_size)
        stored = groups.stored if group_of_column is None else None
        matrix = QuantizedMatrix(
            self._values(module, (num_rows, num_columns), rows, columns),
            self._bits,
            module.read("weight_scale", (num_rows, num_groups), rows, stored),
            groups.size,
            self._zeros(module, (num_rows, num_groups), rows, stored),
        )
        if group_of_column is not None:
            return in_group_order(matrix, group_of_column[columns.start : columns.stop])
        zero = matrix.zero_OG
        return QuantizedMatrix(
            matrix.values_OD,
            self._bits,
            groups.expand(matrix.scale_OG),
            groups.size,
            zero if isinstance(zero, int) else groups.expand(zero),
        )

    def _values(
        self, module: StoredModule, shape: tuple[int, int], rows: range, columns: range
    ) -> Tensor:
        if not self._is_packed:
            return _unsigned(module.read("weight", shape, rows, columns))
        words = module.read(
            "weight_packed",
            (shape[0], -(-shape[1] // self._fields)),
            rows,
            covering(columns, self._fields),
        )
        return unpack_bytes(words, self._bits)[:, within(columns, self._fields)].contiguous()

    def _zeros(
        self, module: StoredModule, shape: tuple[int, int], rows: range, stored: range | None
    ) -> Tensor | int:
        if not module.has("weight_zero_point"):
            return 1 << (self._bits - 1)
        if not self._is_packed:
            return _unsigned(module.read("weight_zero_point", shape, rows, stored))
        words = module.read(
            "weight_zero_point",
            (-(-shape[0] // self._fields), shape[1]),
            covering(rows, self._fields),
            stored,
        )
        fields_GO = unpack_bytes(words.T, self._bits)
        return fields_GO[:, within(rows, self._fields)].T.contiguous()


def _unsigned(x: Tensor) -> Tensor:
    """Return int8 values plus 128, as uint8."""
    return x.view(torch.uint8) ^ 128
