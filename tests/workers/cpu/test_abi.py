"""The check that the native library was built from the sources whose description this Python code reads."""

import _ctypes
import ctypes

import pytest
from engine.workers.cpu import library
from engine.workers.cpu.abi.description import (
    DESCRIPTION,
    StaleNativeLibrary,
    check_description,
    native_struct,
)
from engine.workers.cpu.abi.structs import AttentionLayer, ChoiceRule, GateLimit

PATH = str(library.LIBRARY_PATH)


def check(old: str, new: str) -> None:
    """Compare the library with a description in which a text is replaced."""
    assert DESCRIPTION.count(old) == 1
    actual = library.describe(library.native_library(), PATH)
    check_description(actual, DESCRIPTION.replace(old, new), PATH)


def test_library_of_the_same_sources_is_accepted():
    check("struct GateLimit", "struct GateLimit")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ranks:pointer@64", "ranks:pointer@64 added:int32@72"),
        (" ranks:pointer@64", ""),
        ("is_wanted:pointer@0 num_top:pointer@8", "num_top:pointer@0 is_wanted:pointer@8"),
        ("width:int64@40", "width:float64@40"),
        ("is_wanted:pointer@0", "renamed:pointer@0"),
    ],
    ids=["added", "removed", "reordered", "retyped", "renamed"],
)
def test_struct_with_other_fields_is_named_with_a_rebuild_hint(old, new):
    with pytest.raises(StaleNativeLibrary) as error:
        check(old, new)
    message = str(error.value)
    assert PATH in message
    assert "(these differ: struct LogprobRows); rebuild it: run scripts/install" in message


@pytest.mark.parametrize(
    "signature",
    ["(int32) -> int32", "(int32, int32) -> int64", "(int32, uint32) -> int32", "(int32, int32)"],
)
def test_function_with_another_signature_is_named(signature):
    with pytest.raises(StaleNativeLibrary, match="differ: function engine_can_pack\\)"):
        check("engine_can_pack (int32, int32) -> int32", f"engine_can_pack {signature}")


def test_function_that_the_library_lacks_is_named():
    with pytest.raises(StaleNativeLibrary, match="differ: function engine_added\\)"):
        check(DESCRIPTION, f"{DESCRIPTION}function engine_added () -> void\n")


def test_only_the_first_of_many_differences_are_named():
    with pytest.raises(StaleNativeLibrary, match=r"enum OpKind, [^)]{,200} and \d\d more\)"):
        check(DESCRIPTION, "")


def test_library_without_a_description_is_stale():
    with pytest.raises(StaleNativeLibrary, match="does not export engine_abi"):
        library.load_library(_ctypes.__file__)


@pytest.mark.parametrize(
    "types",
    [{"eps": ctypes.c_int32}, {"choice": GateLimit}, {"added": ctypes.c_int32}],
)
def test_types_that_do_not_fit_a_struct_are_refused(types):
    fitting = {"gate_limit": GateLimit, "choice": ChoiceRule, "attention": AttentionLayer}
    struct = type("Op", (ctypes.Structure,), {})
    with pytest.raises(TypeError, match="native struct Op does not have these types"):
        native_struct(**fitting | types)(struct)
