"""GGUF tokenizers on disk: each is converted once to the files of a Hugging Face directory."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import msgspec

from ...protocol.errors import CheckpointError
from ...protocol.gguf import GGUFFile
from ..cache_directory import cache_directory
from .gguf_convert import convert

FORMAT_VERSION = 2
"""Raise it when `convert` changes what it makes, so that older conversions are not used."""

_HASHED_BYTES = 64 * 1024


def converted_directory(path: Path) -> Path:
    """A directory with the tokenizer.json and tokenizer_config.json of the GGUF file `path`."""
    directory = cache_directory("tokenizers") / _key(path)
    if directory.is_dir():
        return directory
    tokenizer, config = convert(path, GGUFFile(path).metadata)
    try:
        _publish(
            directory,
            {
                "tokenizer.json": msgspec.json.encode(tokenizer),
                "tokenizer_config.json": msgspec.json.encode(config),
            },
        )
    except OSError as error:
        raise CheckpointError(
            directory,
            f"cannot write the tokenizer of {path.name} ({error.strerror}); "
            "set ENGINE_CACHE to a directory that can be written",
        ) from error
    return directory


def _key(path: Path) -> str:
    """Names the conversion of `path` as it is now. Reading the whole file would take seconds."""
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            head = file.read(_HASHED_BYTES)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    identity = f"{FORMAT_VERSION} {stat.st_size} {stat.st_mtime_ns} ".encode()
    return hashlib.sha256(identity + head).hexdigest()[:32]


def _publish(directory: Path, files: dict[str, bytes]) -> None:
    """Make `directory` appear whole or not at all; another process may be doing the same."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
