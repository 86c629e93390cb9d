"""Read GGUF files by Hugging Face's names and conventions."""

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.gguf import BLOCK_SIZES, GGMLQuantizationType, GGUFFile, GGUFTensor
from ...protocol.checkpoint.gguf_config.convert import gguf_to_hf_config
from ...protocol.checkpoint.pooling.classification import HEAD_PARTS
from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint, Floats, copy_to_host, part_of
from .dequantize import BLOCK_TYPES, DEQUANTIZABLE, WITH_CODEBOOKS, dequantize, unpack_matrix
from .gguf_names import hf_name
from .quantization.matrix import QuantizedMatrix
from .quantization.row_tables import BlockRows, MatrixRows, RowTable

# The rotary embedding of these architectures pairs neighboring elements, but Hugging Face pairs the two halves of a
# head. The converter therefore interleaves the rows of q and k.
INTERLEAVED = (
    "llama",
    "arcee",
    "arctic",
    "baichuan",
    "bailingmoe",
    "deci",
    "deepseek",
    "internlm2",
    "llada",
    "llama-embed",
    "minicpm",
    "smollm3",
    "xverse",
    "granite",
    "granite_swa",
    "granitehybrid",
    "granitemoe",
    "mistral3",
    "muse-glimmer",
    "nanbeige",
    "olmo",
    "ouro",
)
# The norms of these architectures multiply by 1 + weight, and the converter stores the sum.
_NORM_PLUS_ONE = (
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma3",
    "minimax-m3",
    "muse-glimmer",
    "nemotron",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "qwen4exp",
    "step35",
)
# Not read: values that the config contains, and layers for pooled vectors, and for images.
_UNUSED = re.compile(
    r"dense_[23]\.weight|rope_(freqs|factors_long|factors_short)\.weight|.*attn_rot_embd.*|dec\..*\.cross_attn_rel_b\..*"
    r"|blk\.\d+\.vis_.*"
)
# Tensors of layers for multi-token prediction, which only some families read.
_OF_PREDICTION = re.compile(r"blk\.\d+\.nextn\..*")
# Tensors of a classification head, which masked language models have in part.
_OF_SCORE_HEAD = re.compile(r"cls\..*")
# Norms of these architectures have no weights, but the converter stores factors as weights, which the config contains.
_UNIT_NORMS = {"muse-glimmer": re.compile(r"blk\.\d+\.attn_[qk]_norm\.weight")}
_FLOATS: Final = {
    GGMLQuantizationType.F32: ("float32", np.float32),
    GGMLQuantizationType.F16: ("float16", np.float16),
    GGMLQuantizationType.BF16: ("bfloat16", np.uint16),
}
"""The names of dtypes in `Floats`, and the types of `Floats.values`."""


def split_parts(name: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """Return the tensor by its name, or its parts if it stacks the tensors of all experts or heads."""
    if "{part}" not in name:
        is_row = name.endswith(("shared_expert_gate.weight", "score_head.output.weight"))
        is_row = is_row or tensor.name == "cls.weight"
        if is_row and len(tensor.shape) == 1:
            tensor = replace(tensor, shape=(1, *tensor.shape))
        elif re.search(r"\.(mixer\.([qkv]_)?|ple\.)conv1d\.weight", name) and len(tensor.shape) > 1:
            tensor = replace(tensor, shape=(math.prod(tensor.shape[:-1]), 1, tensor.shape[-1]))
        elif name.endswith(("mixer.A_log", "mixer.D", "mixer.norm.weight")):
            tensor = replace(tensor, shape=(math.prod(tensor.shape),))
        elif ".time_mix_" in tensor.name and len(tensor.shape) > 2:
            # What belongs to the mixtures of RWKV, one after the other.
            tensor = replace(tensor, shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))
        return {name: tensor}
    num_parts, *shape = tensor.shape
    size = tensor.n_bytes // num_parts
    return {
        name.format(part=i): replace(
            tensor,
            name=f"{tensor.name}[{i}]",
            shape=tuple(shape),
            offset=tensor.offset + i * size,
            n_bytes=size,
        )
        for i in range(num_parts)
    }


def _activation_parameters(gguf: GGUFFile) -> dict[str, torch.Tensor]:
    """Return each layer's xIELU parameters, which are in the metadata, by the names of their tensors."""
    parameters = {}
    for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        for layer, value in enumerate(np.atleast_1d(gguf.metadata.get(f"xielu.{name}", ()))):
            parameter = torch.tensor(float(value), dtype=torch.float32).reshape(shape)
            parameters[f"model.layers.{layer}.mlp.act_fn.{name}"] = parameter
    return parameters


def _jina2_names(gguf: GGUFFile) -> str:
    """Return the architecture whose names the file of a Jina v2 has. Old files have separate matrices of gates."""
    is_split = "blk.0.ffn_gate.weight" in gguf.tensors
    if "blk.0.attn_norm_2.weight" in gguf.tensors:
        return "jina-bert-v2-code-split" if is_split else "jina-bert-v2-code"
    return "bert" if is_split else "jina-bert-v2"


