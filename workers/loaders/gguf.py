"""GGUF files, read by Hugging Face's names and conventions."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType, GGUFFile, GGUFTensor
from ...protocol.checkpoint.gguf_config import gguf_to_hf_config
from ...protocol.errors import CheckpointError
from ..quantization.matrix import QuantizedMatrix
from .checkpoint import Checkpoint, part_of
from .dequantize import BLOCK_TYPES, DEQUANTIZABLE, dequantize, unpack_matrix

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_MODULES = _LAYER_MODULES | {"ffn_norm": "pre_feedforward_layernorm"}
_LAYER_MODULES_OF_ARCHITECTURE = {
    "gemma2": _GEMMA_MODULES,
    "gemma3": _GEMMA_MODULES,
    "phi3": _LAYER_MODULES | {"ffn_up": "mlp.gate_up_proj"},
}
# The rotary embedding of these architectures pairs neighboring elements, while Hugging Face pairs the two halves of a
# head, so the converter interleaves the rows of q and k.
_INTERLEAVED = ("llama", "smollm3", "granite")
# The norms of these architectures multiply by 1 + weight; the converter stores the sum.
_NORM_PLUS_ONE = ("gemma2", "gemma3")
# The config has the values of these tensors.
_ROTARY_TENSORS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*attn_rot_embd.*")
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TENSOR = re.compile(r"(\w+)\.(weight|bias)")

_STORED_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; quantized tensors are dequantized as they are read."""

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields(gguf_to_hf_config(self._gguf), path))
        self._architecture: str = self._gguf.metadata["general.architecture"]
        layer_modules = _LAYER_MODULES_OF_ARCHITECTURE.get(self._architecture, _LAYER_MODULES)
        self._tensors: dict[str, GGUFTensor] = {}
        for tensor in self._gguf.tensors.values():
            if _ROTARY_TENSORS.fullmatch(tensor.name):
                continue
            name = self._hf_name(tensor.name, layer_modules)
            if other := self._tensors.get(name):
                raise CheckpointError(
                    path, f"tensors {other.name!r} and {tensor.name!r} are both {name!r}"
                )
            self._tensors[name] = tensor
            if tensor.ggml_type not in DEQUANTIZABLE:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} is {tensor.ggml_type.name}, which is not supported; "
                    f"supported are {', '.join(t.name for t in DEQUANTIZABLE)}",
                )
            self._check_shape(tensor)

    def _check_shape(self, tensor: GGUFTensor) -> None:
        num_heads = self._num_interleaved_heads(tensor.name)
        if len(tensor.shape) not in (1, 2):
            problem = f"has {len(tensor.shape)} dimensions, not 1 or 2"
        elif tensor.n_bytes == 0:
            problem = f"is empty, of shape {tensor.shape}"
        elif len(tensor.shape) == 1 and BLOCK_SIZES[tensor.ggml_type][0] > 1:
            problem = f"is a vector and {tensor.ggml_type.name}; vectors must not be quantized"
        elif num_heads and tensor.shape[0] % (2 * num_heads):
            problem = f"has {tensor.shape[0]} rows, which are not whole heads"
        else:
            return
        raise CheckpointError(self.path, f"tensor {tensor.name!r} {problem}")

    def _hf_name(self, name: str, layer_modules: Mapping[str, str]) -> str:
        if (match := _LAYER_TENSOR.fullmatch(name)) and match[2] in layer_modules:
            return f"model.layers.{match[1]}.{layer_modules[match[2]]}.{match[3]}"
        if (match := _TENSOR.fullmatch(name)) and match[1] in _MODULES:
            return f"{_MODULES[match[1]]}.{match[2]}"
        raise CheckpointError(
            self.path, f"tensor {name!r} is not known for the architecture {self._architecture!r}"
        )

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensor(name).shape

    def ggml_type(self, name: str) -> GGMLQuantizationType:
        """Return the type in which a tensor is stored."""
        return self._tensor(name).ggml_type

    def raw(self, name: str, part: range | None = None) -> npt.NDArray[np.uint8]:
        """Return rows of a tensor as stored, uint8 ``[rows, row bytes]``, in Hugging Face's order.

        Each element of a vector is a row. 1 is added to the norms of Gemma. The result is a view of the memory map if
        the file has the same order.
        """
        tensor = self._tensor(name)
        part = part_of(tensor.shape, part, 0)
        rows = self._gguf.data(tensor).reshape(tensor.shape[0], -1)
        num_heads = self._num_interleaved_heads(tensor.name)
        if not num_heads:
            return rows[part.start : part.stop]
        head_dim = tensor.shape[0] // num_heads
        first_head, last_head = part.start // head_dim, -(-part.stop // head_dim)
        heads = rows.reshape(num_heads, head_dim // 2, 2, -1)[first_head:last_head]
        rows = heads.swapaxes(1, 2).reshape(-1, rows.shape[1])
        return rows[part.start - first_head * head_dim : part.stop - first_head * head_dim]

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
        part = part_of(tensor.shape, part, dim)
        dtype = dtype or _STORED_DTYPES.get(tensor.ggml_type, torch.float32)
        is_shifted = self._architecture in _NORM_PLUS_ONE and name.endswith("norm.weight")
        columns = slice(None)
        if dim == 0:
            raw = self.raw(name, part)
        else:
            block_size, block_bytes = BLOCK_SIZES[tensor.ggml_type]
            first_block, last_block = part.start // block_size, -(-part.stop // block_size)
            raw = self.raw(name)[:, first_block * block_bytes : last_block * block_bytes]
            before = first_block * block_size
            columns = slice(part.start - before, part.stop - before)
        self.bytes_read += raw.size
        values = dequantize(raw, tensor.ggml_type, torch.float32 if is_shifted else dtype)
        if is_shifted:
            values = values.sub_(1).to(dtype)
        values = values[:, columns].contiguous()
        return values if len(tensor.shape) == 2 else values[:, 0]

    def quantized(
        self, name: str, *, part: range | None = None, dim: int = 0
    ) -> QuantizedMatrix | None:
        """Read a tensor as integers, or return None if it is not quantized or the part splits a block."""
        tensor = self._tensor(name)
        if tensor.ggml_type not in BLOCK_TYPES:
            return None
        part = part_of(tensor.shape, part, dim)
        if dim == 0:
            raw = self.raw(name, part)
        else:
            block_size, block_bytes = BLOCK_SIZES[tensor.ggml_type]
            if part.start % block_size or part.stop % block_size:
                # The part ends within a block, so it has to be dequantized.
                return None
            start, stop = (bound // block_size * block_bytes for bound in (part.start, part.stop))
            raw = self.raw(name)[:, start:stop]
        self.bytes_read += raw.size
        stored = self.place(torch.from_numpy(np.array(raw)), torch.uint8)
        return unpack_matrix(stored, tensor.ggml_type)

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor

    def _num_interleaved_heads(self, gguf_name: str) -> int:
        """Return how many heads' rows are interleaved in a tensor; 0 if none are."""
        if self._architecture not in _INTERLEAVED:
            return 0
        if ".attn_q." in gguf_name:
            return int(self.config["num_attention_heads"])
        if ".attn_k." in gguf_name:
            return int(self.config["num_key_value_heads"])
        return 0
