"""Which kernels a machine gets."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from engine.workers.cpu.library import INSTRUCTION_SETS, instruction_set
from support.isas import ISAS, select_isa

CPU_INFO = Path("/proc/cpuinfo")
AVX2 = {"avx2", "fma", "f16c"}
AMX = {"avx512_bf16", "amx_tile", "amx_bf16"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "bmi2"}


def test_every_set_of_this_machine_has_a_name() -> None:
    names = []
    for isa in ISAS:
        select_isa(isa)
        names.append(instruction_set())
    assert names == [INSTRUCTION_SETS[isa] for isa in ISAS]
    assert len(set(names)) == len(names)


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPU_INFO.exists(), reason="needs the flags of an x86-64"
)
def test_a_processor_gets_the_most_that_its_flags_allow() -> None:
    """One with VNNI but without BF16 as well, which is no reason to leave AVX-512 unused."""
    lines = CPU_INFO.read_text().splitlines()
    flags = set(next(line for line in lines if line.startswith("flags")).split()[2:])
    expected = (
        "AMX"
        if flags >= AVX512 | AMX
        else "AVX-512 with VNNI and BF16"
        if flags >= AVX512 | {"avx512_bf16"}
        else "AVX-512 with VNNI"
        if flags >= AVX512
        else "AVX2 with VNNI"
        if flags >= AVX2 | {"avx_vnni"}
        else "AVX2"
        if flags >= AVX2
        else "any processor"
    )
    assert instruction_set() == expected
