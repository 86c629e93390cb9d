"""Files with the outputs of an encoder, in a directory that several servers share."""

from __future__ import annotations

import contextlib
import os
import tempfile
import zlib
from pathlib import Path
from typing import Final

import msgspec
import torch

from ...kv_transfer.disk.directory import SEALED_SUFFIX, SharedDirectory

_DTYPES: Final = ("torch.float32", "torch.float16", "torch.bfloat16")


class _Head(msgspec.Struct, array_like=True):
    """The beginning of a file: shape of the outputs, the CRC-32 of their bytes, which follow, and the dtype.

    The text is last, because zeros fill the rest of the beginning, and a number may end in one.
    """

    num_rows: int
    size: int
    checksum: int
    dtype: str


_HEAD_BYTES: Final = 64
_decode = msgspec.msgpack.Decoder(_Head).decode


class OutputFiles:
    """The outputs of encoders with one fingerprint: a file for each input.

    All methods may be called from any thread, and wait for the file system.

    Raises:
        OSError: The directory cannot be created.
    """

    def __init__(self, root: Path, limit_bytes: int, fingerprint: bytes) -> None:
        self._directory = SharedDirectory(root, limit_bytes)
        self._path = self._directory.fingerprint_directory(fingerprint)

    def read(self, name: str) -> torch.Tensor | None:
        """Return the outputs [rows, D] of an input. If they are missing or damaged, return None.

        A damaged file is deleted.

        Raises:
            OSError: The file system failed.
        """
        path = self._path / (name + SEALED_SUFFIX)
        try:
            content = bytearray(path.read_bytes())
        except FileNotFoundError:
            return None
        outputs = _unpack(content)
        if outputs is None:
            path.unlink(missing_ok=True)
            return None
        # The least recently used files are deleted first.
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
        return outputs

    def write(self, name: str, outputs: torch.Tensor) -> None:
        """Store the outputs [rows, D] of an input, if there is room for them and no file of another process.

        Raises:
            OSError: The file system failed.
        """
        path = self._path / (name + SEALED_SUFFIX)
        if path.exists():
            return
        content = _pack(outputs)
        with self._directory.making_room(len(content)) as has_room:
            if not has_room:
                return
            # Readers see the whole file, or none.
            with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
                try:
                    file.write(content)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise


def _pack(outputs: torch.Tensor) -> bytes:
    data = outputs.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    rows, size = outputs.shape
    head = _Head(rows, size, zlib.crc32(data), str(outputs.dtype))
    return msgspec.msgpack.encode(head).ljust(_HEAD_BYTES, b"\0") + data


def _unpack(content: bytearray) -> torch.Tensor | None:
    """Return the outputs in a file's content, or None if it is damaged."""
    data = memoryview(content)[_HEAD_BYTES:]
    try:
        head = _decode(bytes(content[:_HEAD_BYTES]).rstrip(b"\0"))
    except msgspec.MsgspecError:
        return None
    if head.dtype not in _DTYPES:
        return None
    dtype: torch.dtype = getattr(torch, head.dtype.removeprefix("torch."))
    if len(data) != head.num_rows * head.size * dtype.itemsize:
        return None
    if not len(data) or zlib.crc32(data) != head.checksum:
        return None
    return torch.frombuffer(data, dtype=dtype).view(head.num_rows, head.size)
