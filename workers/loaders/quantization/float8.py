"""The float8 (e4m3) weights of vLLM, DeepSeek and compressed-tensors.

A module has `weight` [O, D] in float8, with O output and D input features, and scales in any float type. `weight_scale`
has one number, or one per output. With blocks, there is one scale per block, in `weight_scale_inv` (which is a factor
despite its name), `weight_scale` or `scale`. ModelOpt stores their grid [R, C] as [R, 1, C, 1]. Scales in uint8 are
exponents of powers of two with a bias of 127 (MXFP8). With static activations, there is also one number `input_scale`.

DeepSeek-V4 has experts of four bits among such modules: `weight` int8 [O, D / 2] has two elements in a byte, and
`scale` one power of two for each 32 columns of a row. Those of MiMo-V2.6 have uint8, and scales called `weight_scale`.
ModelOpt's mixed precision has NVFP4 among such modules, and also MXFP8, in groups of 32 columns.

The matrix of MiMo-V2.5 for queries, keys and values consists of parts of equal heights, one below the other, and each
part has blocks of its own. The number of stored scales shows the height.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .matrix import ActivationScheme, QuantizedMatrix
from .microscaling import halves_of_powers
from .packed_minifloats import PackedMinifloatScheme
from .scheme import ColumnGroups, QuantizationScheme, StoredModule, shape_of

_MAX_PARTS: Final = 64
_POWER_GROUP: Final = (1, 32)
"""The rows and columns that share a scale of MXFP8."""
_FourBits: TypeAlias = Mapping[str, QuantizationScheme]
_BESIDE_BLOCKS: Final[_FourBits] = {
    "I8": PackedMinifloatScheme("mxfp4", "weight", scale="scale"),
    "U8": PackedMinifloatScheme("mxfp4", "weight"),
}
BESIDE_STATIC: Final[_FourBits] = {"U8": PackedMinifloatScheme("nvfp4", "weight", "weight_scale_2")}
"""The schemes of four bits in ModelOpt's mixed precision, by the type of `weight`."""


class Float8Scheme(QuantizationScheme):
    """The scheme of float8 weights. `block_size` is the rows and columns that share a scale; None without blocks.

    `four_bits` has the schemes of other modules, by the type of their tensor `weight`.
    """

    marker = "weight"
    companions = frozenset(
        {
            "weight_scale",
            "weight_scale_2",
            "weight_scale_inv",
            "weight_zero_point",
            "scale",
            "input_scale",
            "output_scale",
        }
    )

    def __init__(
        self,
        activations: ActivationScheme,
        block_size: tuple[int, int] | None,
        four_bits: _FourBits | None = None,
    ) -> None:
        self._activations = activations
        self._block_size = block_size
        self._four_bits = four_bits or ({} if block_size is None else _BESIDE_BLOCKS)
        self.marker_dtypes = frozenset({"F8_E4M3", *self._four_bits})

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        if (four_bits := self._four_bits.get(module.dtype("weight") or "")) is not None:
            return four_bits.matrix_shape(module)
        return shape_of(module, "weight")

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        if (four_bits := self._four_bits.get(module.dtype("weight") or "")) is not None:
            return four_bits.matrix(module, rows, columns)
        shape, block_size = self.matrix_shape(module), self._block_size
        activations = self._activations
        if module.dtype("weight_scale") == "U8":
            block_size, activations = _POWER_GROUP, ActivationScheme.GROUP
        weight_OD = module.read("weight", shape, rows, columns)
        if block_size is None:
            scale_OG, group_size = self._scale_of_rows(module, shape[0], rows), len(columns)
        else:
            scale_OG, group_size = _scale_of_blocks(module, shape, block_size, rows, columns)
        input_scale = None
        if activations is ActivationScheme.STATIC:
            input_scale = float(_number(module, "input_scale"))
        return QuantizedMatrix(
            weight_OD,
            None,
            scale_OG,
            group_size,
            activations=activations,
            input_scale=input_scale,
        )

    @staticmethod
    def _scale_of_rows(module: StoredModule, num_rows: int, rows: range) -> Tensor:
        found = module.shape("weight_scale") or ()
        if math.prod(found) == num_rows and len(found) in (1, 2):
            # A module with one output has only one scale, whichever row is read.
            scale = module.read("weight_scale", found, rows).float()
            return scale.reshape(-1, 1)
        return _number(module, "weight_scale").expand(len(rows), 1)


def _scale_of_blocks(
    module: StoredModule,
    shape: tuple[int, int],
    block_size: tuple[int, int],
    rows: range,
    columns: range,
) -> tuple[Tensor, int]:
    block_rows, block_columns = block_size
    names = ("weight_scale_inv", "scale")
    name = next((name for name in names if module.has(name)), "weight_scale")
    if (module.shape(name) or (0,))[0] == shape[0]:
        # Each row has its own scales, as in the tables of DeepSeek-V4.1.
        block_rows = 1
    groups = ColumnGroups.from_part(columns, block_columns, shape[1])
    height = _height_of_parts(shape[0], block_rows, module.shape(name))
    per_part = -(-height // block_rows)

    def block_of(row: Any) -> Any:
        return row // height * per_part + row % height // block_rows

    first, last = block_of(rows.start), block_of(max(rows.start, rows.stop - 1))
    num_blocks = (shape[0] // height * per_part, -(-shape[1] // block_columns))
    parts = range(first, last + 1), groups.stored
    if len(module.shape(name) or ()) == 4:
        shape_of_all = (num_blocks[0], 1, num_blocks[1], 1)
        blocks = module.read(name, shape_of_all, parts[0], None, parts[1]).flatten(0, 1).flatten(1)
    else:
        blocks = module.read(name, num_blocks, *parts)
    scales = 2 * halves_of_powers(blocks) if blocks.dtype is torch.uint8 else blocks.float()
    scale_OG = scales[block_of(torch.arange(rows.start, rows.stop)) - first]
    return groups.expand(scale_OG), groups.size


def _height_of_parts(num_rows: int, block_rows: int, stored: tuple[int, ...] | None) -> int:
    """Return the height of the parts of a matrix with blocks of their own; that of the matrix if it has no parts."""
    for count in range(1, _MAX_PARTS + 1):
        height = num_rows // count
        if count * height == num_rows and stored and stored[0] == count * -(-height // block_rows):
            return height
    return num_rows


def is_float8(matrix: QuantizedMatrix) -> bool:
    """Return whether the elements are float8 (e4m3), with one scale per group of neighboring columns."""
    return (
        matrix.values_OD.dtype is torch.float8_e4m3fn
        and matrix.offset_OG is None
        and isinstance(matrix.zero_OG, int)
        and matrix.zero_OG == 0
        and matrix.column_order_D is None
    )


def as_float8_rows(matrix: QuantizedMatrix) -> NDArray[np.uint8]:
    """Return the rows as bytes, followed by the float32 scales of their groups: uint8 [O, D + 4 * G]."""
    scale_OG = matrix.scale_OG.float().expand(len(matrix.values_OD), -1).contiguous()
    parts = matrix.values_OD.view(torch.uint8), scale_OG.view(torch.uint8)
    rows: NDArray[np.uint8] = torch.cat(parts, 1).numpy()
    return rows


def _number(module: StoredModule, tensor: str) -> Tensor:
    found = module.shape(tensor)
    return module.read(tensor, (1,) if found == (1,) else ()).float().reshape(())
