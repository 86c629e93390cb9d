"""Packed matrices, and the conversion of a checkpoint's rows to their format."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.checkpoint.gguf import GGMLQuantizationType as SourceType
from ..device.dtypes import dtype_name
from ..device.host_memory import HUGE_PAGE_BYTES, allocate
from .abi import structs
from .library import NotSupportedNatively, native_library


class ActivationKind(IntEnum):
    """Storage formats of activations; see `csrc/linear/linear.h`."""

    INT8 = 0
    BF16 = 1
    F32 = 2
    INT8_SPLIT = 3

    @property
    def for_whole_rows(self) -> ActivationKind:
        """Return the kind to use if a row is quantized as a whole.

        Rows that are computed in parts (gated activations, attention heads) have no outliers that are limited to a few
        columns.
        """
        return ActivationKind.INT8_SPLIT if self is ActivationKind.INT8 else self


class WeightFormat(IntEnum):
    """Storage formats of packed matrices; see `csrc/linear/linear.h`."""

    U4 = 0
    U4_OFFSET = 1
    U5_OFFSET = 2
    U6 = 3
    MXFP4 = 4
    NVFP4 = 5
    U8 = 6
    BF16 = 7
    F16 = 8
    F32 = 9
    F8 = 10
    BF16_TILES = 11

    @property
    def activation_kind(self) -> ActivationKind:
        """The format of the activations that matrices with this format multiply."""
        if self <= WeightFormat.U8:
            return ActivationKind.INT8
        if self in (WeightFormat.BF16, WeightFormat.BF16_TILES, WeightFormat.F8):
            return ActivationKind.BF16
        return ActivationKind.F32


FLOAT8_ROWS = 1000
"""The value of `SourceType::f8` in `csrc/linear/pack.h`."""

FLOAT_TYPES = {
    "bfloat16": SourceType.BF16,
    "float16": SourceType.F16,
    "float32": SourceType.F32,
}
"""Source types of floats by names of dtypes."""

QUANTIZED_FORMATS = {
    SourceType.Q4_0: WeightFormat.U4,
    SourceType.Q4_1: WeightFormat.U4_OFFSET,
    SourceType.Q4_K: WeightFormat.U4_OFFSET,
    SourceType.Q5_0: WeightFormat.U5_OFFSET,
    SourceType.Q5_1: WeightFormat.U5_OFFSET,
    SourceType.Q5_K: WeightFormat.U5_OFFSET,
    SourceType.Q6_K: WeightFormat.U6,
    SourceType.Q8_0: WeightFormat.U8,
    SourceType.MXFP4: WeightFormat.MXFP4,
    SourceType.NVFP4: WeightFormat.NVFP4,
}
"""Packed formats of types of GGUF files."""

FLOAT_FORMATS = {
    "bfloat16": WeightFormat.BF16,
    "float16": WeightFormat.F16,
    "float32": WeightFormat.F32,
}
"""Packed formats of floats by names of dtypes."""

GROUP_SIZE = 32
"""Number of elements of a row that integer formats quantize together. Rows must consist of whole groups."""

_ALIGNMENT = 64

_CHUNK_BYTES = 64 << 20


class PackedWeight(structs.PackedWeight):
    """A packed matrix ``[n, k]``, whose address is passed to native code.

    It keeps `array` alive, which is uint8 and aligned to 64 bytes. `group` and `scale` are the fields of `PackedWeight`
    in C++.
    """

    def __init__(
        self,
        weight_format: WeightFormat,
        n: int,
        k: int,
        array: NDArray[np.uint8],
        group: int = 0,
        scale: float = 1.0,
    ) -> None:
        super().__init__(weight_format, n, k, group, scale, array.ctypes.data)
        self.array = array

    @property
    def activation_kind(self) -> ActivationKind:
        """The format of the activations that this matrix multiplies."""
        return WeightFormat(self.format).activation_kind

    def rows(self, indices: Sequence[int]) -> NDArray[np.float32]:
        """Return rows of the matrix as floats, ``[len(indices), k]``."""
        unpack = native_library().engine_unpack_weight_row
        out = np.empty((len(indices), self.k), np.float32)
        for index, row in zip(indices, out, strict=True):
            unpack(ctypes.byref(self), index, row.ctypes.data)
        return out


def common_kind(owner: str, matrices: Sequence[PackedWeight]) -> ActivationKind:
    """Return the format of the activations that all matrices of `owner` multiply.

    Raises:
        NotSupportedNatively: They need different formats.
    """
    kinds = {matrix.activation_kind for matrix in matrices}
    if len(kinds) > 1:
        raise NotSupportedNatively(
            f"the matrices of {owner} are stored in formats that need different activations: "
            f"{', '.join(sorted(kind.name for kind in kinds))}"
        )
    return kinds.pop()


class WeightMemory:
    """Zeroed memory for weights, in huge pages.

    A step reads all weights. With small pages, a quarter of its time would be address translation.
    """

    def __init__(self) -> None:
        self._chunk = np.empty(0, np.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> NDArray[np.uint8]:
        """Return zeros, uint8 ``[num_bytes]``, aligned to 64 bytes."""
        start = round_up(self._used, _ALIGNMENT)
        if start + num_bytes > len(self._chunk):
            size = round_up(max(num_bytes, _CHUNK_BYTES), HUGE_PAGE_BYTES)
            self._chunk = allocate(size)
            start = 0
        self._used = start + num_bytes
        return self._chunk[start : self._used]

    def shrink(self, num_bytes: int, last: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Shrink the last allocation to `num_bytes`. The rest is zeroed and used for the next allocation."""
        last[num_bytes:] = 0
        self._used -= len(last) - num_bytes
        return last[:num_bytes]


