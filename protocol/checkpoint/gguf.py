"""A memory-mapped reader of GGUF files (versions 2 and 3, little-endian, split or whole).

Opening a file takes one pass over its header. Arrays of strings, mainly the vocabulary, are decoded when they are first
accessed. Tensor data is not read.
"""

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
_PIECE_BYTES = 1 << 16
"""Bytes of an array of strings in which lengths are found together; the arrays of a piece fit in a core's cache."""
_SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_DAMAGED = "the file is truncated or damaged; download it again"


class GGMLQuantizationType(IntEnum):
    """The element types of GGUF tensors, by their numbers in the file format."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    I2_S = 36
    """The ternary type of bitnet.cpp, which is not part of ggml."""
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


_T = GGMLQuantizationType

BLOCK_SIZES: Mapping[GGMLQuantizationType, tuple[int, int]] = {
    _T.F32: (1, 4),
    _T.F16: (1, 2),
    _T.Q4_0: (32, 18),
    _T.Q4_1: (32, 20),
    _T.Q5_0: (32, 22),
    _T.Q5_1: (32, 24),
    _T.Q8_0: (32, 34),
    _T.Q8_1: (32, 40),
    _T.Q2_K: (256, 84),
    _T.Q3_K: (256, 110),
    _T.Q4_K: (256, 144),
    _T.Q5_K: (256, 176),
    _T.Q6_K: (256, 210),
    _T.Q8_K: (256, 292),
    _T.IQ2_XXS: (256, 66),
    _T.IQ2_XS: (256, 74),
    _T.IQ3_XXS: (256, 98),
    _T.IQ1_S: (256, 50),
    _T.IQ4_NL: (32, 18),
    _T.IQ3_S: (256, 110),
    _T.IQ2_S: (256, 82),
    _T.IQ4_XS: (256, 136),
    _T.I8: (1, 1),
    _T.I16: (1, 2),
    _T.I32: (1, 4),
    _T.I64: (1, 8),
    _T.F64: (1, 8),
    _T.IQ1_M: (256, 56),
    _T.BF16: (1, 2),
    _T.TQ1_0: (256, 54),
    _T.TQ2_0: (256, 66),
    _T.I2_S: (128, 36),
    _T.MXFP4: (32, 17),
    _T.NVFP4: (64, 36),
    _T.Q1_0: (128, 18),
    _T.Q2_0: (64, 18),
}
"""For each type, (elements per block, bytes per block). Blocks run along a tensor's last dimension.

A block of I2_S is 32 bytes in a file, where the scale of the whole tensor follows its blocks, with padding to 32 bytes.
`GGUFFile.rows` appends it to each block.
"""


_SCALE_BYTES = 32
"""The bytes of the scale after the blocks of an I2_S tensor, with padding."""


class _ValueType(IntEnum):
    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_SCALAR_DTYPES: Mapping[_ValueType, np.dtype[Any]] = {
    _ValueType.UINT8: np.dtype("u1"),
    _ValueType.INT8: np.dtype("i1"),
    _ValueType.UINT16: np.dtype("<u2"),
    _ValueType.INT16: np.dtype("<i2"),
    _ValueType.UINT32: np.dtype("<u4"),
    _ValueType.INT32: np.dtype("<i4"),
    _ValueType.FLOAT32: np.dtype("<f4"),
    _ValueType.BOOL: np.dtype("?"),
    _ValueType.UINT64: np.dtype("<u8"),
    _ValueType.INT64: np.dtype("<i8"),
    _ValueType.FLOAT64: np.dtype("<f8"),
}

_u32 = struct.Struct("<I").unpack_from
_u64 = struct.Struct("<Q").unpack_from


class GGUFTensor(msgspec.Struct, frozen=True):
    """The type, shape and location of one tensor. ``shape`` is in torch order, the reverse of GGUF's own."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int
    """Offset of the first byte from the start of the file."""
    n_bytes: int
    file_index: int = 0
    """Index of the file that contains the tensor, if the checkpoint is split."""


