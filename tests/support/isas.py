"""The instruction sets that the native kernels can use on this machine."""

from __future__ import annotations

from engine.workers.cpu.library import native_library

PORTABLE = 0
# AVX2 without and with VNNI, and AVX-512. They multiply bf16 as floats.
FUSED_WITHOUT_BF16 = (1, 2, 3)
# It sums products of bf16 in an order of its own.
AMX = 6
BEST_ISA: int = native_library().engine_isa()
_MORE_THAN_THERE_ARE = 16


def select_isa(isa: int) -> bool:
    """Use it from now on. False, and nothing is changed, where the machine lacks it or there is none such."""
    return bool(native_library().engine_select_isa(isa))


ISAS = [isa for isa in range(_MORE_THAN_THERE_ARE) if select_isa(isa)]
select_isa(BEST_ISA)
