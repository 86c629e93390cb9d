"""Read Hugging Face model directories: ``config.json`` and safetensors, in one file or many."""

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec.structs import replace

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.field_names import text_section
from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint, Floats, part_of
from .quantization.matrix import QuantizedMatrix
from .quantized_modules import QuantizedModules
from .safetensors_file import SafetensorsFile
from .tensor_names import TensorNames, translate_names

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Matches a tensor that contains the matrices, biases or scales of all experts of a layer.
_STACKED = re.compile(
    r"(?P<block>.*\.(?:experts|shared_experts(?=\.\w+_proj$)|moe(?=\.(?:gate|up|down)_proj)|block_sparse_moe(?=\.(?:in|out)put_linear)))\."
    r"(?P<module>gate_up_proj|gate_proj|up_proj|down_proj|input_linear|output_linear|fc[12])"
    r"(?:[._](?P<tensor>[a-z_]+))?"
)
# Matches a tensor that has the matrices of all experts of a DBRX layer one below the other.
_STACKED_ROWS = re.compile(r"(?P<block>.*\.experts)\.mlp\.(?P<module>w1|v1|w2)")
_MODULES_OF_ROWS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
# Files that may be next to a model but are not its weights: Mistral's own format of them, and LoRA adapters.
_NOT_THE_MODEL = ("consolidated", "adapter_")
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})


