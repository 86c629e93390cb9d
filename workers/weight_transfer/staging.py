"""A checkpoint that is built from received tensors and the files of the current weights."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from ...protocol.checkpoint.config_fields import ConfigFields
from ...protocol.checkpoint.field_names import text_section
from ...protocol.checkpoint.files import find_safetensors, is_in_mistral_format, read_model_config
from ...protocol.weights.transfer import STAGED, ReceiveTensors, TransferError
from ..loaders.stored.safetensors_file import SafetensorsFile
from ..loaders.tensor_names import EMBEDDING, HEAD
from .group import TrainerGroup

_DTYPES: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""Types of tensors that a trainer can send -> their names in safetensors."""

_ALIGNMENT: Final = 8


class StagedWeights:
    """The checkpoint of one update, in a directory of its own within the run directory.

    Each call of `receive` writes one file, directly from the network into its memory map. `finish` adds links to the
    files of the current weights, for tensors that the trainer did not send.
    """

    def __init__(self, run_dir: Path, current: Path) -> None:
        self._current = current
        if not current.is_dir():
            raise TransferError(
                f"the served weights are quantized in a GGUF file, {current.name}; serve a directory with safetensors"
            )
        stem = "consolidated" if is_in_mistral_format(current) else "model"
        self._index, self._stem = f"{stem}.safetensors.index.json", stem
        self._known = _find_tensors(current, self._index)
        self._files: dict[str, str] = {}
        fields = read_model_config(current)
        fields = text_section(fields) or fields
        self._is_tied = fields.get("tie_word_embeddings") is not False
        self._path = run_dir / f"{STAGED}{secrets.token_hex(4)}"
        self._path.mkdir()
        self.version = ""

    def receive(self, group: TrainerGroup, command: ReceiveTensors, chunk_bytes: int) -> None:
        """Receive the announced tensors into a new file.

        Raises:
            TransferError: A tensor is not one of the model's, or the trainer did not send it.
        """
        sizes = self._check(command)
        path = self._path / f"{self._stem}-received-{len({*self._files.values()}):05}.safetensors"
        header = _header(command, sizes)
        try:
            with path.open("wb") as file:
                file.write(header)
                # Without space on the disk, writing into the memory map would end this process.
                os.posix_fallocate(file.fileno(), 0, len(header) + sum(sizes))
            memory = torch.from_file(
                str(path), shared=True, size=len(header) + sum(sizes), dtype=torch.uint8
            )
            begin = len(header)
            for size in _broadcasts(sizes, math.inf if command.is_flat else chunk_bytes):
                group.receive(memory[begin : begin + size])
                begin += size
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransferError(f"{path} cannot be written: {error.strerror}") from None
        except TransferError:
            path.unlink(missing_ok=True)
            raise
        self._files |= dict.fromkeys(command.names, path.name)
        self.version = command.version or self.version

    def finish(self) -> Path:
        """Complete the checkpoint and return its path.

        Raises:
            TransferError: There are no tensors.
        """
        if not self._files:
            raise TransferError("no tensors were received")
        weight_map = {name: self._files[name] for name in self._known if name in self._files}
        for name, shard in self._known.items():
            if name not in weight_map:
                weight_map[name] = f"{self._stem}-kept-{shard.path.stem}.safetensors"
                _link(shard.path, self._path / weight_map[name])
        for file in self._current.iterdir():
            if file.is_file() and ".safetensors" not in file.name:
                _link(file, self._path / file.name)
        index = {"metadata": {}, "weight_map": weight_map}
        (self._path / self._index).write_text(json.dumps(index))
        return self._path

    def _check(self, command: ReceiveTensors) -> list[int]:
        """Return the size of each announced tensor in bytes, or raise TransferError."""
        lengths = {len(command.names), len(command.dtypes), len(command.shapes)}
        if len(lengths) > 1:
            raise TransferError(
                f"the names, types and shapes differ in number: {sorted(lengths)}", "names"
            )
        sizes: list[int] = []
        seen = set(self._files)
        for name, dtype, shape in zip(command.names, command.dtypes, command.shapes, strict=True):
            if name in seen:
                raise TransferError(f"{name!r} was sent before in this update", "names")
            seen.add(name)
            stored = self._find_stored(name)
            if stored is None:
                raise TransferError(f"there is no tensor {name!r} in {self._current.name}", "names")
            shard = self._known[stored]
            if (kept := shard.dtype(stored)) not in _DTYPES.values():
                raise TransferError(
                    f"{name!r} is quantized or not of floats: its type is {kept} in {shard.path.name}",
                    "names",
                )
            if dtype not in _DTYPES:
                raise TransferError(
                    f"{name!r} has the type {dtype!r}; send {', '.join(_DTYPES)}", "dtypes"
                )
            if tuple(shape) != shard.shape(stored):
                raise TransferError(
                    f"{name!r} has the shape {shape}, and {[*shard.shape(stored)]} in {shard.path.name}",
                    "shapes",
                )
            sizes.append(math.prod(shape) * getattr(torch, dtype).itemsize)
        return sizes

    def _find_stored(self, name: str) -> str | None:
        """Return the stored tensor of that name. A tied output projection, which is not stored, is the embedding."""
        if name in self._known:
            return name
        if self._is_tied and name.endswith(HEAD):
            return next((each for each in self._known if each.endswith(EMBEDDING)), None)
        return None


def _find_tensors(path: Path, index: str) -> dict[str, SafetensorsFile]:
    """Return the file with each tensor of a checkpoint."""
    named = ConfigFields.read_if_present(path / index).first_section("weight_map").config
    found: dict[str, SafetensorsFile] = {}
    for file in find_safetensors(path):
        if file.suffix == ".safetensors":
            shard = SafetensorsFile(file)
            found |= {
                name: shard for name in shard.names if named.get(name, file.name) == file.name
            }
    return found


def _header(command: ReceiveTensors, sizes: list[int]) -> bytes:
    """Return the header of a safetensors file with the announced tensors."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape, size in zip(
        command.names, command.dtypes, command.shapes, sizes, strict=True
    ):
        fields[name] = {
            "dtype": _DTYPES[dtype],
            "shape": shape,
            "data_offsets": [begin, begin + size],
        }
        begin += size
    text = json.dumps(fields).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _broadcasts(sizes: list[int], chunk_bytes: float) -> Iterator[int]:
    """Yield the size of each broadcast, which ends with the tensor that makes it larger than `chunk_bytes`."""
    total = 0
    for size in sizes:
        total += size
        if total > chunk_bytes:
            yield total
            total = 0
    if total:
        yield total


def _link(source: Path, target: Path) -> None:
    """Let a file exist in the new checkpoint, also after the directory of the old one is deleted."""
    if target.exists():
        return
    try:
        os.link(source.resolve(), target)
    except OSError:
        target.symlink_to(source.resolve())
