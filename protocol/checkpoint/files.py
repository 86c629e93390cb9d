"""List the files of a checkpoint that processes read at each start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..errors import CheckpointError
from .config_fields import ConfigFields

_SPLIT_GGUF: Final = re.compile(r"(.*)-\d{5}-of-(\d{5})\.gguf")
SOURCE_TOKENIZER: Final = "source_tokenizer.json"
"""The tokenizer of sources of an encoder-decoder model, if another one than that of its answers."""

_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    SOURCE_TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    "chat_template.jinja",
)


def find_weight_files(path: Path) -> list[Path]:
    """Return the files that a worker reads from the checkpoint at `path`, a directory or a `.gguf` file."""
    if path.is_dir():
        names = [path / "config.json", *path.glob("*.safetensors*")]
        return sorted(name for name in names if name.is_file())
    if split := _SPLIT_GGUF.fullmatch(path.name):
        return sorted(path.parent.glob(f"{split[1]}-*-of-{split[2]}.gguf"))
    return [path]


def find_tensor(path: Path, name: str) -> Path:
    """Return the safetensors file with a tensor of the checkpoint in the directory `path`.

    Raises:
        CheckpointError: There is no such file.
    """
    index = ConfigFields.read_if_present(path / "model.safetensors.index.json")
    file = path / index.first_section("weight_map").text(name, "model.safetensors")
    if not file.is_file():
        raise CheckpointError(file, "is missing; download it")
    return file


def find_tokenizer_files(directory: Path) -> list[Path]:
    """Return the tokenizer and chat-template files in a directory, which frontends and cores read."""
    names = [directory / name for name in _TOKENIZER_FILES]
    names += directory.glob("additional_chat_templates/*.jinja")
    return sorted(name for name in names if name.is_file())
