"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs; Frantar et al., "GPTQ" (2022).

The layout is AutoGPTQ's, with D input and O output features in G groups of inputs, and words of 32 bits: `qweight`
int32 [D * bits / 32, O], `qzeros` int32 [G, O * bits / 32], `scales` float16 [G, O] and, optionally, the group of each
input, `g_idx` int32 [D]. The number of bits may differ between modules. Their tensors' shapes show it.
"""

from __future__ import annotations

from math import gcd
from typing import Final

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
    middle_shift,
    shape_of,
    unpack_bytes,
    within,
)

_BITS: Final = (2, 3, 4, 8)


class GPTQScheme(QuantizationScheme):
    """The quantization scheme of AutoGPTQ checkpoints."""

    marker = "qweight"
    marker_dtypes = frozenset({"I32"})
    companions = frozenset({"qzeros", "scales", "g_idx"})

    def __init__(self, config: ConfigFields) -> None:
        bits = config.get("bits")
        if bits not in _BITS:
            raise UnsupportedScheme(f"gptq with bits {bits!r}")
        self._bits = int(bits)
        self._group_size = config.integer("group_size", 128, minimum=-1)
        self._is_symmetric = config.get("sym") is True
        # The first version of the format stores each zero minus one.
        self._zero_shift = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def _bits_of(self, module: StoredModule) -> int:
        num_words, num_rows = (shape_of(module, name)[1] for name in ("qzeros", "scales"))
        found = num_words * 32 // max(num_rows, 1)
        return found if found in _BITS else self._bits

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_words, num_rows = shape_of(module, "qweight")
        return num_rows, num_words * 32 // self._bits_of(module)

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        bits = self._bits_of(module)
        group_size = self._group_size if self._group_size > 0 else num_columns
        num_groups = shape_of(module, "scales")[0]
        if -(-num_columns // group_size) != num_groups:
            # The module has a group size of its own.
            group_size = -(-num_columns // num_groups)
        group_of_column = groups_of_columns(module, "g_idx", num_columns, group_size)
        groups = ColumnGroups.from_part(columns, group_size, num_columns)
        stored = groups.stored if group_of_column is None else None

        def unpacked(name: str, shape: tuple[int, int], part: range, other: range | None) -> Tensor:
            """Return the fields `part` of the words of a tensor, which are its last dimension."""
            # The smallest number of fields that fill whole words, and the number of these words.
            fields, words = 32 // gcd(bits, 32), bits // gcd(bits, 32)
            units = covering(part, fields)
            stored_words = range(units.start * words, units.stop * words)
            if name == "qweight":
                found = module.read(name, shape[::-1], stored_words, other).T
            else:
                found = module.read(name, shape, other, stored_words)
            return unpack_bytes(found, bits)[:, within(part, fields)]

        values_OD = unpacked("qweight", (num_rows, num_columns * bits // 32), columns, rows)
        if shift := middle_shift(bits):
            values_OD = values_OD + shift
        zeros_GO = unpacked("qzeros", (num_groups, num_rows * bits // 32), rows, stored)
        scales_GO = module.read("scales", (num_groups, num_rows), stored, rows)
        # With 8 bits, the largest zero plus one would not fit into a byte, but no quantizer produces it.
        zeros_OG = (zeros_GO + self._zero_shift + shift).T.contiguous()
        scales_OG = scales_GO.T.contiguous()
        bits = max(bits, 4)
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
