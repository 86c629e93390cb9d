"""The check that the native library was built from the sources that this Python code mirrors."""

import _ctypes
import ctypes

import pytest
from engine.workers.cpu import library
from engine.workers.cpu.abi import structs
from engine.workers.cpu.abi.check import Signature, StaleNativeLibrary, check_abi, describe_abi
from engine.workers.cpu.abi.op_kinds import OP_KINDS

NATIVE = library.native_library()
PATH = str(library.LIBRARY_PATH)


def mirror(name: str, fields: list[tuple[str, type]]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def check(
    replaced: dict[str, type[ctypes.Structure]] | None = None, **functions: Signature
) -> None:
    """Compare the library with the Python mirrors, some of which are replaced."""
    mirrors = {struct.__name__: struct for struct in structs.STRUCTS} | (replaced or {})
    enums = {"Activation": structs.ACTIVATIONS, "OpKind": OP_KINDS}
    expected = describe_abi(list(mirrors.values()), enums, library.FUNCTIONS | functions)
    check_abi(NATIVE, expected, PATH)


def test_library_of_the_same_sources_is_accepted():
    check()


FIELDS = list(structs.LogprobRows._fields_)


@pytest.mark.parametrize(
    "fields",
    [
        [*FIELDS, ("added", ctypes.c_int32)],
        FIELDS[:-1],
        [FIELDS[1], FIELDS[0], *FIELDS[2:]],
        [*FIELDS[:3], ("width", ctypes.c_double), *FIELDS[4:]],
        [("renamed", ctypes.c_void_p), *FIELDS[1:]],
    ],
    ids=["added", "removed", "reordered", "retyped", "renamed"],
)
def test_struct_with_other_fields_is_named_with_a_rebuild_hint(fields):
    with pytest.raises(StaleNativeLibrary) as error:
        check({"LogprobRows": mirror("LogprobRows", fields)})
    message = str(error.value)
    assert PATH in message
    assert "(these differ: struct LogprobRows); rebuild it: run scripts/install" in message


@pytest.mark.parametrize(
    "signature",
    [
        (ctypes.c_int32, [ctypes.c_int32]),
        (ctypes.c_int64, [ctypes.c_int32, ctypes.c_int32]),
        (ctypes.c_int32, [ctypes.c_int32, ctypes.c_uint32]),
        (None, [ctypes.c_int32, ctypes.c_int32]),
    ],
)
def test_function_with_another_signature_is_named(signature):
    with pytest.raises(StaleNativeLibrary, match="differ: function engine_can_pack\\)"):
        check(engine_can_pack=signature)


def test_function_that_the_library_lacks_is_named():
    with pytest.raises(StaleNativeLibrary, match="differ: function engine_added\\)"):
        check(engine_added=(None, []))


def test_only_the_first_of_many_differences_are_named():
    with pytest.raises(StaleNativeLibrary, match=r"enum OpKind, [^)]{,200} and \d\d more\)"):
        check_abi(NATIVE, "", PATH)


def test_library_without_a_description_is_stale():
    with pytest.raises(StaleNativeLibrary, match="does not export engine_abi"):
        library.load_library(_ctypes.__file__)
