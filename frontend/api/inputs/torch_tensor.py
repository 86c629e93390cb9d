"""Reads a tensor from the bytes of `torch.save` without executing its pickle.

The format is a zip archive with the pickle `data.pkl` and one file for each storage. Of pickle's operations only those
that describe a single tensor are understood, and none of them calls anything.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from math import prod
from typing import Any, Final, NamedTuple

from ...client.prompt_embeds import DTYPES, Embeddings

MAX_PICKLE_BYTES: Final = 4096
"""Maximum size of the pickle, which is about 200 bytes."""
MAX_FILES: Final = 32
"""Maximum number of files in the archive."""

_STORAGES: Final = {
    "torch FloatStorage": "float32",
    "torch HalfStorage": "float16",
    "torch BFloat16Storage": "bfloat16",
}
_REBUILD: Final = "torch._utils _rebuild_tensor_v2"
_GLOBALS: Final = (_REBUILD, "collections OrderedDict", *_STORAGES)
_CONSTANTS: Final = {"NEWFALSE": False, "NEWTRUE": True, "NONE": None}
_VALUES: Final = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "BINSTRING"}
)
_TUPLES: Final = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class NotATensor(Exception):
    """Raised for bytes that are not one float tensor. The message completes "prompt_embeds …"."""


class _Global(NamedTuple):
    name: str


class _Storage(NamedTuple):
    dtype: str
    key: str


class _Call(NamedTuple):
    name: str
    arguments: tuple[Any, ...]


_MARK: Final = object()


def read_torch_tensor(data: bytes) -> Embeddings:
    """Return the tensor.

    Raises:
        NotATensor: The bytes are something else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return _read_archive(archive, len(data))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError):
        raise NotATensor("is a damaged zip archive") from None


def _read_archive(archive: zipfile.ZipFile, num_bytes: int) -> Embeddings:
    files = {info.filename.partition("/")[2]: info for info in archive.infolist()}
    pickle = files.get("data.pkl")
    if pickle is None or len(files) > MAX_FILES:
        raise NotATensor("is a zip archive, but not one of torch.save")
    # Stored files cannot be larger than the archive.
    if any(info.compress_type != zipfile.ZIP_STORED for info in files.values()):
        raise NotATensor("is a compressed zip archive")
    if pickle.file_size > MAX_PICKLE_BYTES:
        raise NotATensor("has more than one tensor")
    order = files.get("byteorder")
    if order is not None and archive.read(order) != b"little":
        raise NotATensor("has big-endian numbers")
    match _run(archive.read(pickle)):
        case _Call(name, (_Storage(dtype, key), int(offset), tuple(shape), tuple(strides), *_)) if (
            name == _REBUILD and _is_contiguous(shape, strides)
        ):
            storage = files.get(f"data/{key}")
            size = prod(shape) * DTYPES[dtype]
            if storage is not None and storage.file_size <= num_bytes:
                start = offset * DTYPES[dtype]
                content = archive.read(storage)[start : start + size]
                if offset >= 0 and len(content) == size:
                    return Embeddings(dtype, shape, content)
    raise NotATensor("is not one contiguous float32, float16 or bfloat16 tensor")


def _is_contiguous(shape: tuple[Any, ...], strides: tuple[Any, ...]) -> bool:
    if not all(type(n) is int and n >= 0 for n in (*shape, *strides)):
        return False
    expected = [prod(shape[index + 1 :]) for index in range(len(shape))]
    pairs = zip(shape, strides, expected, strict=False)
    return len(shape) == len(strides) and all(n <= 1 or s == e for n, s, e in pairs)


def _run(pickle: bytes) -> object:
    """Return what the pickle describes, with calls as data."""
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    try:
        for opcode, argument, _ in pickletools.genops(pickle):
            name = opcode.name
            if name in _VALUES:
                stack.append(argument)
            elif name in _CONSTANTS:
                stack.append(_CONSTANTS[name])
            elif name in _TUPLES:
                first = len(stack) - _TUPLES[name]
                stack[first:] = [tuple(stack[first:])]
            elif name == "TUPLE":
                first = len(stack) - 1 - stack[::-1].index(_MARK)
                stack[first:] = [tuple(stack[first + 1 :])]
            elif name == "MARK":
                stack.append(_MARK)
            elif name == "GLOBAL" and argument in _GLOBALS:
                stack.append(_Global(argument))
            elif name == "BINPERSID":
                kind, storage, key, *_ = stack.pop()
                if kind != "storage":
                    break
                stack.append(_Storage(_STORAGES[storage.name], key))
            elif name == "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(_Call(function.name, arguments))
            elif name in ("BINPUT", "LONG_BINPUT"):
                memo[argument] = stack[-1]
            elif name in ("BINGET", "LONG_BINGET"):
                stack.append(memo[argument])
            elif name == "STOP":
                return stack.pop() if len(stack) == 1 else None
            elif name != "PROTO":
                break
    except (ValueError, IndexError, KeyError, TypeError, AttributeError):
        pass
    return None
