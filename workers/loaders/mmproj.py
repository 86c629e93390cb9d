"""Read mmproj files, which contain the vision towers of GGUF models, by the tensor names of CLIP."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from functools import partial
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
    "v.std_bias": f"{_TOWER}std_bias",
    "v.std_scale": f"{_TOWER}std_scale",
}
_GEMMA4_NAMES = {**_NAMES, "mm.input_projection": "connector.modality_projection.proj"}
_RESAMPLER_NAMES = {
    **_NAMES,
    "resampler.kv": "resampler.kv_proj",
    **{f"resampler.attn.{x}": "resampler.attn.in_proj" for x in "qkv"},
    "resampler.attn.out": "resampler.attn.out_proj",
}
_UNIFIED = "embed_vision."
_UNIFIED_NAMES = {
    "v.patch_embd": f"{_UNIFIED}patch_dense",
    "v.patch_norm.1": f"{_UNIFIED}patch_ln1",
    "v.patch_norm.2": f"{_UNIFIED}patch_ln2",
    "v.patch_norm.3": f"{_UNIFIED}pos_norm",
    "v.position_embd": f"{_UNIFIED}pos_embedding",
    "mm.input_projection": f"{_UNIFIED}embedding_projection",
}
_BY_CHANNEL = tuple(
    f"{_UNIFIED}{name}" for name in ("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")
)
"""Tensors of Gemma 4's unified models whose elements belong to pixels; the converter orders them by channel."""

_LFM2_NAMES = {**_NAMES, "mm.input_norm": "multi_modal_projector.layer_norm"}
_LLAMA4_NAMES = {
    **_NAMES,
    "mm.model.fc": "multi_modal_projector.linear_1",
    "mm.model.mlp.1": "multi_modal_projector.fc1",
    "mm.model.mlp.2": "multi_modal_projector.fc2",
}
_OTHER_NAMES = {
    "gemma4uv": _UNIFIED_NAMES,
    "gemma4v": _GEMMA4_NAMES,
    "lfm2": _LFM2_NAMES,
    "llama4": _LLAMA4_NAMES,
    "resampler": _RESAMPLER_NAMES,
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
    "attn_post_norm": "output_norm1",
    "ffn_post_norm": "output_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_gate": "mlp.gate_proj",
    "ffn_down": "mlp.fc2",
    "ls1": "lambda_1",
    "ls2": "lambda_2",
}
_VISUAL = "visual."
_GRID_NAMES = {
    "v.patch_embd": f"{_VISUAL}patch_embed.proj",
    "v.position_embd": f"{_VISUAL}pos_embed",
    "v.post_ln": f"{_VISUAL}merger.norm",
    "mm.0": f"{_VISUAL}merger.fc1",
    "mm.2": f"{_VISUAL}merger.fc2",
}
_DOTS_NAMES = {
    **_GRID_NAMES,
    "v.pre_ln": f"{_VISUAL}patch_norm",
    "mm.post_norm": f"{_VISUAL}final_norm",
    "mm.input_norm": f"{_VISUAL}merger.norm",
}
_GRID_LAYER_NAMES = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.gate_proj",
}
_KIMI_NAMES = {
    "v.patch_embd": f"{_TOWER}patch_embed.proj",
    "v.position_embd": f"{_TOWER}patch_embed.pos_emb",
    "v.post_ln": f"{_TOWER}encoder.final_layernorm",
    "mm.input_norm": "multi_modal_projector.pre_norm",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_KIMI_POSITIONS = f"{_TOWER}patch_embed.pos_emb.weight"
_KIMI_LAYER_NAMES = {
    "ln1": "norm0",
    "ln2": "norm1",
    "attn_qkv": "wqkv",
    "attn_q": "wqkv",
    "attn_k": "wqkv",
    "attn_v": "wqkv",
    "attn_out": "wo",
    "ffn_up": "mlp.fc0",
    "ffn_down": "mlp.fc1",
}
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)")
_LAST_PARTS = ("attn_k", "attn_v", "weight.1", "attn.k", "attn.v")
"""Marks of tensors that are parts of one in a Hugging Face checkpoint, after its first part and in their order."""

_LAYER_TENSOR = re.compile(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias|(?:in|out)put_m(?:in|ax))")
# Tensors whose names have no suffix, such as ".weight", in a Hugging Face checkpoint.
_PLAIN = (
    "class_embedding",
    "lambda_1",
    "lambda_2",
    "mm_input_projection_weight",
    "pos_embedding",
    "std_bias",
    "std_scale",
)


