"""What a file on disk was when the server started, so that a process that reads it later gets the same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Final

import msgspec

from .errors import CheckpointError

HEAD_BYTES: Final = 1 << 20
"""The header of a safetensors or GGUF file begins here; smaller files are hashed as a whole."""


class FileIdentity(msgspec.Struct, frozen=True, array_like=True):
    """Size, time of the last change, and hash of the first `HEAD_BYTES` of a file.

    `modified_ns` 0 stands for any time: that of a copy on another machine says nothing.
    """

    path: str
    size: int
    modified_ns: int
    head_sha256: bytes


def identify_files(paths: Iterable[str | PathLike[str]]) -> tuple[FileIdentity, ...]:
    """Return what these files are now. Raises CheckpointError for one that cannot be read."""
    return tuple(_identify(Path(path)) for path in paths)


def identify_copies(
    paths: Sequence[str | PathLike[str]], originals: Sequence[FileIdentity]
) -> tuple[FileIdentity, ...]:
    """Return what these files are now. Raises CheckpointError unless they are copies of others, in the same order."""
    found = identify_files(paths)
    for copy, original in zip(found, originals, strict=False):
        if (copy.size, copy.head_sha256) != (original.size, original.head_sha256):
            raise CheckpointError(
                copy.path,
                f"this is no copy of {original.path} on node 0; copy the model from there",
            )
    if len(found) != len(originals):
        raise CheckpointError(
            paths[0] if paths else "the model",
            f"{len(found)} files of the model are here and {len(originals)} on node 0; copy it from there",
        )
    return found


def verify_files(files: Iterable[FileIdentity]) -> None:
    """Raise CheckpointError, with what has changed, unless every file is what it was."""
    for expected in files:
        found = _identify(Path(expected.path))
        if found.size != expected.size:
            change = f"it has {found.size} bytes and had {expected.size}"
        elif expected.modified_ns not in (0, found.modified_ns):
            change = "it was written again"
        elif found.head_sha256 != expected.head_sha256:
            change = "its beginning is another"
        else:
            continue
        raise CheckpointError(
            expected.path,
            f"this file changed after the server started ({change}), and what runs has the former content; put that "
            "back with its time, or restart the server to serve the new one",
        )


def _identify(path: Path) -> FileIdentity:
    try:
        with path.open("rb") as file:
            head = hashlib.sha256(file.read(HEAD_BYTES)).digest()
            status = path.stat()
    except OSError as error:
        raise CheckpointError(path, f"cannot be read: {error.strerror}") from error
    return FileIdentity(str(path), status.st_size, status.st_mtime_ns, head)
