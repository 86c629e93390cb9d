"""Tell the contents of large checkpoint files apart, without reading them completely."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from ..errors import CheckpointError

HEAD_BYTES: Final = 1 << 20
"""Bytes at the beginning of a file that are hashed completely."""
SAMPLE_BYTES: Final = 4096
"""Size in bytes of each sample. Hashing whole files would take seconds per gigabyte."""
SAMPLES_PER_FILE: Final = 1024
SAMPLES_PER_TENSOR: Final = 4
"""Samples of each tensor, also of small ones: a revision may differ in norms or biases only."""

_MAX_HEADER_BYTES: Final = 100_000_000


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] = (0, 0)


def hash_content(path: Path) -> bytes:
    """Return a hash of a file's size and head, and of evenly spread samples of the file and each tensor, 32 bytes.

    Tensors of safetensors and GGUF files are found. Tensors of up to 16 KiB, and files of up to 4 MiB, are hashed
    completely.

    Raises:
        OSError: The file cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        digest.update(size.to_bytes(8, "little"))
        # The names and shapes of the tensors.
        digest.update(os.pread(fd, HEAD_BYTES, 0))
        for offset in _spread(0, size, SAMPLES_PER_FILE):
            digest.update(os.pread(fd, SAMPLE_BYTES, offset))
        for start, end in _find_tensors(path, fd):
            for offset in _spread(start, min(end, size), SAMPLES_PER_TENSOR):
                digest.update(os.pread(fd, min(SAMPLE_BYTES, end - offset), offset))
    return digest.digest()


def _spread(start: int, end: int, count: int) -> range:
    return range(start, end, max(SAMPLE_BYTES, (end - start) // count))


def _find_tensors(path: Path, fd: int) -> Iterator[tuple[int, int]]:
    """Yield where each tensor begins and ends. Files that cannot be understood have none."""
    if path.suffix == ".safetensors":
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        try:
            header = os.pread(fd, min(length, _MAX_HEADER_BYTES), 8)
            tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
        except msgspec.MsgspecError:
            return
        for tensor in tensors.values():
            start, end = tensor.data_offsets
            yield 8 + length + max(start, 0), 8 + length + end
    elif path.suffix == ".gguf":
        # A late import, because it loads numpy, which commands without a model do not need.
        from .gguf import GGUFFile

        try:
            checkpoint = GGUFFile(path)
        except CheckpointError:
            return
        for found in checkpoint.tensors.values():
            if checkpoint.paths[found.file_index] == path:
                yield found.offset, found.offset + found.n_bytes
