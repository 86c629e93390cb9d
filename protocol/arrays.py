"""Convert integer and float arrays to and from the raw little-endian bytes that messages carry.

Messages declare arrays as `bytes`; these functions are the only conversions. Decoding returns a read-only view.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from struct import pack
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

if sys.byteorder != "little":
    raise ImportError("engine messages are little-endian, but this machine is big-endian")

_INT32 = np.dtype("<i4")
_UINT64 = np.dtype("<u8")
_FLOAT32 = np.dtype("<f4")


def offsets_in_runs(counts: npt.NDArray[np.integer[Any]]) -> Int64Array:
    """Return each element's number in its run, for successive runs of these lengths: [0, 1, 0, 1, 2] for [2, 3]."""
    offsets: Int64Array = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return offsets


def int32_bytes(values: npt.ArrayLike) -> bytes:
    """Encode integers of any shape as row-major int32 bytes."""
    return np.ascontiguousarray(values, dtype=_INT32).tobytes()


def int32_pairs(first: npt.NDArray[np.integer[Any]], second: npt.NDArray[np.integer[Any]]) -> bytes:
    """Encode two arrays of n integers as int32[n, 2]. This is faster than stacking them."""
    pairs = np.empty((len(first), 2), _INT32)
    pairs[:, 0] = first
    pairs[:, 1] = second
    return pairs.tobytes()


def pack_int32(values: Sequence[int]) -> bytes:
    """Encode a list of integers as int32 bytes. This is faster than `int32_bytes`."""
    return pack(f"<{len(values)}i", *values)


def int32_view(data: bytes | memoryview) -> Int32Array:
    """View int32 bytes as a flat array. Raise ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=_INT32)


def int32_list(data: bytes) -> list[int]:
    """Decode a flat int32 array to a list. Raise ValueError if the length is not a multiple of 4.

    This is faster than a view if the numbers are needed one by one.
    """
    return array("i", data).tolist()


def uint64_bytes(values: npt.ArrayLike) -> bytes:
    """Encode integers of any shape as row-major uint64 bytes."""
    return np.ascontiguousarray(values, dtype=_UINT64).tobytes()


def uint64_view(data: bytes | memoryview) -> UInt64Array:
    """View uint64 bytes as a flat array. Raise ValueError if the length is not a multiple of 8."""
    return np.frombuffer(data, dtype=_UINT64)


def float32_bytes(values: npt.ArrayLike) -> bytes:
    """Encode floats of any shape as row-major float32 bytes."""
    return np.ascontiguousarray(values, dtype=_FLOAT32).tobytes()


def float32_view(data: bytes | memoryview) -> Float32Array:
    """View float32 bytes as a flat array. Raise ValueError if the length is not a multiple of 4."""
    return np.frombuffer(data, dtype=_FLOAT32)


def are_all(values: npt.NDArray[np.generic]) -> bool:
    """Return whether no element is 0 or False. This is faster than `values.all()`."""
    return bool(np.count_nonzero(values) == values.size)


def contains(members: Collection[int], values: npt.NDArray[np.integer[Any]]) -> BoolArray:
    """Return, for each of `values`, whether it is among `members`.

    `numpy.isin` imports `numpy.ma` at its first call, which would delay the step of that call by 30 ms.
    """
    if not len(members) or not len(values):
        return np.zeros(len(values), np.bool_)
    sorted_members = np.sort(np.fromiter(members, np.int64, len(members)))
    positions = np.searchsorted(sorted_members, values)
    found: BoolArray = sorted_members[np.minimum(positions, len(members) - 1)] == values
    return found
