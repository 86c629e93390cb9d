"""Read mmproj files, which contain the vision towers of GGUF models, by the tensor names of CLIP."""

import math
import re
from collections.abc import Collection
from pathlib import Path

import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.gguf import GGUFFile, GGUFTensor
from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint, part_of
from .dequantize import DEQUANTIZABLE, dequantize

_TOWER = "vision_tower."
_NAMES = {
    "v.patch_embd": f"{_TOWER}embeddings.patch_embedding",
    "v.position_embd": f"{_TOWER}embeddings.position_embedding",
    "v.class_embd": f"{_TOWER}embeddings.class_embedding",
    "v.pre_ln": f"{_TOWER}pre_layrnorm",
    "v.post_ln": f"{_TOWER}post_layernorm",
    "mm.model.fc": "connector.modality_projection.proj",
    "mm.0": "multi_modal_projector.linear_1",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
    "mm.model.mlp.0": "multi_modal_projector.layer_norm",
    "mm.model.mlp.1": "multi_modal_projector.linear_1",
    "mm.model.mlp.3": "multi_modal_projector.linear_2",
    "mm.input_projection": "multi_modal_projector.mm_input_projection_weight",
    "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    "mm.input_norm": "multi_modal_projector.norm",
}
_LAYER_NAMES = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_up": "mlp.fc1",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.fc2",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_LAYER_TENSOR = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tensors whose names have no suffix, such as ".weight", in a Hugging Face checkpoint.
_PLAIN = ("class_embedding", "lambda_1", "lambda_2", "mm_input_projection_weight")


class MmprojCheckpoint(Checkpoint):
    """An mmproj file, whose quantized tensors are dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields({}, path))
        self._tensors = {_hf_name(name): tensor for name, tensor in self._gguf.tensors.items()}
        metadata = self._gguf.metadata
        self._num_interleaved_heads = 0
        if metadata.get("clip.projector_type") == "pixtral":
            # The converter interleaves the rows of q and k, as for decoders.
            self._num_interleaved_heads = int(metadata["clip.vision.attention.head_count"])
        for tensor in self._gguf.tensors.values():
            if tensor.ggml_type not in DEQUANTIZABLE or not tensor.n_bytes:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} of shape {tensor.shape} and type {tensor.ggml_type.name} is not supported",
                )

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensor(name).shape

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Read a tensor, or part of a dimension, dequantized."""
        tensor = self._tensor(name)
        raw = self._gguf.data(tensor).reshape(math.prod(tensor.shape[:-1]), -1)
        self.bytes_read += raw.size
        values = dequantize(raw, tensor.ggml_type, torch.float32).reshape(tensor.shape)
        if name.endswith(("q_proj.weight", "k_proj.weight")) and self._num_interleaved_heads:
            heads = values.unflatten(0, (self._num_interleaved_heads, -1, 2))
            values = heads.transpose(1, 2).flatten(0, 2)
        if name.endswith("mm_soft_emb_norm.weight"):
            # The converter adds 1 to this norm, as to Gemma's other norms.
            values = values - 1
        chosen = part_of(tensor.shape, part, dim)
        if tensor.shape:
            values = values.narrow(dim, chosen.start, len(chosen))
        return values.to(dtype or torch.float32).contiguous()

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor


def _hf_name(name: str) -> str:
    """Return CLIP's name for a tensor, or the name in the file if CLIP has none."""
    if match := _LAYER_TENSOR.fullmatch(name):
        if match[2] not in _LAYER_NAMES:
            return name
        hf, last = f"{_TOWER}encoder.layers.{match[1]}.{_LAYER_NAMES[match[2]]}", match[3]
    else:
        stem, _, last = name.rpartition(".")
        if stem not in _NAMES:
            stem, last = name, "weight"
        if stem not in _NAMES:
            return name
        hf = _NAMES[stem]
    return hf if hf.endswith(_PLAIN) else f"{hf}.{last}"
