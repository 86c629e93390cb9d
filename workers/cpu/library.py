"""Load the native library, and declare its functions for `ctypes`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_size_t, c_ssize_t, c_void_p
from functools import cache
from pathlib import Path

from ...protocol.errors import EngineError
from .abi.check import Signature, check_abi, describe_abi
from .abi.op_kinds import OP_KINDS
from .abi.sampling_structs import DraftLookup, Suffixes
from .abi.structs import (
    ACTIVATIONS,
    STRUCTS,
    DecodeBatch,
    ExpertExchange,
    ModelShape,
    Op,
    Step,
)

LIBRARY_PATH = Path(__file__).with_name("_native.so")


class NotSupportedNatively(EngineError):
    """Raised if the native backend does not support a model on this machine. Torch may."""


FUNCTIONS: dict[str, Signature] = {
    "engine_isa": (c_int32, []),
    "engine_isa_name": (c_char_p, [c_int32]),
    "engine_select_isa": (c_int32, [c_int32]),
    "engine_can_pack": (c_int32, [c_int32, c_int32]),
    "engine_packed_bytes": (c_size_t, [c_int32, c_int32, c_int32, c_int32]),
    "engine_pack_rows": (c_int32, [c_void_p, c_int32, c_void_p, c_ssize_t, c_int32, c_int32]),
    "engine_finish_packing": (c_size_t, [c_void_p]),
    "engine_activation_row_bytes": (c_size_t, [c_int32, c_int32]),
    "engine_quantize_rows": (None, [c_int32, c_void_p, c_ssize_t, c_int32, c_int32, c_void_p]),
    "engine_linear_rows": (
        None,
        [c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32, c_void_p, c_ssize_t],
    ),
    "engine_unpack_weight_row": (None, [c_void_p, c_int32, c_void_p]),
    "engine_program_new": (c_void_p, [POINTER(ModelShape)]),
    "engine_program_free": (None, [c_void_p]),
    "engine_program_add": (None, [c_void_p, POINTER(Op)]),
    "engine_program_add_rope": (None, [c_void_p, c_void_p, c_int32, c_float, c_void_p]),
    "engine_program_exchange_bytes": (c_size_t, [c_void_p, c_int32]),
    "engine_program_join": (None, [c_void_p, c_void_p, c_int32, c_int32]),
    "engine_program_join_experts": (None, [c_void_p, POINTER(ExpertExchange)]),
    "engine_program_join_round": (None, [c_void_p]),
    "engine_program_run": (c_int32, [c_void_p, POINTER(Step)]),
    "engine_program_decode": (c_int32, [c_void_p, POINTER(DecodeBatch)]),
    "engine_program_choose": (c_int32, [c_void_p, POINTER(DecodeBatch)]),
    "engine_program_profile": (None, [c_void_p, c_void_p]),
    "engine_look_up_drafts": (
        None,
        [POINTER(DraftLookup), c_void_p, c_int32, c_int64, c_void_p, c_void_p],
    ),
    "engine_remember_answer": (None, [POINTER(Suffixes), c_void_p, c_int32]),
}


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
    """Load the native library at `path`.

    Raises:
        StaleNativeLibrary: It was built from other sources.
    """
    library = ctypes.CDLL(path)
    check_abi(
        library,
        describe_abi(STRUCTS, {"Activation": ACTIVATIONS, "OpKind": OP_KINDS}, FUNCTIONS),
        path,
    )
    for name, (result, arguments) in FUNCTIONS.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def instruction_set() -> str:
    """Return the name of the instruction set for which the kernels in use were compiled."""
    library = native_library()
    name: bytes = library.engine_isa_name(library.engine_isa())
    return name.decode()
