"""Measure the effect of slow clients on others: latency of their streams, and the frontend's memory.

    scripts/bench/run slow_clients [--idle 10000] [--tricklers 200] [--sleepers 50] [--rounds 3]

Idle clients connect and send nothing. Tricklers send a byte per second. Sleepers request a long stream and never read
it. In each round, the same streams are measured without them and with them. The worker computes nothing (`--device
null`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import socket
import statistics
import sys
import time
import urllib.parse
from typing import Any

from support.server import Server

STREAMS = 16
STEP_MS = 10


def request_bytes(max_tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": [300], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return (head + f"Content-Length: {len(body)}\r\n\r\n").encode() + body


async def measure(host: str, port: int, seconds: float) -> list[float]:
    """Return the milliseconds between the events of a few streams."""
    gaps: list[float] = []

    async def stream() -> None:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(request_bytes(round(seconds * 1000 / STEP_MS)))
        last = 0.0
        while line := await reader.readline():
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last:
                    gaps.append((now - last) * 1000)
                last = now
        writer.close()

    await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return gaps


class Nuisance:
    """The slow clients. Those that the server disconnects connect again."""

    def __init__(self, host: str, port: int, idle: int, tricklers: int, sleepers: int) -> None:
        self._address = host, port
        self._counts = {"": idle, "trickle": tricklers, "sleep": sleepers}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        for kind, count in self._counts.items():
            for _ in range(count):
                self._tasks.append(asyncio.create_task(self._annoy(kind)))
                if len(self._tasks) % 200 == 0:
                    await asyncio.sleep(0.02)
        await asyncio.sleep(2)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _annoy(self, kind: str) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with socket.socket() as client:
                client.setblocking(False)
                if kind == "sleep":
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                try:
                    await loop.sock_connect(client, self._address)
                    if kind == "sleep":
                        await loop.sock_sendall(client, request_bytes(8000))
                        await asyncio.sleep(3600)
                    elif kind == "trickle":
                        for byte in b"POST /v1/completions HTTP/1.1\r\nX-Slow: " + b"x" * 3600:
                            await loop.sock_sendall(client, bytes([byte]))
                            await asyncio.sleep(1)
                    else:
                        await loop.sock_recv(client, 1)
                except OSError:
                    await asyncio.sleep(0.1)


async def compare(server: Server, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    address = urllib.parse.urlsplit(server.url)
    host, port = address.hostname, address.port
    assert host is not None and port is not None
    frontend = server.child("frontend 0")
    await measure(host, port, 1)
    results = []
    for _ in range(arguments.rounds):
        before = frontend.memory_info().rss
        alone = await measure(host, port, arguments.seconds)
        nuisance = Nuisance(host, port, arguments.idle, arguments.tricklers, arguments.sleepers)
        await nuisance.start()
        beside = await measure(host, port, arguments.seconds)
        memory = frontend.memory_info().rss - before
        connections = frontend.num_fds()
        await nuisance.stop()
        result: dict[str, Any] = {
            "connections": connections,
            "frontend_mib": round(memory / 2**20, 1),
        }
        for name, gaps in (("alone", alone), ("beside", beside)):
            result[f"{name}_p50_ms"] = round(statistics.median(gaps), 2)
            result[f"{name}_p99_ms"] = round(statistics.quantiles(gaps, n=100)[98], 2)
        results.append(result)
        print(json.dumps(result), flush=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--tricklers", type=int, default=200)
    parser.add_argument("--sleepers", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    arguments = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    slots = str(STREAMS + arguments.sleepers)
    null = ["--device", "null", "--null-step-ms", str(STEP_MS), "--max-num-seqs", slots]
    with Server(*null, *arguments.serve) as server:
        asyncio.run(compare(server, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
