"""GPTQ: 4 or 8-bit integers, packed along the inputs; Frantar et al., "GPTQ" (2022).

The layout is AutoGPTQ's, with D input and O output features in G groups of inputs, and F = 32 / bits fields in a word:
`qweight` int32 [D / F, O], `qzeros` int32 [G, O / F], `scales` float16 [G, O] and, optionally, the group of each input,
`g_idx` int32 [D].
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
    groups_of_columns,
    in_group_order,
    shape_of,
    unpack_bytes,
    within,
)


class GPTQScheme(QuantizationScheme):
    """The quantization scheme of AutoGPTQ checkpoints."""

    marker = "qweight"
    marker_dtypes = frozenset({"I32"})
    companions = frozenset({"qzeros", "scales", "g_idx"})

    def __init__(self, config: ConfigFields) -> None:
        bits = config.get("bits")
        if bits not in (4, 8):
            raise UnsupportedScheme(f"gptq with bits {bits!r}")
        self._bits = int(bits)
        self._fields = 32 // self._bits
        self._group_size = config.integer("group_size", 128, minimum=-1)
        self._is_symmetric = config.get("sym") is True
        # The first version of the format stores each zero minus one.
        self._zero_shift = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_words, num_rows = shape_of(module, "qweight")
        return num_rows, num_words * self._fields

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        fields, bits = self._fields, self._bits
        group_size = self._group_size if self._group_size > 0 else num_columns
        num_groups = -(-num_columns // group_size)
        group_of_column = groups_of_columns(module, "g_idx", num_columns, group_size)
        groups = ColumnGroups.from_part(columns, group_size, num_columns)
        stored = groups.stored if group_of_column is None else None

        words = module.read(
            "qweight", (num_columns // fields, num_rows), covering(columns, fields), rows
        )
        values_OD = unpack_bytes(words.T, bits)[:, within(columns, fields)]
        zero_words = module.read(
            "qzeros", (num_groups, num_rows // fields), stored, covering(rows, fields)
        )
        zeros_GO = unpack_bytes(zero_words, bits)[:, within(rows, fields)]
        scales_GO = module.read("scales", (num_groups, num_rows), stored, rows)
        # With 8 bits, the largest zero plus one would not fit into a byte, but no quantizer produces it.
        zeros_OG = (zeros_GO + self._zero_shift).T.contiguous()
        scales_OG = scales_GO.T.contiguous()
        if group_of_column is not None:
            whole = QuantizedMatrix(values_OD, bits, scales_OG, group_size, zeros_OG)
            return in_group_order(whole, group_of_column[columns.start : columns.stop])
        zero_OG: Tensor | int = groups.expand(zeros_OG)
        middle = 1 << (bits - 1)
        if bits == 8 and self._is_symmetric and bool((zeros_OG == middle).all()):
            zero_OG = middle
        return QuantizedMatrix(
            values_OD.contiguous(), bits, groups.expand(scales_OG), groups.size, zero_OG
        )
