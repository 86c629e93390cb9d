"""Two machines for an engine: network namespaces where they are permitted, else addresses of the loopback interface."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from support.processes.program import Program


@dataclass(frozen=True)
class Machine:
    """A machine: the prefix of a command line that runs there, and its environment."""

    address: str
    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)


def program(machine: Machine, *args: str, launcher: list[str] | None = None) -> Program:
    """Run an `engine` command, or that of `launcher`, on a machine."""
    engine = [sys.executable, "-P", "-m", "engine.frontend.cli.main"]
    command = [*machine.prefix, *(launcher or engine), *args]
    return Program(command, {"OMP_NUM_THREADS": "1", **machine.env})


def client(uds: Path) -> httpx.Client:
    return httpx.Client(
        transport=httpx.HTTPTransport(uds=str(uds)), base_url="http://engine", timeout=120
    )


def free_ports(address: str, count: int) -> int:
    """Return the first of `count` adjacent ports that are not in use."""
    while True:
        first = random.randrange(20_000, 30_000)
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    listener = stack.enter_context(socket.socket())
                    listener.bind((address, port))
            except OSError:
                continue
        return first


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    with ExitStack() as stack:
        machines = _namespaces(stack)
        if machines is None:
            env = {"GLOO_SOCKET_IFNAME": "lo"}
            machines = Machine("127.0.0.1", env=env), Machine("127.0.0.2", env=env)
        yield machines


def _namespaces(stack: ExitStack) -> tuple[Machine, Machine] | None:
    """Create two connected network namespaces in one user namespace; None if the system forbids it."""

    def hold(*command: str) -> int:
        """Return the id of a process that keeps a namespace alive."""
        holder = subprocess.Popen(
            [*command, "sh", "-c", "echo held; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(holder.wait)
        stack.callback(holder.kill)
        assert holder.stdout is not None
        if holder.stdout.readline() != b"held\n":
            raise PermissionError
        return holder.pid

    def enter(pid: int) -> list[str]:
        return ["nsenter", "-t", str(pid), "-U", "-n", "--preserve-credentials"]

    def run(pid: int, script: str) -> None:
        subprocess.run([*enter(pid), "sh", "-ec", script], check=True, capture_output=True)

    try:
        first = hold("unshare", "-Urn")
        second = hold("nsenter", "-t", str(first), "-U", "--preserve-credentials", "unshare", "-n")
        run(first, f"ip link add cable0 type veth peer name cable1 netns {second}")
        for pid, device, address in ((first, "cable0", "10.9.0.1"), (second, "cable1", "10.9.0.2")):
            run(
                pid,
                f"ip addr add {address}/24 dev {device}; ip link set {device} up; ip link set lo up",
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return (
        Machine("10.9.0.1", enter(first), {"GLOO_SOCKET_IFNAME": "cable0"}),
        Machine("10.9.0.2", enter(second), {"GLOO_SOCKET_IFNAME": "cable1"}),
    )