class MmprojCheckpoint(Checkpoint):
    """An mmproj file, whose quantized tensors are dequantized when they are read.

    Raises:
        CheckpointError: The file is damaged, or has a tensor of an unknown type.
    """

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields({}, path))
        metadata = self._gguf.metadata
        kind = str(
            metadata.get("clip.vision.projector_type") or metadata.get("clip.projector_type")
        )
        rename: Callable[[str], str] = partial(
            _hf_name, names=_OTHER_NAMES.get(kind, _NAMES), swaps_mlps=self._swaps_mlps()
        )
        if kind.startswith("qwen"):
            rename = _grid_names(self._gguf.tensors, _GRID_NAMES)
        elif kind == "dots_ocr":
            rename = _grid_names(self._gguf.tensors, _DOTS_NAMES)
        elif kind.startswith("kimi"):
            rename = _kimi_name
        # The converter makes a convolution of these patch projections.
        self._flattens_patches = kind in ("gemma4v", "lfm2")
        self._tensors: dict[str, list[GGUFTensor]] = {}
        for name in sorted(self._gguf.tensors, key=_part_number):
            self._tensors.setdefault(rename(name), []).append(self._gguf.tensors[name])
        self._num_interleaved_heads = self._num_halved_heads = 0
        if kind == "kimik25":
            # The converter moves the elements that are rotated by the column before those of the row.
            self._num_halved_heads = int(metadata["clip.vision.attention.head_count"])
        if kind in ("lightonocr", "pixtral"):
            # The converter interleaves the rows of q and k, as for decoders.
            self._num_interleaved_heads = int(metadata["clip.vision.attention.head_count"])
        for tensor in self._gguf.tensors.values():
            if tensor.ggml_type not in DEQUANTIZABLE or 0 in tensor.shape:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} of shape {tensor.shape} and type {tensor.ggml_type.name} is not supported; "
                    "convert the file again",
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
        first, *others = self._parts(name)
        if self._flattens_patches and len(first.shape) == 4:
            return first.shape[0], math.prod(first.shape[1:])
        if name == f"{_UNIFIED}pos_embedding":
            return first.shape[1], first.shape[0], *first.shape[2:]
        if name == _KIMI_POSITIONS and len(first.shape) == 2:
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
            if self._flattens_patches and values.ndim == 4:
                values = values.permute(0, 2, 3, 1).flatten(1)
        elif parts[0].ndim == 4:
            # The patches of two frames.
            values = torch.stack(parts, 2)
        else:
            values = torch.cat(parts)
        if name.endswith(("q_proj.weight", "k_proj.weight")) and self._num_interleaved_heads:
            heads = values.unflatten(0, (self._num_interleaved_heads, -1, 2))
            values = heads.transpose(1, 2).flatten(0, 2)
        if ".wqkv." in name and self._num_halved_heads:
            joined = values.unflatten(0, (3, self._num_halved_heads, 2, -1, 2))
            rotated = joined[:2].transpose(2, 3)
            values = torch.cat((rotated.flatten(0, 4), joined[2].flatten(0, 3)))
        if name == _KIMI_POSITIONS:
            values = values.view(self.shape(name))
        if name.endswith("mm_soft_emb_norm.weight"):
            # The converter adds 1 to this norm, as to Gemma's other norms.
            values = values - 1
        if name == f"{_UNIFIED}pos_embedding":
            values = values.transpose(0, 1)
        if name in _BY_CHANNEL:
            values = values.unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2)
        if name == "resampler.proj.weight":
            # The converter transposes this matrix.
            values = values.T
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


def _part_number(name: str) -> int:
    """Return the place of a tensor among the parts of one."""
    return next((i for i, mark in enumerate(_LAST_PARTS, 1) if mark in name), 0)


def _grid_names(names: Collection[str], table: Mapping[str, str]) -> Callable[[str], str]:
    """Return what names the tensors of a Qwen-VL or dots.ocr as its checkpoint does.

    `table` has the names of the tensors outside of layers.
    """
    matches = [_DEEPSTACK.fullmatch(name) for name in names]
    kept = sorted({int(match[1]) for match in matches if match})
    has_gate = any(".ffn_gate." in name for name in names)
    up, down = ("up_proj", "down_proj") if has_gate else ("fc1", "fc2")
    layer_names = {**_GRID_LAYER_NAMES, "ffn_up": f"mlp.{up}", "ffn_down": f"mlp.{down}"}

    def rename(name: str) -> str:
        if match := _DEEPSTACK.fullmatch(name):
            index = kept.index(int(match[1]))
            return f"{_VISUAL}deepstack_merger_list.{index}.{match[2]}.{match[3]}"
        if match := _LAYER_TENSOR.fullmatch(name):
            if match[2] not in layer_names:
                return name
            return f"{_VISUAL}blocks.{match[1]}.{layer_names[match[2]]}.{match[3]}"
        stem, _, last = name.removesuffix(".1").rpartition(".")
        return f"{table[stem]}.{last}" if stem in table else name

    return rename


def _kimi_name(name: str) -> str:
    """Return Kimi-VL's name for a tensor, or the name in the file if there is none."""
    if match := _LAYER_TENSOR.fullmatch(name):
        if match[2] not in _KIMI_LAYER_NAMES:
            return name
        return f"{_TOWER}encoder.blocks.{match[1]}.{_KIMI_LAYER_NAMES[match[2]]}.{match[3]}"
    stem, _, last = name.rpartition(".")
    return f"{_KIMI_NAMES[stem]}.{last}" if stem in _KIMI_NAMES else name


def _hf_name(name: str, names: Mapping[str, str], *, swaps_mlps: bool) -> str:
    """Return CLIP's name for a tensor, or the name in the file if CLIP has none."""
    if match := _LAYER_TENSOR.fullmatch(name):
        stem = match[2]
        if swaps_mlps:
            stem = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(stem, stem)
        if stem not in _LAYER_NAMES:
            return name
        hf, last = f"{_TOWER}encoder.layers.{match[1]}.{_LAYER_NAMES[stem]}", match[3]
    else:
        stem, _, last = name.rpartition(".")
        if stem not in names:
            stem, last = name, "weight"
        if stem not in names:
            return name
        hf = names[stem]
    if hf.endswith("in_proj"):
        return f"{hf}_{last}"
    return hf if hf.endswith(_PLAIN) else f"{hf}.{last}"
