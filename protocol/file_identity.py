"""Detect changes of files that several processes read, and identify LoRA adapters by the content of their files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from .errors import CheckpointError, counted

HEAD_BYTES: Final = 1 << 20
"""Number of bytes at the beginning of a file that are hashed. They contain the header of a safetensors or GGUF file."""

ADAPTER_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
"""The files of an adapter in the format of PEFT."""

_CHUNK_BYTES: Final = 1 << 20

HashContent: TypeAlias = Callable[[Path], bytes]
"""A function that returns a hash of samples of a file. It raises OSError if the file cannot be read."""


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Size in bytes, modification time, and hash of the first `HEAD_BYTES` bytes of a file.

    `content` is a hash of samples of the whole file (`checkpoint/content_hash.py`). `modified_ns` is 0 if any
    modification time is accepted, because the file is a copy on another machine.
    """

    path: str
    size: int
    modified_ns: int
    head_sha256: bytes
    content: bytes


def identify_files(
    paths: Iterable[str | PathLike[str]], hash_content: HashContent
) -> tuple[FileIdentity, ...]:
    """Return the current identities of files. Raise CheckpointError if a file cannot be read."""
    return tuple(_identify(Path(path), hash_content) for path in paths)


def identify_copies(
    paths: Sequence[str | PathLike[str]],
    originals: Sequence[FileIdentity],
    hash_content: HashContent,
) -> tuple[FileIdentity, ...]:
    """Return the current identities of files, which must be copies of `originals` in the same order.

    Raises:
        CheckpointError: A file cannot be read, or is not a copy.
    """
    found = identify_files(paths, hash_content)
    for copy, original in zip(found, originals, strict=False):
        if (copy.size, copy.content) != (original.size, original.content):
            raise CheckpointError(
                copy.path,
                f"differs from {original.path} on node 0; copy the model from there",
            )
    if len(found) != len(originals):
        raise CheckpointError(
            paths[0] if paths else "the model",
            f"the model has {counted(len(found), 'file')} on this machine and {len(originals)} on node 0; copy it from "
            "node 0",
        )
    return found


def verify_files(files: Iterable[FileIdentity]) -> None:
    """Check that every file is unchanged.

    Raises:
        CheckpointError: A file has changed; the message says how.
    """
    for expected in files:
        found = _identify(Path(expected.path))
        if found.size != expected.size:
            change = f"its size was {expected.size} bytes and is {found.size}"
        elif expected.modified_ns not in (0, found.modified_ns):
            change = "its modification time is new"
        elif found.head_sha256 != expected.head_sha256:
            change = "its first bytes are different"
        else:
            continue
        raise CheckpointError(
            expected.path,
            f"this file changed after the server started ({change}), but running processes use the old "
            "content; restore the file and its modification time, or restart the server to use the new file",
        )


def _identify(path: Path, hash_content: HashContent = lambda path: b"") -> FileIdentity:
    try:
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).digest()
            status = path.stat()
        content = hash_content(path)
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    return FileIdentity(str(path), status.st_size, status.st_mtime_ns, head, content)


class LoraAdapter(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A LoRA adapter: the name that clients use, and the identity of its files.

    `path` is their directory or a GGUF file, and `version` the hash of their content and of `scale`, 32 bytes. A name
    may get another version later; running requests keep the version with which they started. All changes of the model
    are multiplied by `scale`.
    """

    name: str
    path: str
    version: bytes
    scale: float = 1.0

    @property
    def is_gguf(self) -> bool:
        """True if the adapter is a GGUF file, False if it is in the format of PEFT."""
        return self.path.endswith(".gguf")

    @classmethod
    def read(cls, name: str, path: Path) -> LoraAdapter:
        """Read the files in a directory, or a GGUF file, completely, and return the adapter.

        Raises:
            CheckpointError: A file is missing or cannot be read.
        """
        return cls(name, str(path), _hash_files(path))

    def with_scale(self, scale: float) -> LoraAdapter:
        """Return this adapter, whose scale is 1, with another scale."""
        return LoraAdapter(self.name, self.path, _scaled_version(self.version, scale), scale)

    def verify(self) -> None:
        """Check that the files are unchanged. Raise CheckpointError if they are missing, or have changed."""
        if _scaled_version(_hash_files(Path(self.path)), self.scale) != self.version:
            raise CheckpointError(
                self.path,
                f"the files of the LoRA adapter {self.name!r} changed after it was added; restore them, or "
                "add it again",
            )


def _scaled_version(version: bytes, scale: float) -> bytes:
    return version if scale == 1.0 else hashlib.sha256(version + scale.hex().encode()).digest()


def _hash_files(adapter: Path) -> bytes:
    digest = hashlib.sha256(b"engine.lora.v1")
    paths = [adapter / name for name in ADAPTER_FILES]
    for path in [adapter] if adapter.suffix == ".gguf" else paths:
        try:
            with path.open("rb") as file:
                digest.update(path.stat().st_size.to_bytes(8, "little"))
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        except FileNotFoundError:
            raise CheckpointError(
                adapter, f"the LoRA adapter has no {path.name}; save it with PEFT"
            ) from None
        except OSError as error:
            raise CheckpointError(path, f"cannot be read: {error.strerror}") from None
    return digest.digest()
