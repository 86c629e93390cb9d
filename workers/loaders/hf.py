"""Hugging Face model directories: ``config.json`` and safetensors, in one file or many."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.errors import CheckpointError
from ..quantization.matrix import QuantizedMatrix
from .checkpoint import Checkpoint, part_of
from .quantized_modules import QuantizedModules

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Files beside a model that are not its weights: Mistral's own layout of them, and LoRA adapters.
_NOT_THE_MODEL = ("consolidated", "adapter_")
_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"})


class HFCheckpoint(Checkpoint):
    """A directory with ``config.json`` and safetensors files.

    A quantized module's matrix is read as the module's tensor ``weight``, even if several tensors store it.
    """

    def __init__(self, path: Path) -> None:
        config = ConfigFields.read(path / "config.json")
        super().__init__(path, config)
        self._shards: dict[str, Any] = {}
        expected = _expected_shards(path)
        for file in dict.fromkeys(expected.values()) if expected else _weight_files(path):
            shard = _open(file)
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                if name in self._shards:
                    raise CheckpointError(file, f"tensor {name!r} is also in another file")
                self._shards[name] = shard
        for name, file in expected.items():
            if name not in self._shards:
                raise CheckpointError(
                    file, f"there is no tensor {name!r}, which {_INDEX} lists here; download both"
                )
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
                f"tensor {name!r} is {stored}, which is not supported; take the original "
                "weights in a 16 or 32-bit type",
            )
        part = part_of(self.stored_shape(name), part, dim)
        return self.load(name, *(None,) * dim, part, dtype=dtype)

    def stored_names(self) -> Collection[str]:
        """Return the names of the tensors in the files."""
        return self._shards.keys()

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor as stored."""
        return tuple(self._view(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor in safetensors' spelling."""
        dtype: str = self._view(name).get_dtype()
        return dtype

    def load(
        self, name: str, *parts: range | None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Read these ranges of a tensor's dimensions, converted to `dtype` if it is given."""
        view = self._view(name)
        if view.get_shape():
            every = slice(None)
            mapped = view[
                tuple(every if p is None else slice(p.start, p.stop) for p in parts or (None,))
            ]
        else:
            mapped = self._shards[name].get_tensor(name)
        self.bytes_read += mapped.nbytes
        return self.place(mapped, dtype or mapped.dtype)

    def _view(self, name: str) -> Any:
        shard = self._shards.get(name)
        if shard is None:
            raise self.missing(name)
        return shard.get_slice(name)


def _expected_shards(path: Path) -> dict[str, Path]:
    """Return the file of each tensor according to the index; empty if there is no index."""
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
            f"the weights are pickled ({pickled[0].name}), which can run any code and is refused; "
            "convert them to safetensors",
        )
    if gguf := sorted(path.glob("*.gguf")):
        raise CheckpointError(
            path, f"no safetensors files here; give the file {gguf[0].name} itself"
        )
    raise CheckpointError(path, "no safetensors files here; download the model again")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(file, "this file of the model is missing; download it") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            file, f"the file is truncated or damaged ({error}); download it again"
        ) from error
