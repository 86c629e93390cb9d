"""One file of `torch.save`, such as pytorch_model.bin, whose tensors are read without running code that it names."""

from __future__ import annotations

import mmap
import pickletools
import zipfile
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....protocol.errors import CheckpointError
from ..checkpoint import Floats

_DAMAGES: Final = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    TypeError,
    ValueError,
)
_LOCAL_HEADER_BYTES: Final = 30
_DTYPES: Final = {
    "torch BFloat16Storage": ("BF16", "bfloat16", np.uint16),
    "torch BoolStorage": ("BOOL", "bool", np.bool_),
    "torch ByteStorage": ("U8", "uint8", np.uint8),
    "torch CharStorage": ("I8", "int8", np.int8),
    "torch DoubleStorage": ("F64", "float64", np.float64),
    "torch FloatStorage": ("F32", "float32", np.float32),
    "torch HalfStorage": ("F16", "float16", np.float16),
    "torch IntStorage": ("I32", "int32", np.int32),
    "torch LongStorage": ("I64", "int64", np.int64),
    "torch ShortStorage": ("I16", "int16", np.int16),
}
"""By torch's names of storages: safetensors' and torch's names of the dtype, and numpy's type of the same size."""

_FLOATS: Final = ("float32", "float16", "bfloat16")


class _Storage(NamedTuple):
    kind: str
    record: str


class _Tensor(NamedTuple):
    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class SavedFile:
    """An open file of `torch.save` with a dictionary of tensors.

    The file describes its tensors by a pickle, which could call any function. This class reads it as data and calls
    nothing. Other objects than tensors are ignored.

    Raises:
        CheckpointError: The file is missing or damaged, or has no dictionary of tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                # Torch's tensors need memory that is formally writable. Writes would not reach the file.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            with zipfile.ZipFile(path) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                if "byteorder" in records and archive.read(records["byteorder"]) != b"little":
                    raise ValueError("its numbers are big-endian")
                content = _read_description(archive.read(records["data.pkl"]))
            if not isinstance(content, dict):
                raise CheckpointError(
                    path, "the file has no dictionary of tensors; use another file"
                )
            self._records = records
            self._tensors: dict[str, _Tensor] = {
                name: found for name, found in content.items() if isinstance(found, _Tensor)
            }
            for name, tensor in self._tensors.items():
                self._check(name, tensor)
        except FileNotFoundError as error:
            raise CheckpointError(path, "this file of the model is missing; download it") from error
        except zipfile.BadZipFile as error:
            raise CheckpointError(
                path,
                "the file is damaged, or torch before 1.6 saved it; download it again or convert it to safetensors",
            ) from error
        except _DAMAGES as error:
            raise CheckpointError(
                path, f"the file is truncated or damaged ({error}); download it again"
            ) from error

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [*self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor in safetensors' spelling."""
        return _DTYPES[self._tensors[name].storage.kind][0]

    def floats(self, name: str) -> Floats | None:
        """Return a tensor as a view of the memory map, or None if `Floats` does not support its type."""
        _, dtype, stored = _DTYPES[self._tensors[name].storage.kind]
        return Floats(self._values(name, stored), dtype) if dtype in _FLOATS else None

    @property
    def in_torch(self) -> SavedFile:
        """The file with the methods that safetensors' files have for torch."""
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as a view of the memory map."""
        _, dtype, stored = _DTYPES[self._tensors[name].storage.kind]
        return torch.from_numpy(self._values(name, stored)).view(getattr(torch, dtype))

    get_slice = get_tensor

    def _values(self, name: str, stored: type[np.generic]) -> NDArray[Any]:
        tensor = self._tensors[name]
        item_size = np.dtype(stored).itemsize
        values = np.frombuffer(
            self._map,
            stored,
            self._extent(tensor),
            self._start(tensor) + tensor.offset * item_size,
        )
        strides = [stride * item_size for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides)

    def _check(self, name: str, tensor: _Tensor) -> None:
        if tensor.storage.kind not in _DTYPES:
            raise CheckpointError(
                self._path,
                f"the tensor {name!r} has the type {tensor.storage.kind}, which is not supported",
            )
        record = self._records.get(f"data/{tensor.storage.record}")
        size = np.dtype(_DTYPES[tensor.storage.kind][2]).itemsize
        sizes = (tensor.offset, *tensor.shape, *tensor.strides)
        if (
            record is None
            or record.compress_type != zipfile.ZIP_STORED
            or not all(isinstance(number, int) and number >= 0 for number in sizes)
            or len(tensor.shape) != len(tensor.strides)
            or (tensor.offset + self._extent(tensor)) * size > record.file_size
            or self._start(tensor) + record.file_size > len(self._map)
        ):
            raise ValueError(f"the numbers of the tensor {name!r} are not in it")

    def _start(self, tensor: _Tensor) -> int:
        """Return the position of a storage's first byte in the file."""
        header = self._records[f"data/{tensor.storage.record}"].header_offset
        lengths = np.frombuffer(self._map, "<u2", 2, header + _LOCAL_HEADER_BYTES - 4)
        return header + _LOCAL_HEADER_BYTES + int(lengths.sum())

    @staticmethod
    def _extent(tensor: _Tensor) -> int:
        """Return the number of a storage's elements from the first of a tensor to its last."""
        if 0 in tensor.shape:
            return 0
        steps = zip(tensor.shape, tensor.strides, strict=True)
        return 1 + sum((count - 1) * stride for count, stride in steps)


def _read_description(description: bytes) -> Any:
    """Return the object that a pickle describes, in which None stands for all but dictionaries, tensors and values."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    for operation, argument, _ in pickletools.genops(description):
        name = operation.name
        before, after = operation.stack_before, operation.stack_after
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE" or name.endswith("PUT"):
            memo[len(memo) if argument is None else int(argument)] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[int(argument or 0)])
        elif not before and argument is not None and after:
            stack.append(argument)
        elif name != "STOP":
            start = len(stack) - len(before)
            if pickletools.markobject in before:
                start = marks.pop() - before.index(pickletools.markobject)
            if not 0 <= start <= len(stack):
                raise ValueError(f"{name} has no operands")
            operands = stack[start:]
            del stack[start:]
            stack += [_apply(name, operands)] if after else []
    return stack[-1]


def _apply(name: str, operands: list[Any]) -> Any:
    """Return the result of an operation of a pickle."""
    if name == "EMPTY_DICT":
        return {}
    if name in ("NEWFALSE", "NEWTRUE"):
        return name == "NEWTRUE"
    if name == "STACK_GLOBAL":
        return " ".join(operands)
    if name in ("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
        return tuple(operands)
    if name == "BUILD":
        # The attributes of a dictionary of tensors describe the version of a module.
        return operands[0]
    if name in ("SETITEM", "SETITEMS"):
        found, *items = operands
        found.update(zip(items[::2], items[1::2], strict=True))
        return found
    if name == "BINPERSID":
        _, kind, record, *_ = operands[0]
        return _Storage(str(kind), str(record))
    if name == "REDUCE":
        function, arguments = operands
        if function == "collections OrderedDict":
            return {}
        if function == "torch._utils _rebuild_parameter":
            return arguments[0]
        if function == "torch._utils _rebuild_tensor_v2":
            return _Tensor(*arguments[:4])
    return None
