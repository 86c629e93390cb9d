"""A server of this checkout, for benchmarks that look at its processes."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil


@dataclass
class LocalServer:
    """`processes` by the names they have in `ps`, without "engine: "."""

    url: str
    processes: dict[str, psutil.Process]


@contextlib.contextmanager
def local_server(arguments: Sequence[str]) -> Iterator[LocalServer]:
    """`engine serve` with these arguments, on a free port, ready; it is stopped at the end."""
    server = subprocess.Popen(
        [sys.executable, "-m", "engine.frontend.cli", "serve", *arguments, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        lines = []
        for line in server.stderr:
            lines.append(line)
            if ready := re.search(r"ready at (http://\S+)", line):
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        children = psutil.Process(server.pid).children(recursive=True)
        names = {child.cmdline()[0].removeprefix("engine: "): child for child in children}
        yield LocalServer(ready[1].rstrip("/"), names)
    finally:
        server.send_signal(signal.SIGINT)
        server.communicate()
