"""Programs in Python environments of their own, such as those of peers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """Raised if a peer cannot run on this machine."""


class Child:
    """A script of this folder that answers each line of JSON with an object on a line.

    Its first line is an object, too, which has `error` if the script cannot run.

    Raises:
        Skipped: The environment is missing, or the script cannot run.
    """

    def __init__(self, python: Path, script: str, *arguments: object) -> None:
        if not python.is_file():
            raise Skipped(f"{python} is missing")
        self._script = script
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name(script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.pid = self._process.pid
        if error := self._read().get("error"):
            self.close()
            raise Skipped(error)

    def ask(self, question: object) -> dict[str, Any]:
        """Return the answer to a question."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # Libraries also write to the standard output, so skip other lines.
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise Skipped(f"{self._script} ended with {self._process.wait()}")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
