"""The instruction sets that the native kernels can use on this machine."""

from __future__ import annotations

from itertools import count, takewhile

from engine.workers.cpu.library import instruction_set_name, native_library


def select_isa(isa: int) -> bool:
    """Select the set. Return False, and change nothing, if the machine lacks it or it does not exist."""
    return bool(native_library().engine_select_isa(isa))


ISA_NAMES = list(takewhile(bool, map(instruction_set_name, count())))
"""The names of all sets that the library was compiled for, by number."""


def _numbers(*names: str) -> tuple[int, ...]:
    return tuple(isa for isa, name in enumerate(ISA_NAMES) if name in names)


(PORTABLE,) = _numbers("any processor")
# These sets multiply bf16 as floats.
FUSED_WITHOUT_BF16 = _numbers("AVX2", "AVX2 with VNNI", "AVX-512", "AVX-512 with VNNI")
# This set sums bf16 products in its own order.
AMX = next(iter(_numbers("AMX")), None)
BEST_ISA: int = native_library().engine_isa()

ISAS = [isa for isa in range(len(ISA_NAMES)) if select_isa(isa)]
"""The sets that this machine supports."""
select_isa(BEST_ISA)
