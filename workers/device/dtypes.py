"""Dtypes and devices by name, for code that also runs in workers without torch."""

from __future__ import annotations

from typing import Any, Final, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

AnyArray: TypeAlias = Any
"""A numpy array, or a torch tensor on the CPU."""


class HostDtype(msgspec.Struct, frozen=True):
    """A dtype with the name and the properties of the torch dtype, for workers without torch."""

    name: str
    itemsize: int

    def __str__(self) -> str:
        return f"torch.{self.name}"


class HostDevice(msgspec.Struct, frozen=True):
    """Represents torch's CPU device in workers without torch."""

    type: str = "cpu"

    def __str__(self) -> str:
        return self.type


_CONFIGURED: Final = {
    "auto": HostDtype("bfloat16", 2),
    "bfloat16": HostDtype("bfloat16", 2),
    "float16": HostDtype("float16", 2),
    "float32": HostDtype("float32", 4),
    "int8": HostDtype("int8", 1),
    "fp8": HostDtype("float8_e4m3fn", 1),
    "fp8_e4m3": HostDtype("float8_e4m3fn", 1),
}


def configured_dtype(
    name: str, device: torch.device | HostDevice | None = None
) -> torch.dtype | HostDtype:
    """Return the dtype for a value of `--dtype` or `--kv-cache-dtype`: a torch dtype if `device` is torch's."""
    dtype = _CONFIGURED[name]
    return dtype if device is None or isinstance(device, HostDevice) else torch_dtype(dtype)


def dtype_name(dtype: torch.dtype | HostDtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(dtype: torch.dtype | HostDtype) -> torch.dtype:
    """Return the torch dtype with the same name."""
    if not isinstance(dtype, HostDtype):
        return dtype
    found: torch.dtype = getattr(torch, dtype.name)
    return found


def torch_device(device: torch.device | HostDevice) -> torch.device:
    """Return the torch device with the same name."""
    return torch.device(device.type) if isinstance(device, HostDevice) else device


def address(array: AnyArray) -> int:
    """Return the address of an array's first element."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


def on_host(array: AnyArray) -> NDArray[Any]:
    """Return a numpy array that shares the memory of a tensor on the CPU; arrays are returned unchanged."""
    if isinstance(array, np.ndarray):
        return array
    found: NDArray[Any] = array.cpu().numpy()
    return found


def as_tensor(array: AnyArray) -> torch.Tensor:
    """Return a tensor that shares the memory of a numpy array; tensors are returned unchanged."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array


def float32_array(array: AnyArray) -> NDArray[np.float32]:
    """Return a contiguous float32 array with the same values."""
    if not isinstance(array, np.ndarray):
        array = array.float().numpy()
    return np.ascontiguousarray(array, np.float32)


def rounded(value: float, dtype: torch.dtype | HostDtype) -> float:
    """Return a number rounded to the precision of a dtype."""
    name, as_float32 = dtype_name(dtype), np.float32(value)
    if name == "float16":
        return float(np.float16(value))
    if name != "bfloat16":
        return float(as_float32)
    bits = int(as_float32.view(np.uint32))
    # Round to nearest, ties to even.
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
