"""The description of the native library's structs, enums and functions, from which their Python types are made.

The library describes itself in the format of `csrc/abi.cpp`, with one struct, enum or function per line.
`description.txt` has the same text, and a library with another one is rejected: it was built from other sources, would
read fields at other offsets, and crash the process. `python -m engine.workers.cpu.library` updates the file after a
change of the sources and a build.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any, Final, TypeVar

from ....protocol.errors import EngineError

DESCRIPTION_PATH: Final = Path(__file__).with_name("description.txt")
DESCRIPTION: Final = DESCRIPTION_PATH.read_text()

_TYPES: Final[dict[str, Any]] = {
    "int32": c_int32,
    "int64": c_int64,
    "uint64": c_uint64,
    "float32": c_float,
    "float64": c_double,
    "pointer": c_void_p,
    "void": None,
}
_MAX_SHOWN: Final = 5
"""Number of differences that an error names."""

Struct = TypeVar("Struct", bound=type[ctypes.Structure])


class StaleNativeLibrary(EngineError):
    """Raised if the native library was built from other sources than the Python code that loads it."""


def native_struct(**types: Any) -> Callable[[Struct], Struct]:
    """Return a decorator that gives a class the fields of the native struct with its name.

    Args:
        types: The types of fields that are structs, and of pointers that keep an object alive.

    Raises:
        TypeError: One of `types` does not fit the struct.
    """

    def add_fields(struct: Struct) -> Struct:
        size, *described = _line("struct", struct.__name__).split()
        fields = [field.replace("@", ":").split(":") for field in described]
        struct._fields_ = [(name, types.get(name) or _type(kind)) for name, kind, _ in fields]
        is_same = size == f"size={ctypes.sizeof(struct)}" and all(
            getattr(struct, name).offset == int(offset) for name, _, offset in fields
        )
        typed = {name for name, kind, _ in fields if kind.startswith(("struct", "pointer"))}
        if not is_same or types.keys() - typed:
            raise TypeError(f"the native struct {struct.__name__} does not have these types")
        return struct

    return add_fields


def enum_names(name: str) -> tuple[str, ...]:
    """Return the names of a native enum's values, which count from 0."""
    return tuple(value.partition("=")[0] for value in _line("enum", name).split())


def declare_functions(library: ctypes.CDLL) -> None:
    """Set the types of the arguments and results of all native functions."""
    for line in DESCRIPTION.splitlines():
        kind, name, signature = line.split(maxsplit=2)
        if kind == "function":
            arguments, result = signature.removeprefix("(").split(") -> ")
            function = getattr(library, name)
            function.argtypes = [_type(argument) for argument in arguments.split(", ") if argument]
            function.restype = _type(result)


def check_description(actual: str, expected: str, path: str) -> None:
    """Check that the library's description of itself equals `expected`. Raise StaleNativeLibrary if they differ."""
    if actual == expected:
        return
    built, needed = set(actual.splitlines()), set(expected.splitlines())
    differing = sorted({" ".join(line.split()[:2]) for line in built ^ needed})
    shown = ", ".join(differing[:_MAX_SHOWN])
    if len(differing) > _MAX_SHOWN:
        shown += f" and {len(differing) - _MAX_SHOWN} more"
    raise stale_library(path, f"these differ: {shown}" if differing else "another order")


def stale_library(path: str, reason: str) -> StaleNativeLibrary:
    """Return the error for a library that does not fit this version."""
    return StaleNativeLibrary(
        f"the native library {path} does not match this version of Engine ({reason}); rebuild it: "
        "run scripts/install in a checkout, or install the package again"
    )


def _line(kind: str, name: str) -> str:
    """Return the description of a struct or enum, without its name."""
    start = f"{kind} {name} "
    (line,) = (line for line in DESCRIPTION.splitlines() if line.startswith(start))
    return line.removeprefix(start)


def _type(description: str) -> Any:
    name, _, length = description.removesuffix("]").partition("[")
    return _TYPES[name] * int(length) if length else _TYPES[name]
