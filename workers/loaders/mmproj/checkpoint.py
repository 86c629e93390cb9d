"""Read mmproj files, which contain the towers of GGUF models, by the tensor names of Hugging Face checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path

import torch

from ....protocol.checkpoint.config_fields import ConfigFields
from ....protocol.checkpoint.gguf import GGUFFile, GGUFTensor
from ....protocol.errors import CheckpointError
from ..checkpoint import Checkpoint, part_of
from ..dequantize import DEQUANTIZABLE, dequantize
from .changes import changes
from .names import BY_CHANNEL, KIMI_POSITIONS, PATCHES, UNIFIED, part_number, tensor_renamer

_QUERY_OR_KEY = re.compile(r"\.[qk]_proj\.(weight|bias)$")


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
        # The converter makes a convolution of the projection of patches.
        self._flattened = PATCHES if kind in ("gemma4v", "lfm2", "phi4") else ""
        self._tensors: dict[str, list[GGUFTensor]] = {}
        for name in sorted(self._gguf.tensors, key=part_number):
            self._tensors.setdefault(rename(name), []).append(self._gguf.tensors[name])
        self._num_interleaved_heads = self._num_halved_heads = self._num_heads_in_pairs = 0
        if audio_kind == "glma":
            # Its authors rotate pairs of neighbors in the first half of each head.
            self._num_heads_in_pairs = int(metadata["clip.audio.attention.head_count"])
        if kind == "kimik25":
            # The converter moves the elements that are rotated by the column before those of the row.
            self._num_halved_heads = int(metadata["clip.vision.attention.head_count"])
        if kind in ("lightonocr", "pixtral"):
            # The converter interleaves the rows of q and k, as for decoders.
            self._num_interleaved_heads = int(metadata["clip.vision.attention.head_count"])
        self._changes = changes(kind, metadata)
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
        if name == self._flattened:
            return first.shape[0], math.prod(first.shape[1:])
        if name == f"{UNIFIED}pos_embedding":
            return first.shape[1], first.shape[0], *first.shape[2:]
        if name == KIMI_POSITIONS and len(first.shape) == 2:
            side = math.isqrt(first.shape[0])
            return side, side, first.shape[1]
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
            if name == self._flattened:
                values = values.permute(0, 2, 3, 1).flatten(1)
        elif parts[0].ndim == 4:
            # The patches of two frames.
            values = torch.stack(parts, 2)
        else:
            values = torch.cat(parts)
        if name.endswith(("q_proj.weight", "k_proj.weight")) and self._num_interleaved_heads:
            heads = values.unflatten(0, (self._num_interleaved_heads, -1, 2))
            values = heads.transpose(1, 2).flatten(0, 2)
        if self._num_heads_in_pairs and "audio_tower" in name and _QUERY_OR_KEY.search(name):
            halves = values.unflatten(0, (self._num_heads_in_pairs, 2, -1))
            rotated = halves[:, 0].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
            values = torch.stack((rotated, halves[:, 1]), 1).flatten(0, 2)
        if ".wqkv." in name and self._num_halved_heads:
            joined = values.unflatten(0, (3, self._num_halved_heads, 2, -1, 2))
            rotated = joined[:2].transpose(2, 3)
            values = torch.cat((rotated.flatten(0, 4), joined[2].flatten(0, 3)))
        if name == KIMI_POSITIONS:
            values = values.view(self.shape(name))
        if name.endswith("projector.mm_soft_emb_norm.weight"):
            # The converter adds 1 to this norm, as to Gemma's other norms.
            values = values - 1
        if name == f"{UNIFIED}pos_embedding":
            values = values.transpose(0, 1)
        if name in BY_CHANNEL:
            values = values.unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2)
        if name.endswith("attention.attn.per_dim_scale"):
            # The converter applies the function softplus, which the tower does.
            values = torch.log(torch.expm1(values.double()))
        if name == "resampler.proj.weight":
            # The converter transposes this matrix.
            values = values.T
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
