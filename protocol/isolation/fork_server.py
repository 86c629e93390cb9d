"""A program that forks disposable processes, each of which serves one socket.

It loads everything that the processes need once, so that a fork takes only milliseconds. For each socket that arrives
it forks a child, which sends a greeting. When a child exits, its client receives the signal that ended it. A child that
is stopped is killed, because its client would wait for it. The program exits together with the process that started
it, and each child when its socket is closed or the program exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Callable
from typing import TypeAlias

from ..process import ignore_stop_signals, name_process, send_when_parent_exits
from .limits import limit_memory
from .messages import GREETING, Exited, frame

Serve: TypeAlias = Callable[[socket.socket], None]
"""A function that serves one socket until its client closes it."""


def run_fork_server(
    control: socket.socket, name: str, load: Callable[[], Serve], max_memory_bytes: int
) -> None:
    """Serve sockets until the process that started this one exits.

    Args:
        control: The socket on which the sockets of clients arrive.
        name: The name of the children in the process table.
        load: Prepares this process, and returns the function that each child runs.
        max_memory_bytes: The memory that a child may allocate in addition to the loaded data.
    """
    name_process(f"{name} fork server")
    ignore_stop_signals()
    _ForkServer(control, name, load(), max_memory_bytes).run()


class _ForkServer:
    def __init__(
        self, control: socket.socket, name: str, serve: Serve, max_memory_bytes: int
    ) -> None:
        self._control = control
        self._name, self._serve, self._max_memory_bytes = name, serve, max_memory_bytes
        self._clients: dict[int, socket.socket] = {}
        self._stopped: set[int] = set()

    def run(self) -> None:
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda signum, stack: None)
        while True:
            readable, _, _ = select.select([self._control, woken], [], [])
            if woken in readable:
                with contextlib.suppress(BlockingIOError):
                    woken.recv(4096)
                self._reap()
            if self._control in readable:
                data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
                if not data:
                    # The children that exit from here on find the wakeup socket closed.
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    signal.set_wakeup_fd(-1)
                    return
                for fd in fds:
                    client = socket.socket(fileno=fd)
                    self._clients[self._fork(client)] = client

    def _fork(self, client: socket.socket) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            # A child that is stopped cannot exit by itself.
            send_when_parent_exits(signal.SIGKILL)
            for other in (self._control, *self._clients.values()):
                other.close()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            name_process(self._name)
            # Discard what libraries print before they abort.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            limit_memory(self._max_memory_bytes)
            client.sendall(GREETING)
            self._serve(client)
        finally:
            os._exit(1)

    def _reap(self) -> None:
        """Report exited children to their clients, and kill stopped ones."""
        while self._clients:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if not pid:
                return
            if os.WIFSTOPPED(status):
                self._stopped.add(pid)
                os.kill(pid, signal.SIGKILL)
                continue
            signum = max(-os.waitstatus_to_exitcode(status), 0)
            if pid in self._stopped:
                self._stopped.remove(pid)
                signum = signal.SIGSTOP
            client = self._clients.pop(pid)
            with contextlib.suppress(OSError):
                client.setblocking(False)
                client.sendall(frame(Exited(signum)))
            client.close()
