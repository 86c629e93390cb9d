"""The tensors of a drafting head, and products with its matrices, natively or in torch.

Shapes: T rows, K columns of a matrix.
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
from ...loaders.tensor_names import TensorNames, translate_names
from ..source.products import NativeProduct

Product: TypeAlias = Callable[[Tensor], Tensor]
"""A function that multiplies rows, float32 [T, K], with a matrix, in float32."""


class HeadTensors:
    """The tensors of a head, by the names in `head_layout`.

    Args:
        checkpoint: The head's checkpoint.
        tensor_names: Translates its names to those in `head_layout`.
        dtype: The dtype of matrices.
        device: The device of the head.
        num_threads: The number of threads that compute a product; 0 to compute it in torch.
        name: The name of the head in error messages.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensor_names: TensorNames,
        dtype: torch.dtype,
        device: torch.device,
        num_threads: int,
        name: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype, self.device, self.name = dtype, device, name
        self._num_threads = num_threads
        self._stored = translate_names(checkpoint.names(), tensor_names)

    def __contains__(self, name: str) -> bool:
        """Return whether the head has a tensor."""
        return name in self._stored

    def find(self, name: str, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
        """Return a tensor in this dtype, or in the stored one if it is None. Return None if the head lacks it."""
        return self.read(name, name, dtype) if name in self else None

    def read(self, name: str, published: str, dtype: torch.dtype | None = torch.float32) -> Tensor:
        """Return a tensor in this dtype, or in the stored one if it is None.

        Raises:
            CheckpointError: The head lacks it. The error has its `published` name.
        """
        self.require(name, published)
        return self.checkpoint.tensor(self._stored[name], dtype).to(self.device)

    def require(self, name: str, published: str) -> None:
        """Raise CheckpointError with the `published` name of a tensor if the head lacks it."""
        if name not in self:
            raise self.checkpoint.missing(published)

    def num_rows(self, name: str) -> int:
        """Return the number of rows of a matrix."""
        return self.checkpoint.shape(self._stored[name])[0]

    def product(self, name: str, shape: tuple[int, int]) -> Product:
        """Return the product with a matrix, which must have this shape.

        Raises:
            ConfigError: The matrix has another shape.
        """
        matrix = self.checkpoint.tensor(self._stored[name], self.dtype)
        if matrix.shape != shape:
            raise ConfigError(
                f"{self.name}: the projection has the shape {tuple(matrix.shape)}, not {shape}; use a head for "
                "this model"
            )
        if self._num_threads:
            return NativeProduct(matrix, self._num_threads)
        return partial(_project, matrix.to(self.device))


def _project(matrix: Tensor, x_TK: Tensor) -> Tensor:
    """Return the product in float32. Sums are rounded to the dtype of the matrix."""
    return F.linear(x_TK.to(matrix.dtype), matrix).float()
