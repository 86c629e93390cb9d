"""Read mmproj files, which contain the towers of GGUF models, by the tensor names of Hugging Face checkpoints."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path

import torch

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.gguf import GGUFFile, GGUFTensor
from ....protocol.errors import CheckpointError
from ..checkpoint import Checkpoint, part_of
from ..dequantize import DEQUANTIZABLE, dequantize
from .changes import changes
from .names import part_number, tensor_renamer


class MmprojCheckpoint(Checkpoint):
    """An mmproj file, whose quantized tensors are dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields({}, path))
        metadata = self._gguf.metadata
        both = metadata.get("clip.projector_type")
        kind = str(metadata.get("clip.vision.projector_type") or both)
        audio_kind = str(metadata.get("clip.audio.projector_type") or both)
        tensors = self._gguf.tensors
        offsets = metadata.get("clip.vision.projector.spatial_offsets", ())
        rename = tensor_renamer(
            kind, audio_kind, tensors, swaps_mlps=self._swaps_mlps(), offsets=offsets
        )
        self._tensors: dict[str, list[GGUFTensor]] = {}
        for name in sorted(self._gguf.tensors, key=part_number):
            self._tensors.setdefault(rename(name), []).append(self._gguf.tensors[name])
        self._changes = changes(kind, audio_kind, metadata)
        for tensor in self._gguf.tensors.values():
            if tensor.ggml_type not in DEQUANTIZABLE or 0 in tensor.shape:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} cannot be read, which has the shape {tensor.shape} and the type "
                    f"{tensor.ggml_type.name}; convert the file again",
                )

    def _swaps_mlps(self) -> bool:
        """Return whether the names of the two matrices of an MLP are swapped, as in files of old converters."""
        down = self._gguf.tensors.get("v.blk.0.ffn_down.weight")
        size = self._gguf.metadata.get("clip.vision.embedding_length")
        return down is not None and len(down.shape) == 2 and down.shape[1] == size != down.shape[0]

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        shape = self._shape(name)
        for pattern, change in self._changes:
            if pattern.search(name):
                shape = tuple(change(torch.empty(shape, device="meta")).shape)
        return shape

    def _shape(self, name: str) -> tuple[int, ...]:
        first, *others = self._parts(name)
        if not others:
            return first.shape
        if len(first.shape) == 4:
            return (*first.shape[:2], 1 + len(others), *first.shape[2:])
        return (sum(part.shape[0] for part in (first, *others)), *first.shape[1:])

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Read a tensor, or part of a dimension, dequantized."""
        parts = [self._dequantized(each) for each in self._parts(name)]
        if len(parts) == 1:
            [values] = parts
        elif parts[0].ndim == 4:
            # The patches of two frames.
            values = torch.stack(parts, 2)
        else:
            values = torch.cat(parts)
        for pattern, change in self._changes:
            if pattern.search(name):
                values = change(values)
        chosen = part_of(tuple(values.shape), part, dim)
        if values.ndim:
            values = values.narrow(dim, chosen.start, len(chosen))
        return values.to(dtype or torch.float32).contiguous()

    def _dequantized(self, tensor: GGUFTensor) -> torch.Tensor:
        rows = self._gguf.rows(tensor, range(tensor.shape[0]))
        raw = rows.reshape(math.prod(tensor.shape[:-1]), -1)
        self.bytes_read += raw.size
        return dequantize(raw, tensor.ggml_type, torch.float32).reshape(tensor.shape)

    def _parts(self, name: str) -> list[GGUFTensor]:
        """Return the tensors of the file that make up a tensor."""
        parts = self._tensors.get(name)
        if parts is None:
            raise self.missing(name)
        return parts
