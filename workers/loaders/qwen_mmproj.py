"""mmproj files of Qwen-VL, read by the names of its own checkpoints."""

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.gguf import GGUFFile, GGUFTensor
from .checkpoint import Checkpoint, part_of
from .dequantize import dequantize
from .mmproj import check_types

_TOWER: Final = "visual."
_NAMES: Final = {
    "v.position_embd": "pos_embed",
    "v.post_ln": "merger.norm",
    "mm.0": "merger.fc1",
    "mm.2": "merger.fc2",
}
_LAYER_NAMES: Final = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.gate_proj",
}
_LAYER_TENSOR: Final = re.compile(r"v\.(blk|deepstack)\.(\d+)\.(\w+)\.(weight|bias)")
_PATCHES: Final = "patch_embed.proj.weight"


class QwenMmprojCheckpoint(Checkpoint):
    """The mmproj file of a Qwen-VL model, whose quantized tensors are dequantized as they are read.

    Its converter divides the patches' convolution by frame, and in some families the projection by queries, keys and
    values.

    Raises:
        CheckpointError: It is damaged, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields({}, path))
        check_types(self._gguf, path)
        tensors = self._gguf.tensors
        has_gate = "v.blk.0.ffn_gate.weight" in tensors
        added = self._gguf.metadata.get("clip.vision.is_deepstack_layers")
        self._added = [] if added is None else np.flatnonzero(added).tolist()
        self._mlp = ("up_proj", "down_proj") if has_gate else ("fc1", "fc2")
        self._parts: dict[str, Sequence[GGUFTensor]] = {
            self._name(name): [tensor] for name, tensor in tensors.items()
        }
        first, second = (tensors.get(f"v.patch_embd.weight{end}") for end in ("", ".1"))
        if first is not None and second is not None:
            self._parts[_TOWER + _PATCHES] = [first, second]
        for name in [name for name in tensors if ".attn_q." in name]:
            parts = [tensors.get(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
            joined = self._name(name.replace("attn_q", "attn_qkv"))
            self._parts[joined] = [part for part in parts if part is not None]

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        parts = self._found(name)
        shape = parts[0].shape
        if len(parts) == 1:
            return shape
        if name.endswith(_PATCHES):
            return (*shape[:2], len(parts), *shape[2:])
        return (sum(part.shape[0] for part in parts), *shape[1:])

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Read a tensor, or part of a dimension, dequantized and joined."""
        parts = [self._read(each) for each in self._found(name)]
        values = parts[0]
        if len(parts) > 1:
            values = torch.stack(parts, 2) if name.endswith(_PATCHES) else torch.cat(parts)
        chosen = part_of(tuple(values.shape), part, dim)
        values = values.narrow(dim, chosen.start, len(chosen))
        return values.to(dtype or torch.float32).contiguous()

    def _read(self, tensor: GGUFTensor) -> torch.Tensor:
        raw = self._gguf.data(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
        self.bytes_read += raw.size
        return dequantize(raw, tensor.ggml_type, torch.float32).reshape(tensor.shape)

    def _found(self, name: str) -> Sequence[GGUFTensor]:
        parts = self._parts.get(name)
        if parts is None:
            raise self.missing(name)
        return parts

    def _name(self, name: str) -> str:
        """Return Qwen's name of a tensor, or its own if Qwen has none."""
        if match := _LAYER_TENSOR.fullmatch(name):
            kind, index, module, last = match.groups()
            if kind == "deepstack":
                if int(index) not in self._added:
                    return name
                return (
                    f"{_TOWER}deepstack_merger_list.{self._added.index(int(index))}.{module}.{last}"
                )
            own = _LAYER_NAMES | {
                f"ffn_{x}": f"mlp.{y}" for x, y in zip(("up", "down"), self._mlp, strict=True)
            }
            if module not in own:
                return name
            return f"{_TOWER}blocks.{index}.{own[module]}.{last}"
        if name == "v.patch_embd.bias":
            return f"{_TOWER}patch_embed.proj.bias"
        stem, _, last = name.rpartition(".")
        return f"{_TOWER}{_NAMES[stem]}.{last}" if stem in _NAMES else name
