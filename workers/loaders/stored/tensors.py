"""Tensors of safetensors files that are read in parts, in another order, or joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from ..checkpoint import Floats
from .safetensors_file import SafetensorsFile


class StoredTensor(msgspec.Struct, frozen=True):
    """The tensor `name` of a file, or one expert's part of it.

    Attributes:
        first: The first row of the part.
        step: The distance of the part's rows.
        num_rows: The rows of each expert in a matrix that has the experts one below the other; 0 for other tensors.
        num_heads: The number of heads if the file interleaves the two halves of each head's rows; else 0.
    """

    file: SafetensorsFile
    name: str
    expert: int | None = None
    is_transposed: bool = False
    first: int = 0
    step: int = 1
    num_rows: int = 0
    num_heads: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, or of the expert's part."""
        shape = self.file.shape(self.name)
        if self.expert is None:
            return shape if self.step == 1 else (shape[0] // self.step, *shape[1:])
        if len(shape) == 1:
            return ()
        if self.num_rows:
            shape = (0, self.num_rows, *shape[1:])
        num_rows, *rest = reversed(shape[1:]) if self.is_transposed else shape[1:]
        return num_rows // self.step, *rest

    def part(self, parts: Sequence[range | None]) -> torch.Tensor:
        """Read these ranges of the dimensions, without a copy if they are contiguous in the file."""
        if not self.file.shape(self.name):
            scalar: torch.Tensor = self.file.in_torch.get_tensor(self.name)
            return scalar
        stored = self.file.in_torch.get_slice(self.name)
        found: torch.Tensor
        if self.expert is not None and not self.shape:
            found = stored[self.expert : self.expert + 1].squeeze(0)
        else:
            found = self._select(stored, parts)
        return found

    def floats(self, parts: Sequence[range | None]) -> Floats | None:
        """Return a view of these ranges of the dimensions, or None if they are not stored as plain floats."""
        stored = self.file.floats(self.name)
        if stored is None or not stored.values.ndim:
            return stored
        return replace(stored, values=self._select(stored.values, parts))

    def _select(self, stored: Any, parts: Sequence[range | None]) -> Any:
        """Return these ranges of the dimensions of a tensor or an array."""
        rows, *rest = parts or (None,)
        if self.num_heads:
            return self._select_heads(stored, range(self.shape[0]) if rows is None else rows, rest)
        if self.step > 1:
            rows = range(self.shape[0]) if rows is None else rows
            rows = range(rows.start * self.step, rows.stop * self.step)
        dims = [slice(None) if p is None else slice(p.start, p.stop) for p in (rows, *rest)]
        if self.expert is None:
            found = stored[tuple(dims)]
            return found if self.step == 1 else found[self.first :: self.step]
        if self.num_rows:
            dims = [*dims, slice(None)][:2]
            own, columns = reversed(dims) if self.is_transposed else dims
            first, (start, stop, _) = self.expert * self.num_rows, own.indices(self.num_rows)
            found = stored[first + start : first + stop, columns]
            return found.T if self.is_transposed else found
        one = slice(self.expert, self.expert + 1)
        if self.is_transposed:
            columns = dims[1] if len(dims) > 1 else slice(None)
            found = stored[one, columns, dims[0]].squeeze(0).T
        else:
            found = stored[(one, *dims)].squeeze(0)
        return found[self.first :: self.step]

    def _select_heads(self, stored: Any, rows: range, rest: Sequence[range | None]) -> Any:
        """Return a copy of these rows, in which the first half of each head precedes the second."""
        size = self.shape[0] // self.num_heads
        first, last = rows.start // size, -(-rows.stop // size)
        others = (slice(None) if p is None else slice(p.start, p.stop) for p in rest)
        found = stored[(slice(first * size, last * size), *others)]
        heads = found.reshape(last - first, size // 2, 2, *found.shape[1:]).swapaxes(1, 2)
        return heads.reshape(found.shape)[rows.start - first * size : rows.stop - first * size]


class JoinedTensor(msgspec.Struct, frozen=True):
    """Several tensors of files that are read as one tensor, which has their rows one after the other.

    If `dim` is 1, it has their columns one after the other.
    """

    tensors: tuple[StoredTensor, ...]
    dim: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all tensors together."""
        shape = list(self.tensors[0].shape)
        shape[self.dim] = sum(each.shape[self.dim] for each in self.tensors)
        return tuple(shape)

    def part(self, parts: Sequence[range | None]) -> torch.Tensor:
        """Read these ranges of the dimensions."""
        return torch.cat([tensor.part(own) for tensor, own in self._split(parts)], self.dim)

    def floats(self, parts: Sequence[range | None]) -> Floats | None:
        """Return these ranges of the dimensions, or None if they are not stored as plain floats of one type."""
        split = self._split(parts)
        found = [x for tensor, own in split if (x := tensor.floats(own)) is not None]
        if len(found) < len(split) or len({each.dtype for each in found}) > 1:
            return None
        return replace(found[0], values=np.concatenate([each.values for each in found], self.dim))

    def _split(
        self, parts: Sequence[range | None]
    ) -> list[tuple[StoredTensor, list[range | None]]]:
        """Return the tensors that have some of these rows or columns, at least one, and their own ranges."""
        ranges = [*parts, *(None,) * (self.dim + 1 - len(parts))]
        joined = ranges[self.dim]
        first, found = 0, []
        for tensor in self.tensors:
            count = tensor.shape[self.dim]
            start, stop = (
                (0, count) if joined is None else (joined.start - first, joined.stop - first)
            )
            own = range(min(max(start, 0), count), max(min(stop, count), 0))
            found.append((tensor, [*ranges[: self.dim], own, *ranges[self.dim + 1 :]]))
            first += count
        return [each for each in found if each[1][self.dim]] or found[:1]