class _UndecodedStrings(msgspec.Struct, frozen=True):
    """An array of strings. ``starts`` has the position of the length of each, and of the end of the last."""

    buffer: mmap.mmap
    starts: npt.NDArray[np.int64]

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    def decode(self) -> list[str]:
        return self._decode(self.starts[:-1], self.starts[1:])

    def select(self, indices: Sequence[int]) -> list[str]:
        """Return the strings at some indices, without decoding the others."""
        selected = np.array(indices, np.int64)
        return self._decode(self.starts[selected], self.starts[selected + 1])

    def _decode(self, starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> list[str]:
        buffer, pairs = self.buffer, zip((starts + 8).tolist(), ends.tolist(), strict=True)
        return [buffer[start:end].decode(errors="replace") for start, end in pairs]


def _find_strings(buffer: mmap.mmap, position: int, count: int) -> npt.NDArray[np.int64]:
    """Return where each of ``count`` strings and the last one's end are. An end outside the buffer is the last value.

    A length below 256 is a byte before seven zeros, which text has not. All of them in a piece of the buffer are found
    together, and each is checked: it must be where the string before ends. Other strings are stepped over.
    """
    found = [np.array([position])]
    num_steps = 1
    while count and position + 8 <= len(buffer):
        size = min(len(buffer) - position, _PIECE_BYTES, 32 * count + 8)
        piece = np.frombuffer(buffer, np.uint8, size, position)
        is_zero = piece == 0
        two = is_zero[1:-1] & is_zero[2:]
        four = two[:-2] & two[2:]
        lengths_at = np.flatnonzero(four[:-3] & four[3:])
        ends = lengths_at + 8 + piece[lengths_at]
        is_right = np.append(lengths_at[:1] == 0, lengths_at[1:] == ends[:-1])
        num_right = len(ends) if is_right.all() else int(is_right.argmin())
        needs_steps = num_right < max(len(ends), 1)
        ends = ends[: min(num_right, count)] + position
        # The number of steps doubles each time, so that few pieces are read if many strings are of another kind.
        steps: list[int] = []
        end = int(ends[-1]) if len(ends) else position
        for _ in range(min(num_steps * needs_steps, count - len(ends))):
            if end + 8 > len(buffer):
                break
            end = min(end + 8 + _u64(buffer, end)[0], len(buffer) + 1)
            steps.append(end)
        num_steps <<= needs_steps
        found += ends, np.array(steps, np.int64)
        position, count = end, count - len(ends) - len(steps)
    return np.concatenate(found)


class GGUFMetadata(Mapping[str, Any]):
    """The key-value pairs of a file. Values are Python scalars and strings, ``list[str]``, or numpy arrays."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _UndecodedStrings):
            value = self._values[key] = value.decode()
        return value

    def count_strings(self, key: str) -> int:
        """Return the length of an array of strings; 0 if the value of the key is none."""
        value = self._values.get(key)
        if isinstance(value, _UndecodedStrings):
            return value.count
        return len(value) if isinstance(value, list) else 0

    def select_strings(self, key: str, indices: Sequence[int]) -> list[str]:
        """Return elements of an array of strings, by ascending indices, without decoding the others."""
        value = self._values[key]
        if isinstance(value, _UndecodedStrings):
            return value.select(indices)
        return [value[i] for i in indices]

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _HeaderParser:
    """Parses the header of one file. ``position`` is the next unread byte."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.position = 0

    def fail(self, problem: str) -> CheckpointError:
        return CheckpointError(self.path, f"at byte {self.position}: {problem}")

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > len(self.buffer) - self.position:
            raise self.fail(
                f"{what} needs {n_bytes} bytes, but {len(self.buffer) - self.position} are left: "
                f"{_DAMAGED}"
            )

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _u32(self.buffer, self.position)
        self.position += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _u64(self.buffer, self.position)
        self.position += 8
        return int(value)

    def string(self, what: str) -> str:
        length = self.u64(what)
        self.need(length, what)
        self.position += length
        return self.buffer[self.position - length : self.position].decode(errors="replace")

    def numbers(self, dtype: np.dtype[Any], count: int, what: str) -> npt.NDArray[Any]:
        n_bytes = dtype.itemsize * count
        self.need(n_bytes, what)
        self.position += n_bytes
        raw = self.buffer[self.position - n_bytes : self.position]
        return np.frombuffer(raw, dtype)

    def strings(self, count: int, what: str) -> _UndecodedStrings:
        self.need(8 * count, what)
        starts = _find_strings(self.buffer, self.position, count)
        if len(starts) <= count:
            self.need(len(self.buffer), what)
        self.need(int(starts[-1]) - self.position, what)
        self.position = int(starts[-1])
        return _UndecodedStrings(self.buffer, starts)

    def value_type(self, what: str) -> _ValueType:
        number = self.u32(what)
        try:
            return _ValueType(number)
        except ValueError:
            raise self.fail(f"{what} has the unknown value type {number}: {_DAMAGED}") from None

    def value(self, what: str) -> Any:
        kind = self.value_type(what)
        if kind is _ValueType.STRING:
            return self.string(what)
        if kind is not _ValueType.ARRAY:
            return self.numbers(_SCALAR_DTYPES[kind], 1, what).item()
        kind = self.value_type(what)
        if kind is _ValueType.ARRAY:
            raise self.fail(f"{what} is an array of arrays, which is not supported")
        count = self.u64(what)
        if kind is _ValueType.STRING:
            return self.strings(count, what)
        return self.numbers(_SCALAR_DTYPES[kind], count, what)

    def counts(self) -> tuple[int, int]:
        """Check the magic number and the version. Return the numbers of tensors and of key-value pairs."""
        if self.buffer[:4] != MAGIC:
            raise self.fail(f"not a GGUF file: it starts with {self.buffer[:4]!r}, not {MAGIC!r}")
        self.position = 4
        version = self.u32("the version")
        if version not in VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
                raise self.fail("big-endian GGUF files are not supported")
            raise self.fail(
                f"GGUF version {version} is not supported; supported versions are 2 and 3"
            )
        num_tensors, num_pairs = self.u64("the tensor count"), self.u64("the key-value count")
        for count, entry_bytes, what in ((num_tensors, 24, "tensor"), (num_pairs, 13, "key-value")):
            self.need(count * entry_bytes, f"the table of {count} {what} entries")
        return num_tensors, num_pairs

    def metadata(self, num_pairs: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for i in range(num_pairs):
            key = self.string(f"key {i}")
            if key in values:
                raise self.fail(f"the key {key!r} occurs twice: {_DAMAGED}")
            values[key] = self.value(f"the value of {key!r}")
        return values

    def tensors(self, num_tensors: int, alignment: int, file_index: int) -> list[GGUFTensor]:
        found = []
        for i in range(num_tensors):
            name = self.string(f"the name of tensor {i}")
            what = f"tensor {name!r}"
            num_dims = self.u32(what)
            if num_dims > MAX_DIMS:
                raise self.fail(f"{what} has {num_dims} dimensions; at most {MAX_DIMS} are allowed")
            shape = tuple(self.u64(what) for _ in range(num_dims))[::-1]
            number, offset = self.u32(what), self.u64(what)
            try:
                ggml_type = GGMLQuantizationType(number)
            except ValueError:
                raise self.fail(f"{what} has the unknown type {number}") from None
            block_size, block_bytes = BLOCK_SIZES[ggml_type]
            row_size = math.prod(shape[-1:])
            if row_size % block_size:
                raise self.fail(
                    f"{what} has rows of {row_size} elements, not a multiple of "
                    f"{ggml_type.name}'s block of {block_size}"
                )
            if offset % alignment:
                raise self.fail(f"{what} starts at {offset}, not a multiple of {alignment}")
            n_bytes = math.prod(shape) // block_size * block_bytes
            if ggml_type is GGMLQuantizationType.I2_S:
                if len(shape) != 2:
                    raise self.fail(f"{what} of type I2_S must be a matrix, got the shape {shape}")
                n_bytes = math.prod(shape) // 4 + _SCALE_BYTES
            found.append(GGUFTensor(name, shape, ggml_type, offset, n_bytes, file_index))
        data_start = -(-self.position // alignment) * alignment
        return [self.placed(tensor, data_start) for tensor in found]

    def placed(self, tensor: GGUFTensor, data_start: int) -> GGUFTensor:
        """Return the tensor with its offset counted from the start of the file instead of the tensor data."""
        start = data_start + tensor.offset
        stop = start + tensor.n_bytes
        if stop > len(self.buffer):
            raise CheckpointError(
                self.path,
                f"tensor {tensor.name!r} occupies bytes {start} to {stop}, but the file has only "
                f"{len(self.buffer)}: {_DAMAGED}",
            )
        return replace(tensor, offset=start)


class GGUFFile:
    """An open GGUF checkpoint.

    ``metadata`` holds the key-value pairs, and ``tensors`` the tensors by name. For a split checkpoint
    (``…-00001-of-0000N.gguf``), any of its files may be given. All of them are opened, and the metadata comes from the
    first.

    Raises:
        CheckpointError: A file is missing, damaged, or not a little-endian GGUF file of version 2 or 3.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self.paths = _split_paths(self.path)
        self.tensors: dict[str, GGUFTensor] = {}
        self._buffers: list[mmap.mmap] = []
        for file_index, file_path in enumerate(self.paths):
            buffer = _map(file_path)
            parser = _HeaderParser(file_path, buffer)
            num_tensors, num_pairs = parser.counts()
            values = parser.metadata(num_pairs)
            alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
            if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
                raise CheckpointError(
                    file_path, f"general.alignment is {alignment!r}, not a power of two"
                )
            for tensor in parser.tensors(num_tensors, alignment, file_index):
                if tensor.name in self.tensors:
                    raise CheckpointError(file_path, f"tensor {tensor.name!r} occurs twice")
                self.tensors[tensor.name] = tensor
            if file_index == 0:
                self.metadata = GGUFMetadata(values)
            self._buffers.append(buffer)
        self._check_split()

    def _check_split(self) -> None:
        count = self._split_number("split.count", 0) or 1
        if count != len(self.paths):
            raise CheckpointError(
                self.path,
                f"the checkpoint is split into {count} files, but {len(self.paths)} were found; keep all of "
                "them in one directory under their original names",
            )
        expected = self._split_number("split.tensors.count", len(self.tensors))
        if expected != len(self.tensors):
            raise CheckpointError(
                self.path,
                f"split.tensors.count is {expected}, but there are {len(self.tensors)} tensors",
            )

    def _split_number(self, key: str, default: int) -> int:
        number = self.metadata.get(key, default)
        if not isinstance(number, int):
            raise CheckpointError(self.path, f"{key} is {number!r}, not an integer")
        return number

    def data(self, tensor: GGUFTensor) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes, uint8 ``[n_bytes]``, as a read-only view of the memory map."""
        buffer = self._buffers[tensor.file_index]
        return np.frombuffer(buffer, np.uint8, tensor.n_bytes, tensor.offset)

    def rows(self, tensor: GGUFTensor, part: range) -> npt.NDArray[np.uint8]:
        """Return rows of a tensor, uint8 ``[rows, row bytes]``, of whole blocks; usually a view of the memory map."""
        data = self.data(tensor)
        if tensor.ggml_type is not GGMLQuantizationType.I2_S:
            return data.reshape(tensor.shape[0], -1)[part.start : part.stop]
        codes = data[:-_SCALE_BYTES].reshape(tensor.shape[0], -1, 32)[part.start : part.stop]
        scale = np.broadcast_to(data[len(data) - _SCALE_BYTES :][:4], (*codes.shape[:2], 4))
        return np.concatenate((codes, scale), 2).reshape(len(part), -1)


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                raise CheckpointError(path, "the file is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(path, error.strerror or str(error)) from error


def _split_paths(path: Path) -> list[Path]:
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    names = [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    return [path.with_name(name) for name in names]
