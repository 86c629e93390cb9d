"""Hugging Face model directories: ``config.json`` and safetensors, in one file or many."""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ...protocol.errors import CheckpointError
from .checkpoint import Checkpoint, part_of

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# Other things that live beside a model: Mistral's own layout of the same weights, and LoRA.
_NOT_THE_MODEL = ("consolidated", "adapter_")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class HFCheckpoint(Checkpoint):
    """A directory with ``config.json`` and the weights as safetensors."""

    def __init__(self, path: Path) -> None:
        config = _read_json(path / "config.json", "every model directory has one; download it")
        quantization = config.get("quantization_config") or config.get("compression_config")
        if quantization:
            raise CheckpointError(
                path,
                f"checkpoints quantized with {quantization.get('quant_method', 'an unnamed method')!r} "
                "are not supported; take the original weights, or a GGUF file to run quantized",
            )
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
                    file, f"there is no tensor {name!r}, which {_INDEX} says is here; download both"
                )

    def names(self) -> Collection[str]:
        return self._shards.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._view(name).get_shape())

    def tensor(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        *,
        dim: int = 0,
        start: int | None = None,
        stop: int | None = None,
    ) -> torch.Tensor:
        view = self._view(name)
        stored = _DTYPES.get(view.get_dtype())
        if stored is None:
            raise CheckpointError(
                self.path,
                f"tensor {name!r} is {view.get_dtype()}, which is not supported; take the original "
                "weights in a 16 or 32-bit type",
            )
        shape = tuple(view.get_shape())
        first, last = part_of(shape, dim, start, stop)
        if shape:
            mapped = view[(slice(None),) * dim + (slice(first, last),)]
        else:
            mapped = self._shards[name].get_tensor(name)
        self.bytes_read += mapped.nbytes
        return self.place(mapped, dtype or stored)

    def _view(self, name: str) -> Any:
        shard = self._shards.get(name)
        if shard is None:
            raise self.missing(name)
        return shard.get_slice(name)


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(file, f"{error.strerror}; {remedy}") from error
    except ValueError as error:
        raise CheckpointError(file, f"not valid JSON ({error}); {remedy} again") from error
    if not isinstance(content, dict):
        raise CheckpointError(file, f"not a JSON object; {remedy} again")
    return content


def _expected_shards(path: Path) -> dict[str, Path]:
    """Which file each tensor is in, as the index has it; empty if there is no index."""
    index = path / _INDEX
    if not index.exists():
        return {}
    weight_map = _read_json(index, "download it").get("weight_map")
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
