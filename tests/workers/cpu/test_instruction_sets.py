"""Selection of the kernels' instruction set."""

from __future__ import annotations

import platform
import re
import shutil
from pathlib import Path

import pytest
from engine.workers.cpu.build_native import INSTRUCTION_SETS, SUBJECTS, kernel_targets
from engine.workers.cpu.library import instruction_set
from support.workers.isas import ISA_NAMES, ISAS, select_isa

ROOT = Path(__file__).parents[3]
LIST = ROOT / INSTRUCTION_SETS
COMPILER = shutil.which("c++") or shutil.which("g++")
CPU_INFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AMX = {"avx512_bf16", "amx_tile", "amx_bf16"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "bmi2"}
AVX512_VNNI = AVX512 | {"avx512_vnni"}


def test_selected_instruction_set_is_reported() -> None:
    for isa in ISAS:
        select_isa(isa)
        assert instruction_set() == ISA_NAMES[isa]
    assert len(set(ISA_NAMES)) == len(ISA_NAMES)


def test_unknown_instruction_set_cannot_be_selected() -> None:
    before = instruction_set()
    assert not select_isa(-1)
    assert not select_isa(len(ISA_NAMES))
    assert instruction_set() == before


def test_list_and_target_headers_name_the_same_sets() -> None:
    sets = re.findall(r"^ENGINE_ISA\((\w+),", LIST.read_text(), re.MULTILINE)
    headers = sorted(path.stem for path in (LIST.parent / "targets").iterdir())
    assert sorted(sets) == headers


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["-D__x86_64__"],
            {
                "linear": ["avx2", "avx512", "avx512_bf16", "avx512_vnni", "avx_vnni", "portable"],
                "attention": ["avx2", "avx512", "avx512_bf16", "avx512_vnni", "portable"],
                "rows": ["avx2", "avx512", "portable"],
                "sampling": ["avx2", "avx512", "portable"],
            },
        ),
        (
            ["-D__aarch64__"],
            {subject: ["neon", "portable"] for subject in SUBJECTS},
        ),
        ([], {subject: ["portable"] for subject in SUBJECTS}),
    ],
    ids=["x86-64 but not Linux", "64-bit ARM", "another machine"],
)
def test_kernels_are_compiled_for_every_set_of_the_architecture(
    arguments: list[str], expected: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    undefined = ["-U__x86_64__", "-U__aarch64__", "-U__linux__"]
    assert kernel_targets([str(COMPILER), *undefined, *arguments]) == expected


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPU_INFO.exists(), reason="needs the flags of an x86-64"
)
def test_a_processor_gets_the_best_set_that_its_flags_allow() -> None:
    """A processor with AVX-512 but without VNNI or BF16 still uses it."""
    lines = CPU_INFO.read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split()[2:])
    expected = (
        "AMX"
        if flags >= AVX512_VNNI | AMX
        else "AVX-512 with VNNI and BF16"
        if flags >= AVX512_VNNI | {"avx512_bf16"}
        else "AVX-512 with VNNI"
        if flags >= AVX512_VNNI
        else "AVX-512"
        if flags >= AVX512
        else "AVX2 with VNNI"
        if flags >= AVX2 | {"avx_vnni"}
        else "AVX2"
        if flags >= AVX2
        else "any processor"
    )
    assert instruction_set() == expected
