"""One safetensors file, whose tensors are read as numpy views of its memory map, or by torch."""

from __future__ import annotations

import json
import mmap
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from ....protocol.errors import CheckpointError
from ..checkpoint import Floats

_FLOATS: Final = {
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", np.uint16),
}
"""Name of a dtype in safetensors -> its name in `Floats`, and the type of `Floats.values`."""

_LENGTH_BYTES: Final = 8


class SafetensorsFile:
    """An open file. `texts` are those in its header.

    Raises:
        CheckpointError: The file is missing, truncated or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The library checks the header and the size of the file.
            with safe_open(path, framework="np"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
                self._header: dict[str, Any] = json.loads(file.read(length))
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise CheckpointError(path, "this file of the model is missing; download it") from error
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(
                path, f"the file is truncated or damaged ({error}); download it again"
            ) from error
        self.texts: dict[str, str] = self._header.pop("__metadata__", None) or {}
        self._start = _LENGTH_BYTES + length

    @property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [*self._header]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._header[name]["shape"])

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor in safetensors' spelling."""
        return str(self._header[name]["dtype"])

    def floats(self, name: str) -> Floats | None:
        """Return a tensor as a view of the memory map, or None if `Floats` does not support its type."""
        if (found := _FLOATS.get(self.dtype(name))) is None:
            return None
        dtype, stored = found
        begin, end = self._header[name]["data_offsets"]
        values: NDArray[Any] = np.frombuffer(
            self._map, stored, (end - begin) // np.dtype(stored).itemsize, self._start + begin
        )
        return Floats(values.reshape(self.shape(name)), dtype)

    @cached_property
    def in_torch(self) -> Any:
        """The file as the safetensors library opens it for torch."""
        return safe_open(self.path, framework="pt")
