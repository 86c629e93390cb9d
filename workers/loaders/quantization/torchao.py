"""The tensors of torchao, each stored as several tensors, and described by JSON in the header of its file.

O output and D input features, G groups of a row. A module has values `_weight_qdata`:

* Int8Tensor, IntxUnpackedToInt8Tensor: int8 [O, D], `_weight_scale` and perhaps `_weight_zero_point` [O, G]; or one
  number for all rows. Zeros are integers, or floats.
* Int4Tensor: uint8 [O, D / 2], an even column in the low bits of a byte. An element is (value - 8) * scale + zero, with
  `_weight_scale` and `_weight_zero_point` [G, O]. Values are stored as signed integers.
* Int4TilePackedTo4dTensor: the same values, unsigned, in the order of tensor cores: int32 [O / 8, D / 128, 32, 4], of a
  matrix whose sides are padded to multiples of these. `_weight_scale_and_zero` [G, O, 2] has both.
* Float8Tensor: float8 [O, D] and `_weight_scale`, for rows, blocks or the matrix.
* MXTensor, NVFP4Tensor: microscaling formats in the layouts of ModelOpt. Their scales may be in the order of tensor
  cores. NVFP4 may have `_weight_per_tensor_scale`, and then all scales are multiplied by it.

Any of them may have `_weight_act_pre_scale` [D], which are factors on the inputs.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from .float8 import Float8Scheme
from .matrix import ActivationScheme, QuantizedMatrix
from .packed_minifloats import PackedMinifloatScheme
from .scheme import (
    ColumnGroups,
    QuantizationScheme,
    StoredModule,
    covering,
    shape_of,
    unpack_bytes,
    within,
)

_VALUES = "_weight_qdata"
_NAMES = {
    "weight": _VALUES,
    "weight_scale": "_weight_scale",
    "weight_scale_2": "_weight_per_tensor_scale",
}
"""The names of tensors in other schemes, and those of torchao."""

_INTEGERS = ("Int8Tensor", "IntxUnpackedToInt8Tensor")
_TILES = "Int4TilePackedTo4dTensor"
_TILE_ROWS, _TILE_COLUMNS = 8, 128
_BITS = {f"int{count}": count for count in range(1, 9)}


class TorchAOScheme(QuantizationScheme):
    """The scheme of torchao's checkpoints, in which each module's header says what its tensors are."""

    marker = _VALUES
    marker_dtypes = frozenset({"I8", "U8", "I32", "F8_E4M3"})
    companions = frozenset(
        f"_weight_{name}"
        for name in (
            *("scale", "zero_point", "scale_and_zero", "per_tensor_scale", "act_pre_scale"),
            *("act_quant_scale", "act_quant_zero_point", "act_per_tensor_scale"),
        )
    )

    def matrix_shape(self, module: StoredModule) -> tuple[int, int]:
        """Return the numbers of outputs and inputs of the matrix, (O, D)."""
        kind, fields = _description(module)
        if kind != _TILES:
            num_rows, num_values = shape_of(module, _VALUES)
            return num_rows, num_values * (1 + (module.dtype(_VALUES) == "U8"))
        shape = fields.get("shape")
        if not (isinstance(shape, list) and len(shape) == 2 and all(type(x) is int for x in shape)):
            raise module.problem(f"the header has shape {shape!r} for '{module.name}.weight'")
        return shape[0], shape[1]

    def matrix(self, module: StoredModule, rows: range, columns: range) -> QuantizedMatrix:
        """Read these rows and columns of a module's matrix."""
        kind, fields = _description(module)
        shape = self.matrix_shape(module)
        if kind in _INTEGERS:
            found = _integers(module, fields, shape, rows, columns)
        elif kind == "Int4Tensor":
            found = _four_bits(module, _group_size(module, fields, shape), shape, rows, columns)
        elif kind == _TILES:
            found = _tiles(module, _group_size(module, fields, shape), shape, rows, columns)
        else:
            found = _floats(module, kind, fields, shape).matrix(
                _renamed(module, fields, shape), rows, columns
            )
        pre_scale = "_weight_act_pre_scale"
        if not module.has(pre_scale):
            return found
        factor_D = module.load(pre_scale).flatten()[columns.start : columns.stop].float()
        values_OD = found.dequantize(torch.float32) * factor_D
        return QuantizedMatrix.dequantized(values_OD, "torchao with factors of AWQ")


