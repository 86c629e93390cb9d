"""One representation for the quantized matrices of all checkpoint formats.

Shapes: O output features, D input features, G groups of a row.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from enum import Enum
from typing import Literal, TypeAlias

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

logger = logging.getLogger(__name__)


class ActivationScheme(Enum):
    """The activations that share a scale, if they are rounded to float8 before a product."""

    NONE = "none"
    STATIC = "static"
    """All values share the scale `input_scale` of the matrix."""
    TOKEN = "token"
    """The values of a token share a scale, determined by the largest of them."""
    GROUP = "group"
    """The values of a token in one group of columns share a scale."""


class QuantizedMatrix(msgspec.Struct, frozen=True):
    """A matrix [O, D] whose elements are (value - zero) * scale + offset.

    `values_OD` are uint8 below 2 ** `bits`, or floats (usually float8_e4m3fn) if `bits` is None. `group_size`
    neighboring columns share scale, zero and offset; the last group of a row may be shorter. `scale_OG` and `offset_OG`
    have any float type. Zeros are uint8, or one number for all. If `column_order_D` is given, `values_OD[:, i]` is
    column `column_order_D[i]` of the matrix.

    If `minifloats` is set, each value minus its zero is twice a four-bit float (E2M1). Twice its scale is a power of
    two ("mxfp4"), or a float8_e4m3fn number times the `factor` of the whole matrix ("nvfp4").
    """

    values_OD: Tensor
    bits: int | None
    scale_OG: Tensor
    group_size: int
    zero_OG: Tensor | int = 0
    offset_OG: Tensor | None = None
    column_order_D: Tensor | None = None
    activations: ActivationScheme = ActivationScheme.NONE
    input_scale: float | None = None
    minifloats: Literal["mxfp4", "nvfp4"] | None = None
    factor: float = 1.0

    @classmethod
    def dequantized(cls, values_OD: Tensor, stored_as: str) -> QuantizedMatrix:
        """Return a matrix of float32 values, whose stored form no kernel reads. Log this once per form."""
        log_dequantized(stored_as)
        return cls(values_OD, None, values_OD.new_ones(len(values_OD), 1), values_OD.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """The shape (O, D)."""
        rows, columns = self.values_OD.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [O, D] in floats, computed in float32 and rounded once."""
        x_OD = self.values_OD.float()
        zero = self.zero_OG
        x_OD -= zero if isinstance(zero, int) else self._of_columns(zero.float())
        x_OD *= self._of_columns(self.scale_OG.float())
        if self.offset_OG is not None:
            x_OD += self._of_columns(self.offset_OG.float())
        if self.column_order_D is not None:
            x_OD = torch.empty_like(x_OD).index_copy_(1, self.column_order_D, x_OD)
        return x_OD.to(dtype)

    def select_rows(self, index_O: Tensor) -> QuantizedMatrix:
        """Return these rows of the matrix, in this order."""

        def selected(x: Tensor) -> Tensor:
            # torch cannot select rows of float8, so select them as bytes.
            return x.view(torch.uint8)[index_O].view(x.dtype) if x.itemsize == 1 else x[index_O]

        return replace(
            self,
            values_OD=selected(self.values_OD),
            scale_OG=self.scale_OG if len(self.scale_OG) == 1 else self.scale_OG[index_O],
            zero_OG=self.zero_OG if isinstance(self.zero_OG, int) else self.zero_OG[index_O],
            offset_OG=None if self.offset_OG is None else self.offset_OG[index_O],
        )

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Return a copy of the matrix on a device."""

        def moved(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.to(device)

        return replace(
            self,
            values_OD=self.values_OD.to(device),
            scale_OG=self.scale_OG.to(device),
            zero_OG=self.zero_OG if isinstance(self.zero_OG, int) else self.zero_OG.to(device),
            offset_OG=moved(self.offset_OG),
            column_order_D=moved(self.column_order_D),
        )

    def _of_columns(self, x_OG: Tensor) -> Tensor:
        if x_OG.shape[1] == 1:
            return x_OG
        return x_OG.repeat_interleave(self.group_size, 1)[:, : self.values_OD.shape[1]]

    def is_alike(self, other: QuantizedMatrix) -> bool:
        """Return whether the rows of both matrices can be stored in one."""
        return (
            (self.bits, self.group_size, self.activations, self.input_scale)
            == (other.bits, other.group_size, other.activations, other.input_scale)
            and self.values_OD.shape[1] == other.values_OD.shape[1]
            and self.scale_OG.dtype == other.scale_OG.dtype
            and (
                self.zero_OG == other.zero_OG
                if isinstance(self.zero_OG, int) and isinstance(other.zero_OG, int)
                else isinstance(self.zero_OG, Tensor) and isinstance(other.zero_OG, Tensor)
            )
            and (self.offset_OG is None) == (other.offset_OG is None)
            and _are_equal(self.column_order_D, other.column_order_D)
        )


@functools.cache
def log_dequantized(stored_as: str) -> None:
    """Log that weights in a stored form become floats, once per process and form."""
    logger.warning("no kernel reads weights of %s, so they are dequantized at load", stored_as)


Weight: TypeAlias = Tensor | tuple[QuantizedMatrix, ...]
"""A matrix [O, D] in its stored form: one tensor, or several quantized matrices with consecutive rows."""


def merge_rows(matrices: Sequence[QuantizedMatrix]) -> tuple[QuantizedMatrix, ...]:
    """Return as few matrices as possible with the rows of these in order, merging neighbors of the same kind."""
    merged: list[QuantizedMatrix] = []
    run: list[QuantizedMatrix] = []
    for matrix in matrices:
        if run and not run[-1].is_alike(matrix):
            merged.append(_concatenated(run))
            run = []
        run.append(matrix)
    return (*merged, _concatenated(run))


def join_rows(parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Weight:
    """Return the rows of these matrices in order, quantized if all of them are, else in `dtype`."""
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) == len(parts):
        return merge_rows(quantized)
    tensors = _as_tensors(parts, dtype)
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def join_columns(parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> Weight:
    """Return the columns of these parts of one matrix in order, quantized if all of them are, else in `dtype`.

    A quantized part has whole groups of columns.
    """
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(quantized) < len(parts):
        tensors = _as_tensors(parts, dtype)
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors, 1)
    first = quantized[0]
    if len(quantized) == 1:
        return (first,)

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        # torch cannot concatenate float8, so concatenate bytes.
        if tensors[0].itemsize == 1:
            return torch.cat([x.view(torch.uint8) for x in tensors], 1).view(tensors[0].dtype)
        return torch.cat([*tensors], 1)

    zeros = [m.zero_OG for m in quantized if isinstance(m.zero_OG, Tensor)]
    offsets = [m.offset_OG for m in quantized if m.offset_OG is not None]
    whole = replace(
        first,
        values_OD=joined([m.values_OD for m in quantized]),
        scale_OG=joined([m.scale_OG for m in quantized]),
        zero_OG=joined(zeros) if zeros else first.zero_OG,
        offset_OG=joined(offsets) if offsets else None,
    )
    return (whole,)


def _as_tensors(parts: Sequence[Tensor | QuantizedMatrix], dtype: torch.dtype) -> list[Tensor]:
    return [part if isinstance(part, Tensor) else part.dequantize(dtype) for part in parts]


def _concatenated(matrices: list[QuantizedMatrix]) -> QuantizedMatrix:
    first = matrices[0]
    if len(matrices) == 1:
        return first
    zeros = [m.zero_OG for m in matrices if isinstance(m.zero_OG, Tensor)]
    offsets = [m.offset_OG for m in matrices if m.offset_OG is not None]
    values = [m.values_OD for m in matrices]
    return replace(
        first,
        # torch cannot concatenate float8, so concatenate bytes.
        values_OD=torch.cat([x.view(torch.uint8) for x in values]).view(values[0].dtype),
        scale_OG=torch.cat([m.scale_OG for m in matrices]),
        zero_OG=torch.cat(zeros) if zeros else first.zero_OG,
        offset_OG=torch.cat(offsets) if offsets else None,
    )


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
