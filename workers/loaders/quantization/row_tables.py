"""Tables of which a step needs a few rows, such as embeddings, in their stored form.

Shapes: R rows, b bytes of a row, D columns, T rows that a step needs.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor

from ....protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType
from ..dequantize import BLOCK_TYPES
from .matrix import QuantizedMatrix


class RowTable(Protocol):
    """A quantized matrix [R, D] whose rows are dequantized when they are needed."""

    def rows(self, index_T: Tensor) -> Tensor:
        """Return these rows [T, D] in the dtype of the table, equal to the rows of the dequantized matrix."""

    def to(self, device: torch.device) -> RowTable:
        """Return the table on a device."""


class BlockRows(msgspec.Struct, frozen=True):
    """A table of GGUF blocks as in the file, uint8 [R, b]. `dtype` is that of its dequantized rows."""

    raw_Rb: Tensor
    ggml_type: GGMLQuantizationType
    dtype: torch.dtype

    def rows(self, index_T: Tensor) -> Tensor:
        """See `RowTable.rows`."""
        blocks_Bb = self.raw_Rb[index_T].view(-1, BLOCK_SIZES[self.ggml_type][1])
        q_BGN, scale_BG1, offset_BG1 = BLOCK_TYPES[self.ggml_type].unpack(blocks_Bb)
        x_BGN = q_BGN.float().mul_(scale_BG1)
        if offset_BG1 is not None:
            x_BGN.add_(offset_BG1)
        return x_BGN.reshape(len(index_T), -1).to(self.dtype)

    def to(self, device: torch.device) -> BlockRows:
        """See `RowTable.to`."""
        return BlockRows(self.raw_Rb.to(device), self.ggml_type, self.dtype)


class MatrixRows(msgspec.Struct, frozen=True):
    """A table of integers or small floats. `dtype` is that of its dequantized rows."""

    matrix: QuantizedMatrix
    dtype: torch.dtype

    def rows(self, index_T: Tensor) -> Tensor:
        """See `RowTable.rows`."""
        return self.matrix.select_rows(index_T).dequantize(self.dtype)

    def to(self, device: torch.device) -> MatrixRows:
        """See `RowTable.to`."""
        return MatrixRows(self.matrix.to(device), self.dtype)
