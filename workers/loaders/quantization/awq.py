"""AWQ: 4-bit integers, packed along the outputs; Lin et al., "AWQ: Activation-aware Weight Quantization" (2023).

The layout is AutoAWQ's `gemm`, with D input and O output features in G groups of inputs: `qweight` int32 [D, O / 8],
`qzeros` int32 [G, O / 8], `scales` float16 [G, O]. Quark calls them `weight`, `weight_zero_point` and `weight_scale`.
Its words may have their outputs in order, and its integers may be signed, without zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....protocol.checkpoint.config_fields import ConfigFields
from .matrix import QuantizedMatrix
from .scheme import (
    ColumnGroups,
    QuantizationScheme,
    StoredModule,
    UnsupportedScheme,
    covering,
    shape_of,
    unpack_bytes,
    within,
)

_IN_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of its eight outputs."""


class AWQScheme(QuantizationScheme):
    """The quantization scheme of AutoAWQ checkpoints."""

    marker = "qweight"
    marker_dtypes = frozenset({"I32"})
    companions = frozenset({"qzeros", "scales"})
    _zeros, _scales = "qzeros", "scales"
    _order: Sequence[int] = _IN_ORDER
    _is_signed = False

    def __init__(self, config: ConfigFields) -> None:
        bits = config.get("bits", config.get("w_bit", 4))
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise UnsupportedScheme(f"awq with bits {bits!r} and version {version!r}")
        self._group_size = config.integer(
            "group_size", config.integer("q_group_size", 128, minimum=-1), minimum=-1
        )

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_columns, num_words = shape_of(module, self.marker)
        return num_words * 8, num_columns

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        group_size = self._group_size if self._group_size > 0 else num_columns
        groups = ColumnGroups.from_part(columns, group_size, num_columns)
        num_groups = -(-num_columns // group_size)
        words, row_slice = covering(rows, 8), within(rows, 8)

        def unpacked(words_XO: Tensor) -> Tensor:
            fields_XO8 = unpack_bytes(words_XO, 4).unflatten(1, (-1, 8))[:, :, self._order]
            return fields_XO8.flatten(1).T[row_slice].contiguous()

        values_OD = unpacked(module.read(self.marker, (num_columns, num_rows // 8), columns, words))
        scales = module.read(self._scales, (num_groups, num_rows), groups.stored, rows)
        scale_OG, zero_OG = groups.expand(scales.T.contiguous()), None
        if not self._is_signed:
            shape = (num_groups, num_rows // 8)
            zero_OG = groups.expand(unpacked(module.read(self._zeros, shape, groups.stored, words)))
        return QuantizedMatrix(
            values_OD if zero_OG is not None else values_OD ^ 8,
            4,
            scale_OG,
            groups.size,
            8 if zero_OG is None else zero_OG,
        )


class QuarkIntegerScheme(AWQScheme):
    """The scheme of Quark's 4-bit integers. `is_reordered` says that words have the order of AutoAWQ."""

    marker = "weight"
    companions = frozenset({"weight_scale", "weight_zero_point"})
    _zeros, _scales = "weight_zero_point", "weight_scale"

    def __init__(self, weight: ConfigFields, *, is_reordered: bool) -> None:
        self._group_size = weight.integer("group_size", minimum=-1)
        self._order = _IN_ORDER if is_reordered else range(8)
        self._is_signed = weight.boolean("symmetric", False)