class GGUFCheckpoint(Checkpoint):
    """A GGUF file. Quantized tensors are dequantized when they are read, unless `quantized` is called."""

    def __init__(self, path: Path) -> None:
        self._gguf = GGUFFile(path)
        super().__init__(path, ConfigFields(gguf_to_hf_config(self._gguf), path))
        self._architecture: str = self._gguf.metadata["general.architecture"]
        named_as = "bamba" if self.config["model_type"] == "bamba" else self._architecture
        if named_as == "jina-bert-v2":
            named_as = _jina2_names(self._gguf)
        unused = [_UNUSED, _UNIT_NORMS.get(self._architecture, _UNUSED)]
        if not self.config.get("num_nextn_predict_layers"):
            unused.append(_OF_PREDICTION)
        if self.config.get(HEAD_PARTS) is None:
            unused.append(_OF_SCORE_HEAD)
        self._tensors: dict[str, GGUFTensor] = {}
        self._scalars = _activation_parameters(self._gguf)
        for tensor in self._gguf.tensors.values():
            is_unused = any(pattern.fullmatch(tensor.name) for pattern in unused)
            if is_unused or self._is_repeated(tensor.name):
                continue
            found = hf_name(tensor.name, named_as)
            if found is None:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} is unknown for the architecture {self._architecture!r}",
                )
            if found == "lm_head.weight" and self.config["tie_word_embeddings"]:
                found = "model.embed_tokens.weight"
            for name, part in split_parts(found, tensor).items():
                if other := self._tensors.get(name):
                    raise CheckpointError(
                        path, f"tensors {other.name!r} and {tensor.name!r} are both {name!r}"
                    )
                self._tensors[name] = part
                self._check_shape(part)
            if tensor.ggml_type not in DEQUANTIZABLE:
                raise CheckpointError(
                    path,
                    f"tensor {tensor.name!r} is {tensor.ggml_type.name}, which is not supported; "
                    f"supported are {', '.join(t.name for t in DEQUANTIZABLE)}",
                )

    def _is_repeated(self, name: str) -> bool:
        """Return whether a tensor is a part of another one that the file also contains as a whole."""
        whole = re.sub(r"attn_[kv]_b\.", "attn_kv_b.", name)
        return whole != name and whole in self._gguf.tensors

    def _check_shape(self, tensor: GGUFTensor) -> None:
        num_heads = self._num_interleaved_heads(tensor.name)
        is_convolution = len(tensor.shape) == 3 and tensor.shape[1] == 1
        if len(tensor.shape) not in (1, 2) and not is_convolution:
            problem = f"has {len(tensor.shape)} dimensions, not 1 or 2"
        elif 0 in tensor.shape:
            problem = f"is empty, of shape {tensor.shape}"
        elif len(tensor.shape) == 1 and BLOCK_SIZES[tensor.ggml_type][0] > 1:
            problem = f"is a vector and {tensor.ggml_type.name}; vectors must not be quantized"
        elif num_heads and tensor.shape[0] % (2 * num_heads):
            problem = f"has {tensor.shape[0]} rows, which are not whole heads"
        else:
            return
        raise CheckpointError(self.path, f"tensor {tensor.name!r} {problem}")

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self._tensors.keys() | self._scalars.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name in self._scalars:
            return tuple(self._scalars[name].shape)
        return self._tensor(name).shape

    def num_bytes(self, name: str, itemsize: int) -> int:
        """See `Checkpoint.num_bytes`."""
        if name in self._scalars:
            return super().num_bytes(name, itemsize)
        return self._tensor(name).n_bytes

    def ggml_type(self, name: str) -> GGMLQuantizationType:
        """Return the type in which a tensor is stored."""
        return self._tensor(name).ggml_type

    def raw(self, name: str, part: range | None = None) -> npt.NDArray[np.uint8]:
        """Return rows of a tensor as stored, uint8 ``[rows, row bytes]``, in Hugging Face's order.

        Each element of a vector is a row. Gemma's norms include the 1 that the converter adds. If the file has the same
        order, the result is a view of the memory map.
        """
        tensor = self._tensor(name)
        part = part_of(tensor.shape, part, 0)
        num_heads = self._num_interleaved_heads(tensor.name)
        if not num_heads:
            return self._gguf.rows(tensor, part)
        rows = self._gguf.rows(tensor, range(tensor.shape[0]))
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
        """Return a tensor, or the range `part` of its dimension `dim`, dequantized to `dtype`."""
        if name in self._scalars:
            return self._scalars[name].to(dtype or torch.float32)
        tensor = self._tensor(name)
        part = part_of(tensor.shape, part, dim)
        if dtype is None:
            is_float = tensor.ggml_type in _FLOATS
            dtype = getattr(torch, _FLOATS[tensor.ggml_type][0]) if is_float else torch.float32
        is_shifted = self._is_shifted(name)
        raw, columns = self._blocks(name, part, dim)
        values = dequantize(raw, tensor.ggml_type, torch.float32 if is_shifted else dtype)
        if is_shifted:
            values = values.sub_(1).to(dtype)
        if name.endswith("mixer.A_log"):
            # The file contains exp(A_log), negative except for Ling 3.
            values = values.abs_().log_()
        values = values[:, columns].contiguous()
        return values if len(tensor.shape) == 2 else values.reshape(-1, *tensor.shape[1:])

    def floats(self, name: str, *, part: range | None = None, dim: int = 0) -> Floats | None:
        """Return a view of a tensor, or None if it is not stored as plain floats."""
        is_derived = name in self._scalars or name.endswith("mixer.A_log")
        if is_derived or self._tensor(name).ggml_type not in _FLOATS:
            return None
        tensor = self._tensor(name)
        dtype, stored = _FLOATS[tensor.ggml_type]
        raw, columns = self._blocks(name, part_of(tensor.shape, part, dim), dim)
        values = np.ascontiguousarray(raw).view(stored)[:, columns]
        found = Floats(
            values if len(tensor.shape) == 2 else values.reshape(-1, *tensor.shape[1:]), dtype
        )
        if self._is_shifted(name):
            return Floats(found.as_float32() - np.float32(1), "float32")
        return found

    def _is_shifted(self, name: str) -> bool:
        """Return whether the file contains 1 plus the values of a tensor."""
        # Gated delta nets norm their outputs by the weight itself.
        is_norm = name.endswith("norm.weight") and ".mixer." not in name
        is_norm = is_norm or ".ple.norm_" in name
        if self._architecture == "muse-glimmer" and name == "model.norm.weight":
            return False
        return is_norm and self._architecture in _NORM_PLUS_ONE

    def _blocks(self, name: str, part: range, dim: int) -> tuple[npt.NDArray[np.uint8], slice]:
        """Return the blocks that contain a part of a tensor, and the columns of the part within them."""
        columns = slice(None)
        if dim == 0:
            raw = self.raw(name, part)
        else:
            block_size, block_bytes = BLOCK_SIZES[self._tensor(name).ggml_type]
            first_block, last_block = part.start // block_size, -(-part.stop // block_size)
            raw = self.raw(name)[:, first_block * block_bytes : last_block * block_bytes]
            before = first_block * block_size
            columns = slice(part.start - before, part.stop - before)
        self.bytes_read += raw.size
        return raw, columns

    def quantized(
        self, name: str, *, part: range | None = None, dim: int = 0
    ) -> QuantizedMatrix | None:
        """Return a tensor as integers, or None if it is not quantized or the part would split a block."""
        tensor = self._tensor(name)
        if tensor.ggml_type not in BLOCK_TYPES:
            return None
        part = part_of(tensor.shape, part, dim)
        if dim == 0:
            raw = self.raw(name, part)
        else:
            block_size, block_bytes = BLOCK_SIZES[tensor.ggml_type]
            if part.start % block_size or part.stop % block_size:
                # The part ends inside a block, so it has to be dequantized.
                return None
            start, stop = (bound // block_size * block_bytes for bound in (part.start, part.stop))
            raw = self.raw(name)[:, start:stop]
        self.bytes_read += raw.size
        stored = self.place(torch.from_numpy(np.array(raw)), torch.uint8)
        return unpack_matrix(stored, tensor.ggml_type)

    def table(self, name: str, dtype: torch.dtype, part: range) -> RowTable | None:
        """See `Checkpoint.table`. The blocks stay as they are in the file, unless a GPU would need codebooks."""
        ggml_type = self._tensor(name).ggml_type
        if ggml_type not in BLOCK_TYPES:
            return None
        # This copies the rows, which need not be copied again to stay in memory.
        stored = torch.from_numpy(np.array(self.raw(name, part)))
        self.bytes_read += stored.nbytes
        if self.place is not copy_to_host:
            stored = self.place(stored, torch.uint8)
        if stored.device.type == "cpu" or ggml_type not in WITH_CODEBOOKS:
            return BlockRows(stored, ggml_type, dtype)
        return MatrixRows(unpack_matrix(stored, ggml_type), dtype)

    def _tensor(self, name: str) -> GGUFTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor

    def _num_interleaved_heads(self, gguf_name: str) -> int:
        """Return the number of heads whose rows are interleaved in a tensor; 0 if it has none."""
        if self._architecture not in INTERLEAVED:
            return 0
        if ".attn_q." in gguf_name:
            return int(self.config["num_attention_heads"])
        if ".attn_k." not in gguf_name:
            return 0
        if (blocks := self.config.get("block_configs")) is None:
            return int(self.config["num_key_value_heads"])
        # The layers of Llama-Nemotron have different numbers of them.
        group = blocks[int(gguf_name.split(".")[1])]["attention"]["n_heads_in_group"]
        return self.config["num_attention_heads"] // group if group else 0
