"""Setuptools commands that compile the native library from all of `csrc` and name its wheel."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# More gain little: one source takes a fifth of the time of all. Each needs up to 0.4 GB, and a container may have less
# memory than that for all processors of its machine.
MAX_COMPILERS = 4

# Setuptools runs in the root of the project and wants paths relative to it.
CSRC = Path("workers", "cpu", "csrc")

LIBRARY = "_native.so"
"""One name for every version of Python: ctypes loads the library, and it uses nothing of CPython."""


class BuildNative(build_ext):
    """Compile the native library. With `ENGINE_REQUIRE_NATIVE=1` a failed compilation is an error."""

    def finalize_options(self) -> None:
        super().finalize_options()
        (native,) = self.extensions
        native.optional = os.environ.get("ENGINE_REQUIRE_NATIVE", "0") in ("", "0")
        files = sorted(path.as_posix() for path in CSRC.rglob("*.*"))
        native.sources = [file for file in files if file.endswith(".cpp")]
        # These complete a source distribution, and a change of one of them compiles all sources again.
        native.depends = [file for file in files if file.endswith((".h", ".inc"))]

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")[:-1], LIBRARY)

    def build_extensions(self) -> None:
        compile_one = self.compiler.compile

        def compile_all(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_COMPILERS)) as pool:
                objects = pool.map(lambda source: compile_one([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_all
        super().build_extensions()


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]
