"""Read Hugging Face model directories: ``config.json`` and safetensors, in one file or many."""

import math
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.field_names import text_section
from ...protocol.checkpoint.files import (
    PART_FOLDERS,
    find_language_adapter,
    find_safetensors,
    is_in_mistral_format,
    read_model_config,
)
from ...protocol.checkpoint.pooling.decisions import find_readout
from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint, Floats, part_of
from .quantization.matrix import QuantizedMatrix
from .quantized_modules import QuantizedModules
from .stored.mistral import mistral_tensors
from .stored.safetensors_file import SafetensorsFile
from .stored.tensors import JoinedTensor, StoredTensor
from .tensor_names import TensorNames, translate_names

# Matches a tensor that contains the matrices, biases or scales of all experts of a layer.
_STACKED = re.compile(
    r"(?P<block>.*\.(?:experts|shared_experts(?=\.\w+_proj$)|moe(?=\.(?:gate|up|down)_proj)|(?:block_sparse_moe|mlp)(?=\.(?:in|out)put_linear)))\."
    r"(?P<module>gate_up_proj|gate_proj|up_proj|down_proj|input_linear|output_linear|fc[12])"
    r"(?:[._](?P<tensor>[a-z_]+(?:_2)?))?"
)
# Matches a tensor that has the matrices of all experts of a DBRX layer one below the other.
_STACKED_ROWS = re.compile(r"(?P<block>.*\.experts)\.mlp\.(?P<module>w1|v1|w2)")
_MODULES_OF_ROWS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})


class _Stacking(msgspec.Struct, frozen=True):
    """The layout in which a family stacks the matrices of its experts in one tensor.

    Attributes:
        is_transposed: True if matrices are stored as [inputs, outputs], unless they are quantized.
        is_interleaved: True if the rows of gate and up projections alternate.
        hidden_size: Tells the order of a family that has files in both: a matrix that has this size where
            [outputs, inputs] would have it is not transposed. None if all files have the same order.
        num_experts: The number of experts whose matrices a tensor has one below the other, those of the last product
            transposed; 0 if tensors have a dimension for experts.
        names: Translations of the stored names.
        stacked_names: Further translations, for tensors with three dimensions.
    """

    is_transposed: bool = False
    is_interleaved: bool = False
    hidden_size: int | None = None
    num_experts: int = 0
    names: TensorNames = ()
    stacked_names: TensorNames = ()

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
        (r"\.w13_weight_scale$", ".gate_up_proj_weight_scale"),
        (r"\.w2_weight_scale$", ".down_proj_weight_scale"),
        # Four-bit floats, in the layout of ModelOpt and of compressed-tensors.
        (r"^.*\.w(13|2)_weight\.(input_amax|original_shape|input_global_scale)$", ""),
        (r"_weight\.scale$", "_weight.weight_scale"),
        (r"_weight\.scale2$", "_weight.weight_scale_2"),
        (r"\.w13_weight\.(weight_\w+)$", r".gate_up_proj_\1"),
        (r"\.w2_weight\.(weight_\w+)$", r".down_proj_\1"),
        (r"\.w13_dn\.weight$", ".gate_up_proj.weight"),
    ),
)
_STACKINGS = {
    "aria": _Stacking(is_transposed=True),
    "aria_text": _Stacking(is_transposed=True),
    **dict.fromkeys(("inkling_mm_model", "inkling2", "inkling2_text"), _INKLING),
    **dict.fromkeys(("inkling2_loop", "inkling2_loop_text"), _INKLING),
    **dict.fromkeys(
        ("gpt_oss", "gpt_oss_puzzle"), _Stacking(is_transposed=True, is_interleaved=True)
    ),
    "interns1_pro": _Stacking(is_transposed=True),
    "iquest_q1": _Stacking(
        names=(
            (r"\.experts\.fc$", ".experts.gate_up_proj"),
            (r"\.experts\.proj$", ".experts.down_proj"),
        )
    ),
    "llama4": _Stacking(is_transposed=True),
    "llama4_text": _Stacking(is_transposed=True),
    # The MLPs of the first layers have the same names.
    "moondream": _Stacking(stacked_names=((r"\.mlp\.fc([12])\.", r".mlp.experts.fc\1."),)),
    "openai_privacy_filter": _Stacking(is_transposed=True),
    "qwen3_vl_moe": _Stacking(is_transposed=True),
    "qwen3_vl_moe_text": _Stacking(is_transposed=True),
}
_JOINED = (
    (re.compile(r"model\.transformer\.wte\.embedding"), "model.transformer.wte.new_embedding"),
)
"""Names of tensors whose rows are followed by those of another tensor, and its name (Molmo 2)."""

