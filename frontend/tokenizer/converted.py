"""Cache tokenizers in other formats, each of which is converted once to a Hugging Face directory."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import msgspec

from ...protocol.checkpoint.gguf import GGUFFile
from ...protocol.errors import CheckpointError
from ..cache_directory import cache_directories

FORMAT_VERSION = 6
"""Increase this when the output of `convert` changes, so that older conversions are ignored."""

_DIGEST = "sha256"
_HASHED_BYTES = 64 * 1024


def tokenizer_json_path(path: str | PathLike[str]) -> Path:
    """Return the path of the checkpoint's tokenizer.json.

    A tokenizer in another format, such as that of a GGUF file, is converted and cached.

    Raises:
        CheckpointError: There is no tokenizer.json, or the tokenizer cannot be converted.
    """
    path = directory = Path(path)
    if not path.is_dir() or (not (path / "tokenizer.json").is_file() and _other_files(path)):
        directory = converted_directory(path)
    json_path = directory / "tokenizer.json"
    if not json_path.is_file():
        raise CheckpointError(
            directory,
            "there is no tokenizer.json; save one with transformers' "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or use --skip-tokenizer-init and token ids",
        )
    return json_path


def converted_directory(path: Path) -> Path:
    """Return a directory with the converted tokenizer of a GGUF file, or of a directory in another format."""
    key = _key(_other_files(path) or [path])
    for cache in cache_directories("tokenizers"):
        directory = cache / key
        if _is_whole(directory):
            return directory
    # Late imports, because each file is converted once.
    if path.is_dir():
        from .conversion.formats import FORMATS

        converted = next(convert for find, convert in FORMATS if find(path))(path)
    else:
        from .conversion.gguf import convert

        tokenizer, config = convert(path, GGUFFile(path).metadata)
        converted = {"tokenizer.json": tokenizer, "tokenizer_config.json": config}
    try:
        _publish(directory, {name: msgspec.json.encode(x) for name, x in converted.items()})
    except OSError as error:
        raise CheckpointError(
            directory,
            f"cannot write the tokenizer of {path.name} ({error.strerror}); "
            "set ENGINE_CACHE to a writable directory",
        ) from error
    return directory


def _other_files(path: Path) -> list[Path]:
    """Return the files of a tokenizer that is converted; none if `path` is a file or has no such tokenizer."""
    if not path.is_dir():
        return []
    # A late import, because most models have a tokenizer.json or are a GGUF file.
    from .conversion.formats import FORMATS

    return next(filter(None, (find(path) for find, _ in FORMATS)), [])


def _is_whole(directory: Path) -> bool:
    """Return whether the directory is complete. Remove a damaged one, for example after the disk was full."""
    if not directory.is_dir():
        return False
    try:
        digest = (directory / _DIGEST).read_text()
        files = {path.name: path.read_bytes() for path in directory.glob("*.json")}
        if digest == _digest(files):
            return True
    except (OSError, UnicodeDecodeError):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    return False


def _digest(files: dict[str, bytes]) -> str:
    return " ".join(f"{name} {hashlib.sha256(files[name]).hexdigest()}" for name in sorted(files))


def _key(paths: Sequence[Path]) -> str:
    """Return a key for the current versions of the files.

    It is a hash of the files' metadata and their first bytes, because hashing the whole of a model would take seconds.
    """
    key = hashlib.sha256(f"{FORMAT_VERSION} ".encode())
    for path in paths:
        try:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                head = file.read(_HASHED_BYTES)
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
        key.update(f"{stat.st_size} {stat.st_mtime_ns} ".encode() + head)
    return key.hexdigest()[:32]


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
