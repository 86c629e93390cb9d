"""Cache GGUF tokenizers, each of which is converted once to the files of a Hugging Face directory."""

import hashlib
import os
import shutil
import tempfile
from os import PathLike
from pathlib import Path

import msgspec

from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.errors import CheckpointError
from ..cache_directory import cache_directory

FORMAT_VERSION = 3
"""Increase this when the output of `convert` changes, so that older conversions are ignored."""

_FILES = ("tokenizer.json", "tokenizer_config.json")
_DIGEST = "sha256"
_HASHED_BYTES = 64 * 1024


def tokenizer_json_path(path: str | PathLike[str]) -> Path:
    """Return the path of the checkpoint's tokenizer.json, which for a GGUF file is converted and cached.

    Raises:
        CheckpointError: There is no tokenizer.json, or the GGUF file cannot be converted.
    """
    path = Path(path)
    directory = path if path.is_dir() else converted_directory(path)
    json_path = directory / "tokenizer.json"
    if not json_path.is_file():
        raise CheckpointError(
            directory,
            "there is no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)",
        )
    return json_path


def converted_directory(path: Path) -> Path:
    """Return a directory with tokenizer.json and tokenizer_config.json for the GGUF file `path`."""
    directory = cache_directory("tokenizers") / _key(path)
    if _is_whole(directory):
        return directory
    # A late import, because each file is converted once.
    from .gguf_convert import convert

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
            "set ENGINE_CACHE to a writable directory",
        ) from error
    return directory


def _is_whole(directory: Path) -> bool:
    """Return whether the directory is complete. Remove a damaged one, for example after the disk was full."""
    if not directory.is_dir():
        return False
    try:
        digest = (directory / _DIGEST).read_text()
        if digest == _digest({name: (directory / name).read_bytes() for name in _FILES}):
            return True
    except (OSError, UnicodeDecodeError):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    return False


def _digest(files: dict[str, bytes]) -> str:
    return " ".join(hashlib.sha256(files[name]).hexdigest() for name in _FILES)


def _key(path: Path) -> str:
    """Return a key for the current version of the file `path`.

    It is a hash of the file's metadata and its first bytes, because hashing the whole file would take seconds.
    """
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            head = file.read(_HASHED_BYTES)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    identity = f"{FORMAT_VERSION} {stat.st_size} {stat.st_mtime_ns} ".encode()
    return hashlib.sha256(identity + head).hexdigest()[:32]


def _publish(directory: Path, files: dict[str, bytes]) -> None:
    """Create `directory` atomically, because another process may be creating it as well."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    try:
        for name, content in files.items():
            (scratch / name).write_bytes(content)
        (scratch / _DIGEST).write_text(_digest(files))
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