_RANK_FILE = re.compile(r".*-TP-\d+\.safetensors")
"""Matches a file with one rank's parts of tensors (Grok 2)."""

_DIVIDED_COLUMNS = re.compile(r".*\.(w2|down_proj|o_proj)\.weight")
"""Matches a matrix of which each rank has some columns. Of others, it has some rows."""

_FIRST_SHARD = re.compile(r"(.*)\.shard_0\.(\w+)")


class HFCheckpoint(Checkpoint):
    """A directory with ``config.json`` and safetensors files.

    The matrix of a quantized module is read as the module's tensor ``weight``, even if several tensors store it. A
    tensor that stacks the tensors of all experts, such as ``experts.down_proj``, is read as one tensor per expert, such
    as ``experts.3.down_proj.weight``.
    """

    def __init__(self, path: Path) -> None:
        config, is_mistral = read_model_config(path), is_in_mistral_format(path)
        super().__init__(path, config)
        self._stored: dict[str, StoredTensor | JoinedTensor] = {}
        stem = "consolidated" if is_mistral else "model"
        index = path / f"{stem}.safetensors.index.json"
        ranks = any(_RANK_FILE.fullmatch(file.name) for file in path.glob("*.safetensors"))
        # An index names only one of the files of a tensor that ranks have parts of.
        expected = {} if ranks else _expected_shards(index)
        seen: set[str] = set()
        model_type, text = str(config.get("model_type")), text_section(config) or config
        kinds = (model_type, str(text.get("model_type")))
        stacking = next((_STACKINGS[kind] for kind in kinds if kind in _STACKINGS), _Stacking())
        if model_type.startswith(("interns1_pro", "qwen3_vl_moe")):
            stacking = replace(stacking, hidden_size=text.integer("hidden_size"))
        if model_type == "dbrx":
            experts = config.required_section("ffn_config")
            stacking = replace(stacking, num_experts=experts.integer("moe_num_experts", 4))
        if model_type == "nomic_bert" and config.get("num_experts"):
            stacking = replace(stacking, num_experts=config.integer("num_experts"))
        of_ranks: dict[str, list[StoredTensor]] = {}
        for file in dict.fromkeys(expected.values()) if expected else _weight_files(path, stem):
            shard = SafetensorsFile(file)
            for name in shard.names:
                if expected.get(name, file) != file:
                    # The index names another file for it.
                    continue
                if _RANK_FILE.fullmatch(file.name):
                    seen.add(name)
                    of_ranks.setdefault(name, []).append(StoredTensor(shard, name))
                    continue
                if name in seen:
                    raise CheckpointError(file, f"tensor {name!r} is also in another file")
                seen.add(name)
                if not is_mistral:
                    self._stored |= _tensors_of(shard, name, stacking)
            if is_mistral:
                self._stored |= mistral_tensors(shard, config)
        for own in (find_language_adapter(path, config), find_readout(path, config)):
            if own is None:
                continue
            shard = SafetensorsFile(own)
            self._stored |= {name: StoredTensor(shard, name) for name in shard.names}
        for name, parts in of_ranks.items():
            dim = 1 if _DIVIDED_COLUMNS.fullmatch(name) else 0
            self._stored[name] = JoinedTensor(tuple(parts), dim)
        for name, file in expected.items():
            if name not in seen:
                raise CheckpointError(
                    file,
                    f"there is no tensor {name!r}, which {index.name} lists in this file; download both",
                )
        for pattern, replacement in _JOINED:
            for match in list(filter(None, map(pattern.fullmatch, self._stored))):
                name, other = match[0], match.expand(replacement)
                first, second = self._stored.get(name), self._stored.get(other)
                if isinstance(first, StoredTensor) and isinstance(second, StoredTensor):
                    self._stored[name] = JoinedTensor((first, second))
                    del self._stored[other]
        self._join_shards()
        self._modules = QuantizedModules.from_config(config, self)

    def _join_shards(self) -> None:
        """Let shards of a module's tensor, such as "embedding.shard_0.weight", be read as that tensor."""
        for match in list(filter(None, map(_FIRST_SHARD.fullmatch, self._stored))):
            shards: list[StoredTensor] = []
            while isinstance(
                found := self._stored.pop(f"{match[1]}.shard_{len(shards)}.{match[2]}", None),
                StoredTensor,
            ):
                shards.append(found)
            self._stored[f"{match[1]}.{match[2]}"] = JoinedTensor(tuple(shards))

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
        if isinstance(tensor, JoinedTensor):
            tensor = tensor.tensors[0]
        return tensor.file.dtype(tensor.name)

    def stored_text(self, name: str, about: str) -> str | None:
        """Return the text about something in the header of the file that has a tensor; None without any."""
        tensor = self._tensor(name)
        return None if isinstance(tensor, JoinedTensor) else tensor.file.texts.get(about)

    def load(
        self, name: str, *parts: range | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read ranges of a tensor's dimensions, converted to `dtype` if it is given."""
        mapped = self._tensor(name).part(parts)
        self.bytes_read += mapped.nbytes
        return self.place(mapped, dtype or mapped.dtype)

    def _tensor(self, name: str) -> StoredTensor | JoinedTensor:
        tensor = self._stored.get(name)
        if tensor is None:
            raise self.missing(name)
        return tensor


def _tensors_of(file: SafetensorsFile, stored: str, stacking: _Stacking) -> dict[str, StoredTensor]:
    """Return the tensor with this name, or each expert's part of a tensor that has all experts."""
    is_stack = len(file.shape(stored)) == 3
    names = stacking.names + (stacking.stacked_names if is_stack else ())
    name = next(iter(translate_names([stored], names)), None)
    if name is None:
        return {}
    rows_of = _STACKED_ROWS.fullmatch(name) if stacking.num_experts else None
    if rows_of is not None:
        part, count = _MODULES_OF_ROWS[rows_of["module"]], file.shape(stored)[0]
        is_last = part == "down_proj"
        return {
            f"{rows_of['block']}.{i}.{part}.weight": StoredTensor(
                file, stored, i, is_last, num_rows=count // stacking.num_experts
            )
            for i in range(stacking.num_experts)
        }
    stacked = _STACKED.fullmatch(name)
    if stacked is None and stacking.is_interleaved and name.endswith(".mlp.gate_up_proj.weight"):
        return {
            name.replace("gate_up_proj", part): StoredTensor(file, stored, first=first, step=2)
            for first, part in enumerate(("gate_proj", "up_proj"))
        }
    if stacked is None:
        return {name: StoredTensor(file, stored)}
    module, tensor = stacked["module"], stacked["tensor"] or "weight"
    modules = {module: (0, 1)}
    if stacking.is_interleaved and module == "gate_up_proj":
        modules = {"gate_proj": (0, 2), "up_proj": (1, 2)}
    shape = file.shape(stored)
    if math.prod(shape[1:]) == 1:
        # The matrices of an expert share a number.
        modules = dict.fromkeys(modules, (0, 1))
    is_transposed = tensor == "weight" and stacking.transposes(module, shape)
    return {
        f"{stacked['block']}.{i}.{part}.{tensor}": StoredTensor(
            file, stored, i, is_transposed, *rows
        )
        for i in range(shape[0])
        for part, rows in modules.items()
    }


def _expected_shards(index: Path) -> dict[str, Path]:
    """Return the file name of each tensor according to the index; empty if there is no index."""
    if not index.exists():
        return {}
    weight_map = ConfigFields.read(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(index, "there is no 'weight_map'; download it again")
    expected = {}
    for name, file in weight_map.items():
        folder, _, file_name = str(file).rpartition("/")
        if (
            not isinstance(file, str)
            or Path(file_name).name != file_name
            or folder not in ("", *PART_FOLDERS)
        ):
            raise CheckpointError(index, f"{file!r} is not the name of a file in this directory")
        expected[name] = index.parent / file
    return expected


def _weight_files(path: Path, stem: str) -> list[Path]:
    """Return the files with weights in a directory without an index, whose only file has this stem if it is alone."""
    if (path / f"{stem}.safetensors").exists():
        return [path / f"{stem}.safetensors"]
    if files := [file for file in find_safetensors(path) if file.suffix == ".safetensors"]:
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