def _description(module: StoredModule) -> tuple[str, dict[str, Any]]:
    """Return the class of a module's weight, and its attributes."""
    try:
        found = json.loads(module.header or "")
        kind, fields = str(found["_type"]), dict(found["_data"])
    except (ValueError, KeyError, TypeError):
        raise module.problem(
            f"the header does not describe '{module.name}.weight', as torchao's files do; download it again"
        ) from None
    if kind not in (*_INTEGERS, "Int4Tensor", _TILES, "Float8Tensor", "MXTensor", "NVFP4Tensor"):
        raise module.problem(
            f"'{module.name}.weight' is a {kind} of torchao, which is not supported; use the original weights"
        )
    return kind, fields


def _group_size(module: StoredModule, fields: dict[str, Any], shape: tuple[int, int]) -> int:
    """Return the number of columns that share a scale. Each row has its own, or all rows share one."""
    size = fields.get("block_size")
    if isinstance(size, list) and len(size) == 2 and size[0] in (1, shape[0]):
        count = size[1]
        if isinstance(count, int) and count > 0:
            return count
    raise module.problem(f"the header has block_size {size!r} for '{module.name}.weight'")


def _integers(
    module: StoredModule,
    fields: dict[str, Any],
    shape: tuple[int, int],
    rows: range,
    columns: range,
) -> QuantizedMatrix:
    target = fields.get("target_dtype")
    name = target.get("_data") if isinstance(target, dict) else "int8"
    if name not in _BITS:
        raise module.problem(f"the header has target_dtype {name!r} for '{module.name}.weight'")
    num_bits = _BITS[name]
    middle = 1 << (num_bits - 1)
    group_size = _group_size(module, fields, shape)
    groups = ColumnGroups.from_part(columns, group_size, shape[1])

    def of_groups(tensor: str) -> Tensor:
        stored = module.shape(tensor) or ()
        if len(stored) == 2 and stored[0] == shape[0]:
            count = -(-shape[1] // group_size)
            return groups.expand(module.read(tensor, (shape[0], count), rows, groups.stored))
        # The matrix or each row has one number.
        x = module.load(tensor).flatten()
        x = x.expand(shape[0]) if len(x) == 1 else x
        return x[rows.start : rows.stop].unsqueeze(1)

    values_OD = module.read(_VALUES, shape, rows, columns).view(torch.uint8) + middle
    scale_OG, zero, offset_OG = of_groups("_weight_scale"), None, None
    if module.has("_weight_zero_point"):
        zero = of_groups("_weight_zero_point")
        if zero.is_floating_point():
            offset_OG, zero = -zero.float() * scale_OG.float(), None
    return QuantizedMatrix(
        values_OD,
        # Kernels have no integers of other numbers of bits.
        4 if num_bits <= 4 else 8,
        scale_OG,
        groups.size,
        # Zeros of signed integers.
        middle if zero is None else (zero.to(torch.int16) + middle).to(torch.uint8),
        offset_OG,
    )


def _four_bits(
    module: StoredModule, group_size: int, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    groups = ColumnGroups.from_part(columns, group_size, shape[1])
    codes = module.read(_VALUES, (shape[0], shape[1] // 2), rows, covering(columns, 2))
    codes = codes.view(torch.uint8)
    nibbles_OD = torch.stack((codes & 15, codes >> 4), -1).flatten(1)[:, within(columns, 2)]
    stored = (-(-shape[1] // group_size), shape[0])
    scale_OG, zero_OG = (
        groups.expand(module.read(f"_weight_{name}", stored, groups.stored, rows).T.contiguous())
        for name in ("scale", "zero_point")
    )
    return QuantizedMatrix(nibbles_OD ^ 8, 4, scale_OG, groups.size, 8, zero_OG)


def _tiles(
    module: StoredModule, group_size: int, shape: tuple[int, int], rows: range, columns: range
) -> QuantizedMatrix:
    stored = module.shape(_VALUES) or ()
    is_large = len(stored) == 4 and (
        stored[0] * _TILE_ROWS >= shape[0] and stored[1] * _TILE_COLUMNS >= shape[1]
    )
    if not is_large or stored[2:] != (32, 4):
        raise module.problem(
            f"'{module.name}.{_VALUES}' does not have the tiles of a matrix of {shape[0]} x {shape[1]}"
        )
    words = module.read(
        _VALUES, stored, covering(rows, _TILE_ROWS), covering(columns, _TILE_COLUMNS)
    )
    num_row_tiles, num_column_tiles = words.shape[:2]
    nibbles = unpack_bytes(words.flatten(1).contiguous(), 4)
    # A word has two blocks of 16 columns: two neighbors, and the two that are eight columns later, of each.
    nibbles = nibbles.view(num_row_tiles, num_column_tiles, 8, 4, 4, 8)[..., _TILE_ORDER]
    nibbles = nibbles.unflatten(-1, (2, 2, 2)).permute(0, 2, 1, 4, 5, 6, 3, 7)
    values_OD = nibbles.reshape(_TILE_ROWS * num_row_tiles, _TILE_COLUMNS * num_column_tiles)
    values_OD = values_OD[within(rows, _TILE_ROWS), within(columns, _TILE_COLUMNS)]
    groups = ColumnGroups.from_part(columns, group_size, shape[1])
    name = "_weight_scale_and_zero"
    both_GO2 = module.read(name, module.shape(name) or (), groups.stored, rows)
    scale_OG, zero_OG = (groups.expand(x.T.contiguous()) for x in both_GO2.unbind(2))
    return QuantizedMatrix(values_OD.contiguous(), 4, scale_OG, groups.size, 8, zero_OG)


_TILE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its eight columns."""


def _floats(
    module: StoredModule, kind: str, fields: dict[str, Any], shape: tuple[int, int]
) -> QuantizationScheme:
    """Return the scheme that reads the same layout under other names."""
    if kind == "NVFP4Tensor":
        has_factor = module.has("_weight_per_tensor_scale")
        return PackedMinifloatScheme("nvfp4", "weight", "weight_scale_2" if has_factor else None)
    if kind == "MXTensor" and module.dtype(_VALUES) == "U8":
        return PackedMinifloatScheme("mxfp4", "weight")
    is_dynamic = fields.get("act_quant_kwargs") is not None
    activations = ActivationScheme.TOKEN if is_dynamic else ActivationScheme.NONE
    size = fields.get("block_size")
    if kind == "MXTensor" or not size or size[-1] == shape[1]:
        return Float8Scheme(activations, None)
    if not (isinstance(size, list) and len(size) == 2 and all(type(x) is int for x in size)):
        raise module.problem(f"the header has block_size {size!r} for '{module.name}.weight'")
    activations = ActivationScheme.GROUP if is_dynamic else activations
    return Float8Scheme(activations, (size[0], size[1]))


def _renamed(module: StoredModule, fields: dict[str, Any], shape: tuple[int, int]) -> StoredModule:
    """Return the module with the names of ModelOpt, with scales of powers as bytes, and all scales in rows."""

    def dtype(tensor: str) -> str | None:
        found = module.dtype(_NAMES.get(tensor, tensor))
        return "U8" if found == "F8_E8M0" else found

    def load(tensor: str, *parts: range | None) -> Tensor:
        stored = _NAMES.get(tensor, tensor)
        if tensor != "weight_scale" or not fields.get("is_swizzled_scales"):
            x = module.load(stored, *parts)
            return x.view(torch.uint8) if x.dtype == torch.float8_e8m0fnu else x
        x = module.load(stored).view(torch.uint8)
        num_rows, num_columns = scale_shape()
        if x.numel() != -(-num_rows // 128) * -(-num_columns // 4) * 512:
            raise module.problem(f"'{module.name}.{stored}' has {x.numel()} scales")
        # Tiles have 128 rows and 4 columns: of each 32 rows in order, one after the other.
        tiles = x.reshape(-(-num_rows // 128), -(-num_columns // 4), 32, 4, 4)
        x = tiles.permute(0, 3, 2, 1, 4).reshape(-1, tiles.shape[1] * 4)[:num_rows, :num_columns]
        for dim, part in enumerate(parts):
            x = x if part is None else x.narrow(dim, part.start, len(part))
        return x if module.dtype(stored) == "F8_E8M0" else x.view(torch.float8_e4m3fn)

    def scale_shape() -> tuple[int, int]:
        size = fields.get("block_size")
        if not (isinstance(size, int) and size > 0):
            raise module.problem(f"the header has block_size {size!r} for '{module.name}.weight'")
        return shape[0], -(-shape[1] // size)

    def shape_in(tensor: str) -> tuple[int, ...] | None:
        if tensor == "weight_scale" and fields.get("is_swizzled_scales"):
            return scale_shape()
        found = module.shape(_NAMES.get(tensor, tensor))
        return () if found == (1, 1) else found

    def load_number(tensor: str, *parts: range | None) -> Tensor:
        x = load(tensor, *parts)
        return x.reshape(()) if tuple(x.shape) == (1, 1) else x

    return replace(module, shape=shape_in, dtype=dtype, load=load_number)
