"""How setuptools compiles the native library: each processor a source at a time."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from setuptools.command.build_ext import build_ext


class BuildNative(build_ext):
    def build_extensions(self) -> None:
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                objects = pool.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()
