"""Setuptools commands that compile the native library from all sources in `csrc`, and set the tag of its wheel."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

MAX_COMPILERS = 4
"""Maximum number of compilers at the same time.

One source takes a fifth of the time of all together, so more compilers would gain little. Each needs up to 0.4 GB of
memory, and a container may have less than that per CPU core of its machine.
"""

# Setuptools runs in the root of the project, and requires paths relative to it.
CSRC = Path("workers", "cpu", "csrc")

INSTRUCTION_SETS = CSRC / "isa" / "instruction_sets.inc"
KERNELS = "kernels.cpp"
"""Name of the sources that are compiled once per instruction set."""

SUBJECTS = ("linear", "attention", "rows", "sampling")
"""Folders that contain such a source, in the order of the columns of `INSTRUCTION_SETS`."""

LIBRARY = "_native.so"
"""Name of the library, the same for every Python version, because ctypes loads it and it does not use CPython."""


class BuildNative(build_ext):
    """Compiles the native library. If `ENGINE_REQUIRE_NATIVE=1`, a failed compilation is an error."""

    def finalize_options(self) -> None:
        """List the sources and headers."""
        super().finalize_options()
        (native,) = self.extensions
        native.optional = os.environ.get("ENGINE_REQUIRE_NATIVE", "0") in ("", "0")
        native.include_dirs = [CSRC.as_posix()]
        files = sorted(path.as_posix() for path in CSRC.rglob("*.*"))
        native.sources = [file for file in files if file.endswith(".cpp")]
        # Headers belong to a source distribution, and a change of one must recompile all sources.
        native.depends = [file for file in files if file.endswith((".h", ".inc"))]

    def get_ext_filename(self, fullname: str) -> str:
        """Return the library's path."""
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extension(self, ext: Extension) -> None:
        """Compile the sources in parallel, and kernels once per instruction set."""
        compile_one = self.compiler.compile

        def compile_all(
            sources: list[str], *, output_dir: str, macros: list[Any], **options: Any
        ) -> list[str]:
            targets = kernel_targets(self.compiler.compiler_so_cxx)

            def compile_for(job: tuple[str, str | None]) -> list[str]:
                source, target = job
                if target is None:
                    return compile_one([source], output_dir=output_dir, macros=macros, **options)
                return compile_one(
                    [source],
                    output_dir=os.path.join(output_dir, target),
                    macros=[*macros, ("ENGINE_TARGET", target)],
                    **options,
                )

            jobs: list[tuple[str, str | None]] = []
            for source in sources:
                path = Path(source)
                if path.name == KERNELS:
                    jobs += [(source, target) for target in targets[path.parent.name]]
                else:
                    jobs.append((source, None))
            with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
                return [path for paths in pool.map(compile_for, jobs) for path in paths]

        self.compiler.compile = compile_all
        super().build_extension(ext)


def kernel_targets(compiler: Sequence[str]) -> dict[str, list[str]]:
    """Return the instruction sets for which each folder's kernels are compiled, according to `INSTRUCTION_SETS`.

    The compiler's preprocessor evaluates the conditions in the list, which depend on its target machine and features.

    Args:
        compiler: The compiler's command, with arguments.

    Raises:
        CompileError: The compiler cannot be run.
    """
    command = [*compiler, "-E", "-P", "-x", "c++", str(INSTRUCTION_SETS)]
    try:
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompileError(str(error)) from error
    columns = ",".join([r"\s*(\w+)\s*"] * len(SUBJECTS))
    rows = re.findall(rf"ENGINE_ISA\(\w+,{columns},", text)
    return {
        subject: sorted(set(column))
        for subject, column in zip(SUBJECTS, zip(*rows, strict=True), strict=True)
    }


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and all versions of Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tag of the wheel: Python, ABI, platform."""
        return "py3", "none", super().get_tag()[2]