class _Stacking(msgspec.Struct, frozen=True):
    """The layout in which a family stacks the matrices of its experts in one tensor.

    If `is_transposed`, matrices are stored as [inputs, outputs], unless they are quantized. If `is_interleaved`, the
    rows of gate and up projections alternate. Some families have files in both orders. For these, `hidden_size`
    decides: a matrix with that size where [outputs, inputs] would have it is not transposed. If `num_experts` is not 0,
    a tensor has the matrices of that many experts one below the other, those of the last product transposed. The rules
    are for names that `names` have translated.
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    hidden_size: int | None = None
    num_experts: int = 0
    names: TensorNames = ()

    def transposes(self, module: str, shape: Sequence[int]) -> bool:
        """Return whether the matrices of a module, stacked with this shape, are stored as [inputs, outputs]."""
        if not self.is_transposed or self.hidden_size is None:
            return self.is_transposed
        first, last = shape[1], shape[-1]
        has_order = (last, first) if module == "down_proj" else (first, last)
        return has_order[0] == self.hidden_size or has_order[1] != self.hidden_size


_INKLING = _Stacking(
    is_interleaved=True,
    names=(
        (r"\.(shared_)?w13_weight$", ".gate_up_proj"),
        (r"\.(shared_)?w2_weight$", ".down_proj"),
        (r"\.w13_dn\.weight$", ".gate_up_proj.weight"),
    ),
)
_STACKINGS = {
    "aria": _Stacking(is_transposed=True),
    "aria_text": _Stacking(is_transposed=True),
    **dict.fromkeys(("inkling_mm_model", "inkling2", "inkling2_text"), _INKLING),
    "gpt_oss": _Stacking(is_transposed=True, is_interleaved=True),
    "llama4": _Stacking(is_transposed=True),
    "llama4_text": _Stacking(is_transposed=True),
    "qwen3_vl_moe": _Stacking(is_transposed=True),
    "qwen3_vl_moe_text": _Stacking(is_transposed=True),
}
_JOINED = (
    (re.compile(r"model\.transformer\.wte\.embedding"), "model.transformer.wte.new_embedding"),
    (re.compile(r"(.*)\.v_proj_current\.(\w+)"), r"\1.v_proj_delayed.\2"),
)
"""Names of tensors whose rows are followed by those of another tensor, and its name (Molmo 2, ZAYA1)."""


class _StoredTensor(msgspec.Struct, frozen=True):
    """The tensor `name` of a file, or one expert's part of it.

    The part consists of every `step`-th row, starting with row `first`. If `num_rows` is not 0, the experts' parts have
    that many rows and follow each other in one matrix.
    """

    file: SafetensorsFile
    name: str
    expert: int | None = None
    is_transposed: bool = False
    first: int = 0
    step: int = 1
    num_rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, or of the expert's part."""
        shape = self.file.shape(self.name)
        if self.expert is None:
            return shape if self.step == 1 else (shape[0] // self.step, *shape[1:])
        if self.num_rows:
            shape = (0, self.num_rows, *shape[1:])
        num_rows, *rest = reversed(shape[1:]) if self.is_transposed else shape[1:]
        return num_rows // self.step, *rest

    def part(self, parts: Sequence[range | None]) -> torch.Tensor:
        """Read these ranges of the dimensions, without a copy if they are contiguous in the file."""
        if not self.file.shape(self.name):
            scalar: torch.Tensor = self.file.in_torch.get_tensor(self.name)
            return scalar
        found: torch.Tensor = self._select(self.file.in_torch.get_slice(self.name), parts)
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


class _JoinedTensor(msgspec.Struct, frozen=True):
    """Two tensors of files that are read as one tensor, which has the rows of the first before those of the second."""

    first: _StoredTensor
    second: _StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of both tensors together."""
        rows, *rest = self.first.shape
        return rows + self.second.shape[0], *rest

    def part(self, parts: Sequence[range | None]) -> torch.Tensor:
        """Read these ranges of the dimensions."""
        return torch.cat([tensor.part(own) for tensor, own in self._split(parts)])

    def floats(self, parts: Sequence[range | None]) -> Floats | None:
        """Return these ranges of the dimensions, or None if they are not stored as plain floats of one type."""
        found = [tensor.floats(own) for tensor, own in self._split(parts)]
        first, second = found
        if first is None or second is None or first.dtype != second.dtype:
            return None
        return replace(first, values=np.concatenate((first.values, second.values)))

    def _split(
        self, parts: Sequence[range | None]
    ) -> list[tuple[_StoredTensor, list[range | None]]]:
        """Return the ranges of each of the tensors."""
        rows, *rest = parts or (None,)
        split, (total, *_) = self.first.shape[0], self.shape
        rows = range(total) if rows is None else rows
        own = range(min(rows.start, split), min(rows.stop, split))
        other = range(max(rows.start - split, 0), max(rows.stop - split, 0))
        return [(self.first, [own, *rest]), (self.second, [other, *rest])]


class HFCheckpoint(Checkpoint):
    """A directory with ``config.json`` and safetensors files.

    The matrix of a quantized module is read as the module's tensor ``weight``, even if several tensors store it. A
    tensor that stacks the tensors of all experts, such as ``experts.down_proj``, is read as one tensor per expert, such
    as ``experts.3.down_proj.weight``.
    """

    def __init__(self, path: Path) -> None:
        config = ConfigFields.read(path / "config.json")
        super().__init__(path, config)
        self._stored: dict[str, _StoredTensor | _JoinedTensor] = {}
        expected = _expected_shards(path)
        seen: set[str] = set()
        model_type, text = str(config.get("model_type")), text_section(config) or config
        kinds = (model_type, str(text.get("model_type")))
        stacking = next((_STACKINGS[kind] for kind in kinds if kind in _STACKINGS), _Stacking())
        if model_type.startswith("qwen3_vl_moe"):
            stacking = replace(stacking, hidden_size=text.integer("hidden_size"))
        if model_type == "dbrx":
            experts = config.required_section("ffn_config")
            stacking = replace(stacking, num_experts=experts.integer("moe_num_experts", 4))
        for file in dict.fromkeys(expected.values()) if expected else _weight_files(path):
            shard = SafetensorsFile(file)
            for name in shard.names:
                if name in seen:
                    raise CheckpointError(file, f"tensor {name!r} is also in another file")
                seen.add(name)
                self._stored |= _tensors_of(shard, name, stacking)
        for name, file in expected.items():
            if name not in seen:
                raise CheckpointError(
                    file,
                    f"there is no tensor {name!r}, which {_INDEX} lists in this file; download both",
                )
        for pattern, replacement in _JOINED:
            for match in list(filter(None, map(pattern.fullmatch, self._stored))):
                name, other = match[0], match.expand(replacement)
                first, second = self._stored.get(name), self._stored.get(other)
                if isinstance(first, _StoredTensor) and isinstance(second, _StoredTensor):
                    self._stored[name] = _JoinedTensor(first, second)
                    del self._stored[other]
        self._modules = QuantizedModules.from_config(config, self)

    def names(self) -> Collection[str]:
        """Return the names of all tensors, one per quantized module."""
        return self.stored_names() if self._modules is None else self._modules.names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor or of a quantized module's matrix."""
        if self._modules is not None and name in self._modules:
            return self._modules.shape(name)
        return self.stored_shape(name)

    def quantized(
        self, name: str, *, part: range | None = None, dim: int = 0
    ) -> QuantizedMatrix | None:
        """Read a quantized module's matrix, or return None if it is not quantized."""
        if self._modules is None or name not in self._modules:
            return None
        return self._modules.matrix(name, part_of(self.shape(name), part, dim), dim)

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        part: range | None = None,
        dim: int = 0,
    ) -> torch.Tensor:
        """Read a tensor, or part of a dimension, dequantized."""
        matrix = self.quantized(name, part=part, dim=dim)
        if matrix is not None:
            return matrix.dequantize(dtype or torch.float32)
        stored = self.stored_dtype(name)
        if stored not in _DTYPES:
            raise CheckpointError(
                self.path,
                f"tensor {name!r} is {stored}, which is not supported; use the original weights in a 16-bit "
                "or 32-bit type",
            )
        part = part_of(self.stored_shape(name), part, dim)
        return self.load(name, *(None,) * dim, part, dtype=dtype)

    def floats(self, name: str, *, part: range | None = None, dim: int = 0) -> Floats | None:
        """Return a view of a tensor, or None if it is quantized or not stored as plain floats."""
        if self._modules is not None and name in self._modules:
            return None
        part = part_of(self.stored_shape(name), part, dim)
        found = self._tensor(name).floats((*(None,) * dim, part))
        if found is not None:
            self.bytes_read += found.values.nbytes
        return found

    def stored_names(self) -> Collection[str]:
        """Return the names of the tensors in the files."""
        return self._stored.keys()

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as stored."""
        return self._tensor(name).shape

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor in safetensors' spelling."""
        tensor = self._tensor(name)
        if isinstance(tensor, _JoinedTensor):
            tensor = tensor.first
        return tensor.file.dtype(tensor.name)

    def load(
        self, name: str, *parts: range | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read ranges of a tensor's dimensions, converted to `dtype` if it is given."""
        mapped = self._tensor(name).part(parts)
        self.bytes_read += mapped.nbytes
        return self.place(mapped, dtype or mapped.dtype)

    def _tensor(self, name: str) -> _StoredTensor | _JoinedTensor:
        tensor = self._stored.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor


def _tensors_of(
    file: SafetensorsFile, stored: str, stacking: _Stacking
) -> dict[str, _StoredTensor]:
    """Return the tensor with this name, or each expert's part of a tensor that has all experts."""
    (name,) = translate_names([stored], stacking.names)
    rows_of = _STACKED_ROWS.fullmatch(name) if stacking.num_experts else None
    if rows_of is not None:
        part, count = _MODULES_OF_ROWS[rows_of["module"]], file.shape(stored)[0]
        is_last = part == "down_proj"
        return {
            f"{rows_of['block']}.{i}.{part}.weight": _StoredTensor(
                file, stored, i, is_last, num_rows=count // stacking.num_experts
            )
            for i in range(stacking.num_experts)
        }
    stacked = _STACKED.fullmatch(name)
    if stacked is None and stacking.is_interleaved and name.endswith(".mlp.gate_up_proj.weight"):
        return {
            name.replace("gate_up_proj", part): _StoredTensor(file, stored, first=first, step=2)
            for first, part in enumerate(("gate_proj", "up_proj"))
        }
    if stacked is None:
        return {name: _StoredTensor(file, stored)}
    module, tensor = stacked["module"], stacked["tensor"] or "weight"
    modules = {module: (0, 1)}
    if stacking.is_interleaved and module == "gate_up_proj":
        modules = {"gate_proj": (0, 2), "up_proj": (1, 2)}
    shape = file.shape(stored)
    is_transposed = tensor == "weight" and stacking.transposes(module, shape)
    return {
        f"{stacked['block']}.{i}.{part}.{tensor}": _StoredTensor(
            file, stored, i, is_transposed, *rows
        )
        for i in range(shape[0])
        for part, rows in modules.items()
    }


def _expected_shards(path: Path) -> dict[str, Path]:
    """Return the file name of each tensor according to the index; empty if there is no index."""
    index = path / _INDEX
    if not index.exists():
        return {}
    weight_map = ConfigFields.read(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "there is no 'weight_map'; download it again")
    expected = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(index, f"{file!r} is not the name of a file in this directory")
        expected[name] = path / file
    return expected


def _weight_files(path: Path) -> list[Path]:
    if (path / _SINGLE).exists():
        return [path / _SINGLE]
    files = [
        file
        for file in sorted(path.glob("*.safetensors"))
        if not file.name.startswith(_NOT_THE_MODEL)
    ]
    if files:
        return files
    if pickled := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]:
        raise CheckpointError(
            path,
            f"the weights are pickled ({pickled[0].name}), which is refused because it can run arbitrary "
            "code; convert them to safetensors",
        )
    if gguf := sorted(path.glob("*.gguf")):
        raise CheckpointError(
            path, f"the directory has no safetensors files; pass the path of {gguf[0].name}"
        )
    raise CheckpointError(path, "the directory has no safetensors files; download the model again")
