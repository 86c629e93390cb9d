"""Compare the native library's structs and functions with Python's mirrors of them.

A library built from other sources would read fields at other offsets and crash the process. So Python describes its own
mirrors in the format of `csrc/abi.cpp`, with one struct, enum or function per line, and compares the text with the
library's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ....protocol.errors import EngineError

_FUNCTION_POINTER = ctypes.CFUNCTYPE(None).__mro__[1]

_MAX_SHOWN: Final = 5
"""Number of differences that an error names."""

Signature = tuple[Any, list[Any]]
"""The type of a function's result, or None, and the types of its arguments."""


class StaleNativeLibrary(EngineError):
    """Raised if the native library was built from other sources than the Python code that loads it."""


def describe_abi(
    structs: Sequence[type[ctypes.Structure]],
    enums: Mapping[str, Sequence[str]],
    functions: Mapping[str, Signature],
) -> str:
    """Return the text that a library with exactly these structs, enums and functions exports.

    Args:
        structs: The mirrored structs.
        enums: For each enum, the names of its values, which count from 0.
        functions: The signature of each function.
    """
    lines = []
    for struct in structs:
        fields = [
            f"{name.lstrip('_')}:{_type_name(kind)}@{getattr(struct, name).offset}"
            for name, kind, *_ in struct._fields_
        ]
        lines.append(f"struct {struct.__name__} size={ctypes.sizeof(struct)} {' '.join(fields)}")
    for enum, names in enums.items():
        values = " ".join(f"{name}={value}" for value, name in enumerate(names))
        lines.append(f"enum {enum} {values}")
    for function, (result, arguments) in functions.items():
        types = ", ".join(map(_type_name, arguments))
        lines.append(f"function {function} ({types}) -> {_type_name(result)}")
    return "".join(f"{line}\n" for line in lines)


def check_abi(library: ctypes.CDLL, expected: str, path: str) -> None:
    """Check that the library's description of itself equals `expected`.

    Raises:
        StaleNativeLibrary: The descriptions differ, or the library has none.
    """
    try:
        export = library.engine_abi
    except AttributeError:
        raise _stale(path, "it does not export engine_abi") from None
    export.restype, export.argtypes = ctypes.c_char_p, []
    actual = export().decode()
    if actual == expected:
        return
    built, needed = set(actual.splitlines()), set(expected.splitlines())
    differing = sorted({" ".join(line.split()[:2]) for line in built ^ needed})
    shown = ", ".join(differing[:_MAX_SHOWN])
    if len(differing) > _MAX_SHOWN:
        shown += f" and {len(differing) - _MAX_SHOWN} more"
    raise _stale(path, f"these differ: {shown}" if differing else "another order")


def _stale(path: str, reason: str) -> StaleNativeLibrary:
    return StaleNativeLibrary(
        f"the native library {path} does not match this version of Engine ({reason}); rebuild it: "
        "run scripts/install in a checkout, or install the package again"
    )


def _type_name(kind: Any) -> str:
    if kind is None:
        return "void"
    if issubclass(kind, ctypes.Array):
        return f"{_type_name(kind._type_)}[{kind._length_}]"
    pointers = (ctypes._Pointer, _FUNCTION_POINTER, ctypes.c_char_p, ctypes.c_void_p)
    if issubclass(kind, pointers):
        return "pointer"
    bits = 8 * ctypes.sizeof(kind)
    if issubclass(kind, ctypes.Structure):
        return f"struct{bits}"
    if kind._type_ in "fd":
        return f"float{bits}"
    return f"{'int' if kind._type_.islower() else 'uint'}{bits}"
