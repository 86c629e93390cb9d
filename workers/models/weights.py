"""Reads the weights of a decoder from a checkpoint, by name, with every shape checked."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...protocol.errors import CheckpointError
from ..loaders.checkpoint import Checkpoint
from ..loaders.dummy import DummyCheckpoint, made_up
from ..loaders.upload import PinnedUpload
from ..parallel.shard import ModelShard
from ..quantization.matrix import QuantizedMatrix, Weight, merge_rows

ProgressCallback = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes) as weights arrive."""

_EMBEDDING = "embed_tokens.weight"
_HEAD = "lm_head.weight"
_FINAL_NORM = "norm.weight"
_KV_SCALES = ("k_scale", "v_scale")
_OPTIONAL = ("rotary_emb.inv_freq", *_KV_SCALES)
_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `part` of the tensor `name`, which has `total` rows."""

    name: str
    total: int
    part: range


def rows_of(names: Sequence[str], sizes: Sequence[int], parts: Sequence[range]) -> list[Rows]:
    """Return the requested rows of several matrices, which are stored separately or in one tensor (if one is named)."""
    if len(names) == len(sizes):
        return [Rows(*rows) for rows in zip(names, sizes, parts, strict=True)]
    starts = accumulate(sizes, initial=0)
    return [
        Rows(names[0], sum(sizes), range(start + part.start, start + part.stop))
        for start, part in zip(starts, parts, strict=False)
    ]


class WeightReader:
    """Reads the text decoder's tensors, under whatever prefix the checkpoint uses.

    Every tensor that `shard` (by default the whole model) uses must be read. `has_head` says whether the output
    projection is a separate tensor. Quantized matrices are not dequantized if `can_keep` accepts them.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        *,
        has_head: bool,
        can_keep: Callable[[QuantizedMatrix], bool] | None = None,
        shard: ModelShard | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._can_keep = can_keep
        self._is_tied = not has_head
        self._names = set(checkpoint.names())
        embedding = next((name for name in sorted(self._names) if name.endswith(_EMBEDDING)), None)
        if embedding is None:
            raise self._error(f"there is no tensor named '...{_EMBEDDING}'")
        self._prefix = embedding.removesuffix(_EMBEDDING)
        self._unread = {
            name
            for name in self._names
            if name.startswith(self._prefix) and not name.endswith(_OPTIONAL)
        }
        self._head = next((name for name in sorted(self._names) if name.endswith(_HEAD)), _HEAD)
        self._unread.discard(self._head)
        if has_head and self._head in self._names:
            self._unread.add(self._head)
        if shard is not None:
            self._unread -= {name for name in self._unread if self._is_elsewhere(name, shard)}
        self._on_progress = on_progress
        self._loaded = 0
        self._total = sum(self._size(name) for name in self._unread)

    def read(self, name: str, *shape: int, part: range | None = None, dim: int = 0) -> Tensor:
        """Return the decoder's tensor `name`, e.g. "layers.0.mlp.up_proj.weight", or a part of one dimension."""
        return self._read(self._prefix + name, shape, part, dim)

    def read_vector(self, name: str, size: int, part: range | None = None) -> Tensor:
        """Read a vector like `read`, but in float32, so that values stored with more bits than `dtype` keep them."""
        return self._read(self._prefix + name, (size,), part, dtype=torch.float32)

    def read_rows(self, prefix: str, suffix: str, rows: Sequence[Rows], *rest: int) -> Tensor:
        """Return rows of several tensors, concatenated along their first dimension."""
        parts = [self.read(f"{prefix}{r.name}.{suffix}", r.total, *rest, part=r.part) for r in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read_matrix(
        self, name: str, rows: int, columns: int, part: range | None = None, dim: int = 0
    ) -> Weight:
        """Read a matrix for products, quantized if possible."""
        return self._stacked([self._read_matrix(self._prefix + name, (rows, columns), part, dim)])

    def read_matrix_rows(self, prefix: str, rows: Sequence[Rows], columns: int) -> Weight:
        """Read rows of several tensors for products, quantized if all of them can be."""
        names = (f"{self._prefix}{prefix}{r.name}.weight" for r in rows)
        shapes = ((r.total, columns) for r in rows)
        return self._stacked(
            [
                self._read_matrix(name, shape, r.part)
                for name, shape, r in zip(names, shapes, rows, strict=True)
            ]
        )

    def read_head(self, vocab_size: int, hidden_size: int, part: range | None = None) -> Weight:
        """Return the output projection, or rows of it, of a model that does not tie it to the embedding."""
        return self._stacked([self._read_matrix(self._head, (vocab_size, hidden_size), part)])

    def read_kv_scales(self, prefix: str, num_kv_heads: int, heads: range) -> Tensor | None:
        """Return the divisors of these heads' keys and values in an FP8 cache, float32 [2, G], or None.

        A calibrated checkpoint has one number for a layer's keys and one for its values, or one for each head.
        """
        names = [f"{self._prefix}{prefix}{name}" for name in _KV_SCALES]
        if not self._names.issuperset(names):
            return None
        scales = []
        for name in names:
            scale = self.checkpoint.tensor(name, torch.float32).reshape(-1)
            if len(scale) not in (1, num_kv_heads):
                raise self._error(
                    f"the tensor {name!r} has {len(scale)} scales for {num_kv_heads} heads"
                )
            scales.append(scale.expand(num_kv_heads)[heads.start : heads.stop])
        return torch.stack(scales).to(self.device)

    def finish(self) -> None:
        """Raise an error if tensors are left that the decoder does not use: the checkpoint is of another model."""
        if self._unread:
            raise self._error(
                f"{len(self._unread)} tensors do not belong to a model of this configuration, "
                f"the first is {min(self._unread)!r}"
            )

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: range | None = None,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        self._check(name, shape)
        tensor = self.checkpoint.tensor(name, dtype or self.dtype, part=part, dim=dim)
        self._mark_read(name)
        return tensor.to(self.device)

    def _read_matrix(
        self, name: str, shape: tuple[int, int], part: range | None = None, dim: int = 0
    ) -> Tensor | QuantizedMatrix:
        self._check(name, shape)
        if self._can_keep is None:
            return self._read(name, shape, part, dim)
        matrix = self.checkpoint.quantized(name, part=part, dim=dim)
        if matrix is None or not self._can_keep(matrix):
            return self._read(name, shape, part, dim)
        self._mark_read(name)
        return matrix.to(self.device)

    def _stacked(self, parts: Sequence[Tensor | QuantizedMatrix]) -> Weight:
        quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
        if len(quantized) == len(parts):
            return merge_rows(quantized)
        tensors = [
            part if isinstance(part, Tensor) else part.dequantize(self.dtype) for part in parts
        ]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self._names:
            raise self._error(f"the tensor {name!r} is missing")
        found = tuple(self.checkpoint.shape(name))
        if found != shape:
            raise self._error(
                f"the tensor {name!r} has shape {list(found)}, the config needs {list(shape)}"
            )

    def _mark_read(self, name: str) -> None:
        """Mark a tensor as read, which it is from its first part on."""
        if name in self._unread:
            self._unread.discard(name)
            self._loaded += self._size(name)
        if self._on_progress is not None:
            self._on_progress(self._loaded, self._total)

    def _is_elsewhere(self, name: str, shard: ModelShard) -> bool:
        """Return whether the tensor belongs to another stage."""
        name = name if name == self._head else name.removeprefix(self._prefix)
        if match := _LAYER.match(name):
            return int(match[1]) in range(shard.num_layers) and int(match[1]) not in shard.layers
        if name == _EMBEDDING:
            return not (shard.is_first or (shard.is_last and self._is_tied))
        return name in (self._head, _FINAL_NORM) and not shard.is_last

    def _size(self, name: str) -> int:
        return math.prod(self.checkpoint.shape(name)) * self.dtype.itemsize

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(self.checkpoint.path, problem)


class DummyWeightReader(WeightReader):
    """Creates random tensors in the shapes that are requested."""

    def __init__(self, checkpoint: DummyCheckpoint, dtype: torch.dtype, device: torch.device):
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self._names = set()
        self._unread = set()
        self._prefix = ""
        self._head = _HEAD
        self._can_keep = None

    def _read(
        self,
        name: str,
        shape: tuple[int, ...],
        part: range | None = None,
        dim: int = 0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        if part is not None:
            shape = (*shape[:dim], len(part), *shape[dim + 1 :])
        return made_up(name, shape, dtype or self.dtype, self.device)

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        """Accept any name and shape."""


def weight_reader(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, **options: Any
) -> WeightReader:
    """Return the reader for the checkpoint's kind; `options` are arguments of `WeightReader`."""
    if isinstance(checkpoint, DummyCheckpoint):
        return DummyWeightReader(checkpoint, dtype, device)
    if device.type == "cuda":
        checkpoint.place = PinnedUpload(device)
    return WeightReader(checkpoint, dtype, device, **options)
