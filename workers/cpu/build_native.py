"""How setuptools compiles the native library: all of `csrc`, several sources at once."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools.command.build_ext import build_ext

# More gain little, as one source takes a fifth of the time that all take, and each needs up to 0.4 GB: a container may
# have less memory than that for all processors of its machine.
MOST_AT_ONCE = 4


# As setuptools wants paths: from the root of the project, which it is run in.
CSRC = Path("workers", "cpu", "csrc")


class BuildNative(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        (native,) = self.extensions
        files = sorted(path.as_posix() for path in CSRC.iterdir())
        native.sources = [file for file in files if file.endswith(".cpp")]
        # With these, too, a source distribution is complete, and a change of one compiles all sources again.
        native.depends = [file for file in files if file.endswith((".h", ".inc"))]

    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_AT_ONCE)) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()
