"""What a streamed token costs the frontend and the core in CPU time, on a real server.

    scripts/bench/run cpu_cost [--model PATH] [-c 64 256] [--max-tokens 128]

Every stream has a connection of its own. Times are of whole processes, in microseconds an event, while all streams
run; an event is a token unless the frontend falls behind. A small model gives many tokens soon at the same cost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.parse
from pathlib import Path

from local_server import LocalServer, local_server

WATCHED = ("frontend 0", "core 0")
PROMPT_TOKENS = 16
FIRST_ORDINARY_ID = 300


class Window:
    """The time in which every stream streams: from the last one's first event to the first one's end."""

    def __init__(self, server: LocalServer, streams: int) -> None:
        self._server = server
        self._num_silent = streams
        self._num_events = 0
        self._start = self._stop = self._read()

    def event(self, count: int, is_first: bool) -> None:
        self._num_events += count
        if is_first:
            self._num_silent -= 1
            if not self._num_silent:
                self._start = self._stop = self._read()

    def end(self) -> None:
        if self._stop is self._start:
            self._stop = self._read()

    def result(self) -> dict[str, float]:
        (begin, events_before, before), (end, events_after, after) = self._start, self._stop
        events = events_after - events_before
        result = {"events": events, "events_a_second": round(events / (end - begin), 1)}
        for name in WATCHED:
            microseconds = (after[name] - before[name]) / events / 1e3
            result[f"{name.split()[0]}_us"] = round(microseconds, 2)
        return result

    def _read(self) -> tuple[float, int, dict[str, int]]:
        times = {name: cpu_ns(self._server.processes[name].pid) for name in WATCHED}
        return time.perf_counter(), self._num_events, times


def cpu_ns(pid: int) -> int:
    """The CPU time of a process's threads, finer than what the kernel says of the process."""
    return sum(
        int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


class Stream(asyncio.Protocol):
    def __init__(self, window: Window, request: bytes) -> None:
        self._window = window
        self._request = request
        self._has_begun = False
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun and b"HTTP/1.1 " in data and b"HTTP/1.1 200" not in data:
            raise SystemExit(f"the server answered {data[:200]!r}")
        if events := data.count(b"data: {"):
            self._window.event(events, not self._has_begun)
            self._has_begun = True
        if b"data: [DONE]" in data:
            self._window.end()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set_result(error)


async def measure(server: LocalServer, streams: int, max_tokens: int) -> dict[str, float]:
    address = urllib.parse.urlsplit(server.url)
    host, port = address.hostname, address.port
    assert host is not None and port is not None
    window = Window(server, streams)
    loop = asyncio.get_running_loop()

    async def run(number: int) -> None:
        body = json.dumps(
            {
                "model": "cost",
                "prompt": [FIRST_ORDINARY_ID + number % 64] * PROMPT_TOKENS,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        ).encode()
        request = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        _, protocol = await loop.create_connection(lambda: Stream(window, request), host, port)
        await protocol.closed

    await asyncio.gather(*(run(number) for number in range(streams)))
    return {"streams": streams, **window.result()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("-c", "--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("serve", nargs="*", help="more arguments of `engine serve`")
    arguments = parser.parse_args()
    model = [arguments.model] if arguments.model else []
    slots = ["--max-num-seqs", str(max(arguments.streams)), "--served-model-name", "cost"]
    with local_server([*model, *slots, *arguments.serve]) as server:
        asyncio.run(measure(server, 8, 16))
        for streams in arguments.streams * arguments.rounds:
            print(json.dumps(asyncio.run(measure(server, streams, arguments.max_tokens))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
