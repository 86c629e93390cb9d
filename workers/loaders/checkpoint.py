"""The interface of checkpoints of all formats."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import CheckpointError
from .quantization.matrix import QuantizedMatrix
from .quantization.row_tables import MatrixRows, RowTable


class Floats(msgspec.Struct, frozen=True):
    """A tensor in the type in which the file stores it.

    `dtype` is "float32", "float16" or "bfloat16". For bfloat16, `values` are the bits as uint16.
    """

    values: NDArray[Any]
    dtype: str

    def as_float32(self) -> NDArray[np.float32]:
        """Return a copy in float32."""
        if self.dtype == "bfloat16":
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        return np.array(self.values, np.float32, order="C")


class Checkpoint(ABC):
    """A model's config and tensors, by Hugging Face's names and conventions.

    ``config`` is the content of ``config.json``, or its equivalent from a GGUF file; ``config_path`` is the file.
    ``bytes_read`` counts the bytes of tensor data read so far. ``place`` copies a tensor from a file to its device and
    dtype.
    """

    def __init__(self, path: Path, config: ConfigFields) -> None:
        self.path = path
        self.config = dict(config.config)
        self.config_path = config.path
        self.bytes_read = 0
        self.place: Callable[[torch.Tensor, torch.dtype], torch.Tensor] = copy_to_host

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the names of all tensors."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises `CheckpointError` if there is none of that name."""

    def num_bytes(self, name: str, itemsize: int) -> int:
        """Return the size of a tensor in the file, if the format says it, else with elements of `itemsize` bytes."""
        return math.prod(self.shape(name)) * itemsize

    @abstractmethod
    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Read a tensor, or ``part`` of its dimension ``dim``, into new contiguous memory.

        Only that part is read. If ``dtype`` is None, the result has the stored type, or float32 for quantized tensors.

        Raises:
            CheckpointError: No tensor has this name.
            ValueError: The tensor has no such part.
        """

    def floats(self, name: str, *, part: range | None = None, dim: int = 0) -> Floats | None:
        """Return a view of a tensor or its part, without torch, or None if it is not stored as plain floats.

        The view is valid while the checkpoint exists.
        """
        return None

    def quantized(
        self, name: str, *, part: range | None = None, dim: int = 0
    ) -> QuantizedMatrix | None:
        """Read a tensor or its part without dequantizing it. Return None if it is not stored in quantized form."""
        return None

    def table(self, name: str, dtype: torch.dtype, part: range) -> RowTable | None:
        """Read rows of a matrix for a table of rows in `dtype`. Return None if it is not stored in quantized form."""
        matrix = self.quantized(name, part=part)
        return None if matrix is None else MatrixRows(matrix, dtype)

    def missing(self, name: str) -> CheckpointError:
        """Return the error for a missing tensor."""
        return CheckpointError(
            self.path,
            f"there is no tensor {name!r}; the checkpoint is incomplete or not of the architecture "
            "in its config",
        )


def copy_to_host(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy in memory, so that overwriting the file later cannot change or crash a running model."""
    return torch.empty(source.shape, dtype=dtype).copy_(source)


def part_of(shape: tuple[int, ...], part: range | None, dim: int) -> range:
    """Return `part`, or the whole range if it is None. Raise ValueError if a tensor of that shape has no such part."""
    if part is None and not shape:
        return range(1)
    if not 0 <= dim < len(shape):
        raise ValueError(f"dim must be in [0, {len(shape)}), got {dim}")
    part = range(shape[dim]) if part is None else part
    if not 0 <= part.start <= part.stop <= shape[dim]:
        raise ValueError(
            f"part {part.start}:{part.stop} exceeds dim {dim}, which has size {shape[dim]}"
        )
    return part