def as_source(tensor: torch.Tensor) -> tuple[SourceType, NDArray[np.uint8]]:
    """Return a tensor in a type from which weights can be packed."""
    if dtype_name(tensor.dtype) not in FLOAT_TYPES:
        tensor = tensor.float()
    return FLOAT_TYPES[dtype_name(tensor.dtype)], tensor.contiguous().view(torch.uint8).numpy()


def allocate_packed(
    weight_format: WeightFormat,
    n: int,
    k: int,
    memory: WeightMemory,
    group: int = 0,
    scale: float = 1.0,
) -> PackedWeight:
    """Return a matrix of zeros, to be filled by `pack_rows`.

    Integer formats need whole groups in `k`. `group` and `scale` are the fields of `PackedWeight`.
    """
    num_bytes = native_library().engine_packed_bytes(weight_format, n, k, group)
    return PackedWeight(weight_format, n, k, memory.allocate(num_bytes), group, scale)


def pack_tensor(
    weight_format: WeightFormat, matrix: torch.Tensor, memory: WeightMemory
) -> PackedWeight | None:
    """Return a packed float matrix, or None if it has a NaN or infinity that the format cannot represent."""
    n, k = matrix.shape
    weight = allocate_packed(weight_format, n, k, memory)
    # The last stride of a matrix with one column may be anything.
    source = matrix.flatten().view(torch.uint8).view(n, k * matrix.element_size()).numpy()
    if not pack_rows(weight, FLOAT_TYPES[dtype_name(matrix.dtype)], source):
        return None
    weight.array = memory.shrink(finish_packing(weight), weight.array)
    return weight


def can_pack(source_type: int, weight_format: WeightFormat) -> bool:
    """Return whether rows of a type can be packed in a format. Float types can also be packed in U4_OFFSET and U8."""
    return bool(native_library().engine_can_pack(source_type, weight_format))


def pack_rows(
    weight: PackedWeight, source_type: int, source: NDArray[np.uint8], first_row: int = 0
) -> bool:
    """Pack ``source``, uint8 ``[rows, row bytes]``, to the rows of `weight` from `first_row` on.

    Return False if it has a NaN or infinity that the format cannot represent. Threads may pack different rows of a
    matrix at the same time. In BF16 they must not share a block of 64 rows that starts at a multiple of 64.
    """
    return bool(
        native_library().engine_pack_rows(
            ctypes.byref(weight),
            source_type,
            source.ctypes.data,
            source.strides[0],
            first_row,
            len(source),
        )
    )


def finish_packing(weight: PackedWeight) -> int:
    """Complete a matrix after all its rows were packed. Return how many bytes of its data are used."""
    return int(native_library().engine_finish_packing(ctypes.byref(weight)))


def round_up(x: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `x`."""
    return -(-x // multiple) * multiple
