"""A server with a store that can be killed, as a whole or in parts, and started again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from support.processes.program import has_ended, wait_until
from support.servers.server import Server, Upgrade


class DurableEngine:
    """A server with two frontends, and the servers that follow it on the same store.

    Args:
        path: The file of the store.
        run: The directory of the sockets. Its path must be short.
        args: Arguments of `engine serve`, the model first.
    """

    def __init__(self, path: Path, run: str, *args: str) -> None:
        self._args = (*args, "--store", str(path), "--api-server-count", "2")
        self._env = {"XDG_RUNTIME_DIR": run}
        self._is_up = True
        self.server = self._start()
        self._url = self.server.url

    def _start(self) -> Server:
        return Server(*self._args, env=self._env)

    @contextmanager
    def upgrade(self) -> Iterator[Server]:
        """Start a server that takes the place of this one, which is yielded. The caller waits until it is ready."""
        with self.server as old:
            self.server = Upgrade(env=self._env)
            self.server.wait_for("model ")
            yield old

    def find_url(self) -> str:
        """Return the address of the server; an empty text while there is none."""
        if self._is_up:
            # A server that takes the place of another one has the same address.
            self._url = self.server.url if "ready at" in self.server.log else self._url
        return self._url if self._is_up else ""

    def kill_all(self) -> None:
        """Kill every process at once, and start another server."""
        self._replace([*self.server.find_children(), psutil.Process(self.server.process.pid)])

    def kill_supervisor(self) -> None:
        """Kill the supervisor alone. Another one takes its place, and streams do not notice."""
        self.kill("supervisor")

    def kill_guardian(self) -> None:
        """Kill the guardian alone, wait until all processes have ended by themselves, and start another server."""
        self._replace([psutil.Process(self.server.process.pid)])

    def _replace(self, victims: list[psutil.Process]) -> None:
        self._is_up = False
        children = self.server.find_children()
        for victim in victims:
            victim.kill()
        self.server.process.wait()
        wait_until(lambda: all(map(has_ended, children)), what="no process is left")
        with self.server:
            pass
        self.server = self._start()
        self._is_up = True

    def kill(self, title: str) -> None:
        """Kill one process, and wait until another one has taken its place."""
        victim = self.server.child(title)
        victim.kill()
        wait_until(lambda: has_ended(victim), what=f"{title} is gone")
        wait_until(lambda: self.server.child(title).pid != victim.pid, what="there is another one")
