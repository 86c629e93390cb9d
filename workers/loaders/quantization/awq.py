"""AWQ: 4-bit integers, packed along the outputs; Lin et al., "AWQ: Activation-aware Weight Quantization" (2023).

The layout is AutoAWQ's `gemm`, with D input and O output features in G groups of inputs: `qweight` int32 [D, O / 8],
`qzeros` int32 [G, O / 8], `scales` float16 [G, O].
"""

from __future__ import annotations

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
        num_columns, num_words = shape_of(module, "qweight")
        return num_words * 8, num_columns

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        group_size = self._group_size if self._group_size > 0 else num_columns
        groups = ColumnGroups.from_part(columns, group_size, num_columns)
        num_groups = -(-num_columns // group_size)
        words, row_slice = covering(rows, 8), within(rows, 8)

        def unpacked(words_XO: Tensor) -> Tensor:
            fields_XO8 = unpack_bytes(words_XO, 4).unflatten(1, (-1, 8))[:, :, _IN_ORDER]
            return fields_XO8.flatten(1).T[row_slice].contiguous()

        qweight = module.read("qweight", (num_columns, num_rows // 8), columns, words)
        qzeros = module.read("qzeros", (num_groups, num_rows // 8), groups.stored, words)
        scales = module.read("scales", (num_groups, num_rows), groups.stored, rows)
        return QuantizedMatrix(
            unpacked(qweight),
            4,
            groups.expand(scales.T.contiguous()),
            groups.size,
            groups.expand(unpacked(qzeros)),
        )
