"""Compile Triton kernels for a Hopper GPU, without having one.

A separate process, in which nothing is interpreted, calls the functions that launch kernels, with tensors on the CPU.
Each kernel is compiled to machine code for exactly the arguments of its launch, but is not launched, so the contents of
the tensors are meaningless afterwards. Triton itself refuses a kernel that needs too much shared memory.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.gpu.wgmma_operands import overwritten_operands

_REGISTERS_OF_A_BLOCK = 65536
_SHARED_BYTES = 232448


@dataclass(frozen=True, slots=True)
class KernelResources:
    """Resources that a kernel needs on a multiprocessor. `stack_bytes` of a thread are spilled registers.

    `global_loads` is the number of instructions that load from the device's memory into registers, without those that
    bypass the L1 cache. `products` are the instructions that multiply matrices, with their numbers of summed columns
    and their types; `overwritten` are the ones that read registers which another instruction may overwrite.
    """

    name: str
    num_warps: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    global_loads: int
    products: list[str]
    overwritten: list[str]

    @property
    def fits(self) -> bool:
        threads = self.num_warps * 32
        return threads * self.registers <= _REGISTERS_OF_A_BLOCK and (
            self.shared_bytes <= _SHARED_BYTES
        )


def compile_for_hopper(file: str, function: str, *arguments: str) -> list[KernelResources]:
    """Call `function` of the Python file with these arguments; return the kernels that it would have launched.

    Raises AssertionError with the compiler's message if a kernel does not compile. Importing the file must not enable
    the interpreter.
    """
    tests = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tests), *filter(None, sys.path)])
    result = subprocess.run(
        [sys.executable, "-P", "-m", "support.gpu.triton_compile", file, function, *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return [KernelResources(**fields) for fields in json.loads(result.stdout.splitlines()[-1])]


class _HopperWithoutADevice:
    """The part of a Triton driver that compilation needs."""

    def __init__(self) -> None:
        self.kernels: dict[bytes, KernelResources] = {}
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": _SHARED_BYTES},
            load_binary=self._load_binary,
        )
        self._num_warps = 0
        self._global_loads = 0
        self._products: list[str] = []
        self._reads_registers = False

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def note_products(self, *, metadata_group: dict[str, str], **others: Any) -> None:
        """A listener to the compiler, whose kernel is loaded next."""
        ptx = next(path for name, path in metadata_group.items() if name.endswith(".ptx"))
        text = Path(ptx).read_text()
        self._global_loads = len(re.findall(r"\bld\.global(?!\.cg)", text))
        instructions = re.findall(r"\b(wgmma|mma)\.\S*?m\d+n\d+(k\d+\S*)", text)
        self._products = sorted({" ".join(parts) for parts in instructions})
        # The left operand is a list of registers, `{...}`, not a descriptor of shared memory.
        self._reads_registers = re.search(r"\bwgmma\.mma\S* \{[^}]*\}, *\{", text) is not None

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        self._num_warps = metadata.num_warps
        return lambda *args: None

    def _load_binary(
        self, name: str, cubin: bytes, shared_bytes: int, device: int
    ) -> tuple[int, int, int, int, int]:
        registers, stack_bytes = _resource_usage(cubin)
        self.kernels[cubin] = KernelResources(
            name,
            self._num_warps,
            registers,
            shared_bytes,
            stack_bytes,
            self._global_loads,
            self._products,
            # Only operands in registers can be overwritten, and the disassembler takes a second for each kernel.
            overwritten_operands(_disassembled(cubin)) if self._reads_registers else [],
        )
        return 1, 1, registers, stack_bytes, 1024


def _resource_usage(cubin: bytes) -> tuple[int, int]:
    from triton import knobs

    usage = _output_of([knobs.nvidia.cuobjdump.path, "--dump-resource-usage"], cubin)
    registers, stack_bytes = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return int(registers), int(stack_bytes)


def _disassembled(cubin: bytes) -> str:
    from triton import knobs

    return _output_of([knobs.nvidia.nvdisasm.path, "--print-code"], cubin)


def _output_of(command: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], capture_output=True, text=True, check=True
        ).stdout


def _main(file: str, function: str, *arguments: str) -> None:
    from triton import knobs
    from triton.runtime import driver

    hopper = _HopperWithoutADevice()
    driver.set_active(hopper)
    knobs.compilation.listener = hopper.note_products
    runpy.run_path(file)[function](*arguments)
    print(json.dumps([asdict(kernel) for kernel in hopper.kernels.values()]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
