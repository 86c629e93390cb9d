"""A fork server ends without a word when its client does."""

from __future__ import annotations

import socket
import subprocess
import sys

PROGRAM = """
import contextlib, os, socket, sys
from engine.protocol.isolation.fork_server import run_fork_server
run_fork_server(socket.socket(fileno=int(sys.argv[1])), "test", lambda: lambda s: s.recv(1), 1 << 30)
# Some children may have exited before the fork server learned that it is over.
with contextlib.suppress(ChildProcessError):
    while True:
        os.wait()
"""


def test_children_that_exit_together_with_the_fork_server_leave_no_error() -> None:
    for _ in range(3):
        control, given = socket.socketpair()
        with control, given:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(given.fileno())],
                pass_fds=[given.fileno()],
                stderr=subprocess.PIPE,
            )
            clients = []
            for _ in range(8):
                client, end = socket.socketpair()
                with end:
                    socket.send_fds(control, [b"x"], [end.fileno()])
                assert client.recv(1)
                clients.append(client)
        for client in clients:
            client.close()
        assert process.communicate()[1] == b""
