"""Load the native library. Run as a program, update the description of its structs and functions."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from ...protocol.errors import EngineError
from .abi.description import (
    DESCRIPTION,
    DESCRIPTION_PATH,
    check_description,
    declare_functions,
    stale_library,
)

LIBRARY_PATH = Path(__file__).with_name("_native.so")


class NotSupportedNatively(EngineError):
    """Raised if the native backend does not support a model on this machine. Torch may."""


@cache
def native_library() -> ctypes.CDLL:
    """Load the native library of this installation, once.

    Raises:
        NotSupportedNatively: The library was not built.
        StaleNativeLibrary: The library was built from other sources.
    """
    if not LIBRARY_PATH.is_file():
        raise NotSupportedNatively(
            "the native CPU backend was not built; install a C++ compiler (Debian: g++), then reinstall "
            "engine"
        )
    return load_library(str(LIBRARY_PATH))


def load_library(path: str) -> ctypes.CDLL:
    """Load the native library at `path`. Raise StaleNativeLibrary if it was built from other sources."""
    library = ctypes.CDLL(path)
    check_description(describe(library, path), DESCRIPTION, path)
    declare_functions(library)
    return library


def describe(library: ctypes.CDLL, path: str) -> str:
    """Return the library's description of its structs, enums and functions. Raise StaleNativeLibrary if it has none."""
    try:
        export = library.engine_abi
    except AttributeError:
        raise stale_library(path, "it does not export engine_abi") from None
    export.restype, export.argtypes = ctypes.c_char_p, []
    text: bytes = export()
    return text.decode()


def instruction_set_name(number: int) -> str | None:
    """Return the name of an instruction set, or None if there is none with this number."""
    address = native_library().engine_isa_name(number)
    return None if address is None else ctypes.string_at(address).decode()


def instruction_set() -> str:
    """Return the name of the instruction set for which the kernels in use were compiled."""
    name = instruction_set_name(native_library().engine_isa())
    assert name is not None
    return name


if __name__ == "__main__":
    DESCRIPTION_PATH.write_text(describe(ctypes.CDLL(str(LIBRARY_PATH)), str(LIBRARY_PATH)))
