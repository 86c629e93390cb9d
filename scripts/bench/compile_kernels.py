"""Compile every Triton kernel for Hopper with several releases of Triton, without a GPU.

    scripts/bench/run compile_kernels [--triton 3.5.1 3.6.0 3.7.1] [--only decode_kernel ...]

For each release: the number of compiled kernels, and the kernels that do not fit on a multiprocessor, that spill
registers, or whose product reads registers that another instruction overwrites (triton-lang/triton#9433). Releases are
downloaded by pip. It exits with 1 if a kernel does not compile or is listed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from support.gpu.triton_compile import KernelResources, compile_for_hopper

TESTS = Path(__file__).parents[2] / "tests" / "workers"
LAUNCHERS = (TESTS / "cuda" / "test_compile.py", TESTS / "attention" / "launch_triton_paged.py")
RELEASES = ("3.5.1", "3.6.0", "3.7.1")
"""The last one of each minor release that pyproject.toml admits."""

MOST_STACK_BYTES = 64
"""Compilers may differ by a few spilled registers."""


def faults(kernel: KernelResources) -> Iterator[str]:
    if not kernel.fits:
        yield f"needs {kernel.registers} registers of {32 * kernel.num_warps} threads and {kernel.shared_bytes} bytes"
    if kernel.stack_bytes > MOST_STACK_BYTES:
        yield f"spills {kernel.stack_bytes} bytes"
    yield from kernel.overwritten


def compile_with(release: str, only: list[str]) -> bool:
    """Print how a release of Triton compiles the kernels. Return whether there are no problems."""
    with tempfile.TemporaryDirectory() as name:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--target", name, f"triton=={release}"], check=True)
        sys.path.insert(0, name)
        try:
            kernels = [
                kernel
                for launcher in LAUNCHERS
                for kernel in compile_for_hopper(str(launcher), "launch_all")
                if not only or kernel.name in only
            ]
        except AssertionError as error:
            print(f"Triton {release}: {str(error)[-2000:]}")
            return False
        finally:
            sys.path.remove(name)
    counts = Counter(kernel.name for kernel in kernels)
    print(f"Triton {release}: " + ", ".join(f"{n} {name}" for name, n in sorted(counts.items())))
    found = [f"  {kernel.name}: {fault}" for kernel in kernels for fault in faults(kernel)]
    print("\n".join(found or ["  no faults"]), flush=True)
    return not found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--triton", nargs="+", default=RELEASES, metavar="RELEASE")
    parser.add_argument("--only", nargs="+", default=[], metavar="KERNEL")
    arguments = parser.parse_args()
    results = [compile_with(release, arguments.only) for release in arguments.triton]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
