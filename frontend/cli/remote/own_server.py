"""A server that a command starts for itself on a Unix socket, and stops when the command ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

from ....protocol.errors import EngineError
from ..arguments import parse_settings
from .server import RemoteServer, ServerError

READY_POLL_S: Final = 0.1


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[RemoteServer]:
    """Run `engine serve FLAGS`, with its progress on stderr, and yield the server when it is ready.

    The server logs no statistics, because they would appear within the output of the command. Ctrl-C does not reach the
    server, so that it can end an answer without ending the server. Invalid flags exit with code 2.

    Raises:
        EngineError: The server does not start.
    """
    api_keys = parse_settings(flags)["frontend"].get("api_keys")
    with tempfile.TemporaryDirectory(prefix="engine-own-") as directory, _signals_that_exit():
        path = f"{directory}/http"
        command = [sys.executable, "-P", "-m", "engine.frontend.cli.main", "serve"]
        process = subprocess.Popen(
            [*command, "--disable-log-stats", *flags, "--uds", path],
            stdout=sys.stderr,
            process_group=0,
        )
        try:
            server = RemoteServer(f"unix:{path}", api_keys[0] if api_keys else None)
            _wait_until_ready(process, server)
            yield server
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], server: RemoteServer) -> None:
    while process.poll() is None:
        try:
            server.read_text("/readyz")
            return
        except ServerError as error:
            # The socket does not exist yet, or the model is still loading.
            if error.status not in (None, 503):
                raise
        time.sleep(READY_POLL_S)
    raise EngineError(f"the engine has exited with code {process.returncode}")


@contextmanager
def _signals_that_exit() -> Iterator[None]:
    """Raise SystemExit on SIGTERM and SIGHUP, so that the server is stopped before this process ends."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + signum)

    before = {signum: signal.signal(signum, leave) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
