"""Four-bit floats (E2M1) of compressed-tensors and ModelOpt: NVFP4, and MXFP4 in another layout than gpt-oss's.

O output and D input features, G groups of a row with 16 columns (NVFP4) or 32 (MXFP4). Modules have codes, uint8 [O, D
/ 2], with an even column in the low bits of a byte, and `weight_scale` [O, G], which is float8 (e4m3), or exponents
with a bias of 127. In NVFP4 the whole matrix has another scale. compressed-tensors calls the codes `weight_packed` and
has the divisor `weight_global_scale`; ModelOpt calls them `weight` and has the factor `weight_scale_2`.
"""

from __future__ import annotations

from typing import Literal

import torch

from .matrix import QuantizedMatrix
from .microscaling import BITS, E2M1_TWICE, ZERO, halves_of_powers
from .scheme import ColumnGroups, QuantizationScheme, StoredModule, covering, shape_of, within

_GROUP_SIZES = {"nvfp4": 16, "mxfp4": 32}


class PackedMinifloatScheme(QuantizationScheme):
    """The scheme of packed weights of this `kind`.

    `factor` names the tensor with the scale of a whole matrix, if any, and `scale` that with the scales of groups.
    """

    marker_dtypes = frozenset({"U8"})
    companions = frozenset(
        {
            "weight_scale",
            "weight_scale_2",
            "weight_global_scale",
            "weight_shape",
            "input_scale",
            "input_global_scale",
        }
    )

    def __init__(
        self,
        kind: Literal["mxfp4", "nvfp4"],
        marker: Literal["weight", "weight_packed"],
        factor: Literal["weight_scale_2", "weight_global_scale"] | None = None,
        scale: Literal["weight_scale", "scale"] = "weight_scale",
    ) -> None:
        self.marker = marker
        self._kind = kind
        self._group_size = _GROUP_SIZES[kind]
        self._factor = factor
        self._scale = scale

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        num_rows, num_bytes = shape_of(module, self.marker)
        return num_rows, 2 * num_bytes

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        num_rows, num_columns = self.matrix_shape(module)
        groups = ColumnGroups.from_part(columns, self._group_size, num_columns)
        codes = module.read(self.marker, (num_rows, num_columns // 2), rows, covering(columns, 2))
        codes = codes.view(torch.uint8)
        stored = (num_rows, -(-num_columns // self._group_size))
        scale_OG = module.read(self._scale, stored, rows, groups.stored)
        factor = self._read_factor(module)
        if self._kind == "mxfp4":
            half_OG = halves_of_powers(scale_OG.view(torch.uint8)).bfloat16()
        else:
            half_OG = scale_OG.float() * (factor / 2)
        nibbles_OD = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, within(columns, 2)]
        return QuantizedMatrix(
            (E2M1_TWICE[nibbles_OD.int()] + ZERO).to(torch.uint8),
            BITS,
            groups.expand(half_OG),
            groups.size,
            ZERO,
            minifloats=self._kind,
            factor=factor,
        )

    def _read_factor(self, module: StoredModule) -> float:
        if self._factor is None:
            return 1.0
        found = module.shape(self._factor)
        stored = module.read(self._factor, (1,) if found == (1,) else ()).float().item()
        return stored if self._factor == "weight_scale_2" else 1 / stored
