"""Reads embeddings that a client sends instead of an image, which are untrusted."""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ParameterError
from ..http.shown_values import echo

_MAX_COUNT: Final = 1 << 16
_NPY: Final = b"\x93NUMPY"
_TYPES: Final = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "<f4": "<f4", "<f2": "<f2"}
"""How numpy reads the types of safetensors and of npy files. The bits of BF16 are those of the upper half of F32."""


def read_embeddings(text: str, where: str) -> NDArray[np.float32]:
    """Return the matrix in a safetensors or npy file in base64, as float32.

    Args:
        text: The file; it may be a data URL.
        where: The name of the field in errors.

    Raises:
        ParameterError: It is not such a file, or has something else than one matrix of floats.
    """
    try:
        data = base64.b64decode(text.rpartition(",")[2], validate=True)
    except (ValueError, binascii.Error):
        raise ParameterError(where, "is not valid base64") from None
    try:
        kind, shape, content = _npy(data) if data.startswith(_NPY) else _safetensors(data)
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 2 or min(shape) < 1:
            raise ValueError(f"it has the shape {shape}, not [embeddings, size]")
        if kind not in _TYPES:
            raise ValueError(f"its type is {kind}, not F32, F16 or BF16")
        dtype = np.dtype(_TYPES[kind])
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"it has {len(content)} bytes, which are not those of shape {shape}")
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ParameterError(
            where,
            f"is not a safetensors or npy file with one matrix: {echo(str(error))}; "
            "send such a file in base64",
        ) from None
    values = np.frombuffer(content, dtype).reshape(shape)
    if kind == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def check_embeddings(values: NDArray[Any], where: str, size: int) -> NDArray[np.float32]:
    """Return a matrix of embeddings as float32.

    Raises:
        ParameterError: It is not a matrix of finite numbers with this size of a row.
    """
    if values.ndim != 2 or not len(values) or values.shape[1] != size:
        raise ParameterError(
            where, f"has the shape {list(values.shape)}, but this model reads [embeddings, {size}]"
        )
    with np.errstate(all="ignore"):
        found = np.ascontiguousarray(values, np.float32)
    if not np.isfinite(found).all():
        raise ParameterError(where, "has numbers that are NaN or infinite")
    return found


def read_grid(given: Mapping[str, Any], where: str, num_embeddings: int) -> tuple[int, int] | None:
    """Return the rows and columns of embeddings, or None if nothing is said about them.

    Args:
        given: It may have a `grid`, [rows, columns], or as in transformers an `image_grid_thw`, [1, rows, columns] of
            patches, of which a square is an embedding.
        where: The name of the field in errors.
        num_embeddings: The number of embeddings.

    Raises:
        ParameterError: It is invalid, or does not fit the embeddings.
    """
    if (grid := given.get("grid")) is not None:
        if not _are_counts(grid, 2):
            raise ParameterError(f"{where}.grid", f"must be [rows, columns], got {echo(grid)}")
        return grid[0], grid[1]
    patches = given.get("image_grid_thw")
    if patches is None:
        return None
    if isinstance(patches, np.ndarray):
        patches = patches.tolist()
    if isinstance(patches, list) and len(patches) == 1:
        patches = patches[0]
    name = f"{where}.image_grid_thw"
    if not _are_counts(patches, 3) or patches[0] != 1:
        raise ParameterError(name, f"must be [1, rows, columns], got {echo(patches)}")
    _, rows, columns = patches
    side = math.isqrt(max(1, rows * columns // num_embeddings))
    if rows % side or columns % side or rows * columns != num_embeddings * side**2:
        raise ParameterError(
            name, f"has {rows} x {columns} patches, which do not make {num_embeddings} embeddings"
        )
    return rows // side, columns // side


def _are_counts(value: Any, length: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == length
        and all(type(count) is int and 0 < count <= _MAX_COUNT for count in value)
    )


def _safetensors(data: bytes) -> tuple[str, list[int], bytes]:
    """Return the type, the shape and the bytes of the only tensor of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ValueError("its header is longer than the file")
    header = json.loads(data[8 : 8 + length])
    tensors = [value for name, value in header.items() if name != "__metadata__"]
    if len(tensors) != 1:
        raise ValueError(f"it has {len(tensors)} tensors")
    start, end = tensors[0]["data_offsets"]
    return str(tensors[0]["dtype"]), _sizes(tensors[0]["shape"]), data[8 + length :][start:end]


def _npy(data: bytes) -> tuple[str, list[int], bytes]:
    """Return the type, the shape and the bytes of an npy file."""
    first = 10 if data[6] == 1 else 12
    length = int.from_bytes(data[8:first], "little")
    if length > 4096 or first + length > len(data):
        raise ValueError("its header is too long")
    header = ast.literal_eval(data[first : first + length].decode("latin-1").strip())
    if header["fortran_order"]:
        raise ValueError("its order is that of Fortran")
    return str(header["descr"]), _sizes(header["shape"]), data[first + length :]


def _sizes(shape: Any) -> list[int]:
    if not isinstance(shape, list | tuple) or not all(type(size) is int for size in shape):
        raise ValueError(f"it has the shape {shape}")
    return list(shape)
