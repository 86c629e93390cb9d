"""Products with a matrix of a drafting head, natively or in torch.

Shapes: T rows, K columns of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ....protocol.errors import ConfigError
from ...loaders import Checkpoint
from ..source.products import NativeProduct

Product: TypeAlias = Callable[[Tensor], Tensor]
"""A function that multiplies rows, float32 [T, K], with a matrix, in float32."""


def read_product(
    checkpoint: Checkpoint,
    stored: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
    name: str,
) -> Product:
    """Return the product with a stored matrix, which must have this shape.

    Args:
        checkpoint: The head's checkpoint.
        stored: The stored name of the matrix.
        shape: Its shape.
        dtype: Its dtype.
        device: The device of the head.
        num_threads: The number of threads that compute the product; 0 to compute it in torch.
        name: The name of the head in error messages.

    Raises:
        ConfigError: The matrix has another shape.
    """
    matrix = checkpoint.tensor(stored, dtype)
    if matrix.shape != shape:
        raise ConfigError(
            f"{name}: the projection has the shape {tuple(matrix.shape)}, not {shape}; use a head for "
            "this model"
        )
    if num_threads:
        return NativeProduct(matrix, num_threads)
    return partial(_project, matrix.to(device))


def _project(matrix: Tensor, x_TK: Tensor) -> Tensor:
    """Return the product in float32. Sums are rounded to the dtype of the matrix."""
    return F.linear(x_TK.to(matrix.dtype), matrix).float()
