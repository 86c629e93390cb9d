"""Parse embeddings that a client sends instead of an image. They are untrusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...protocol.errors import ParameterError
from ..http.shown_values import echo
from .tensor_files import NotATensorFile, read_tensor_file

_MAX_COUNT: Final = 1 << 16


def read_embeddings(text: str, where: str) -> NDArray[np.float32]:
    """Return the matrix in a safetensors or npy file in base64, as float32.

    Args:
        text: The file; it may be a data URL.
        where: The name of the field in errors.

    Raises:
        ParameterError: The text is not such a file, or the file is not a single matrix of floats.
    """
    try:
        file = read_tensor_file(text)
    except NotATensorFile as error:
        raise ParameterError(where, str(error)) from None
    shape = file.shape
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != 2 or min(shape) < 1:
        raise ParameterError(where, f"has the shape {list(shape)}, not [embeddings, size]")
    if file.dtype == "bfloat16":
        # The bits of a bfloat16 are the upper half of a float32.
        bits = np.frombuffer(file.data, "<u2").reshape(shape)
        return (bits.astype(np.uint32) << 16).view(np.float32)
    numbers = np.frombuffer(file.data, "<f4" if file.dtype == "float32" else "<f2").reshape(shape)
    return numbers.astype(np.float32)


def check_embeddings(values: NDArray[Any], where: str, size: int) -> NDArray[np.float32]:
    """Return a matrix of embeddings as float32.

    Raises:
        ParameterError: The values are not a matrix of finite numbers whose rows have `size` elements.
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
    """Return the rows and columns of the grid of embeddings; None if the client sent none.

    Args:
        given: May contain a `grid`, [rows, columns], or as in transformers an `image_grid_thw`, [1, rows, columns] of
            patches; a square of patches makes one embedding.
        where: The name of the field in errors.
        num_embeddings: The number of embeddings.

    Raises:
        ParameterError: The grid is invalid, or does not match the number of embeddings.
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
            name, f"has {rows} x {columns} patches, which do not match {num_embeddings} embeddings"
        )
    return rows // side, columns // side


def _are_counts(value: Any, length: int) -> bool:
    return (
        isinstance(value, list | tuple)
        and len(value) == length
        and all(type(count) is int and 0 < count <= _MAX_COUNT for count in value)
    )
