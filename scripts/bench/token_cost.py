"""Measure the cost of a streamed token without the model: CPU time of the frontends, the store and the core.

    scripts/bench/run token_cost [-c 256] [--step-ms 20] [--api-server-count 1 2] [--clients 1] [-- serve arguments]
    scripts/bench/run token_cost --paired -- --store /tmp/store.db

The worker computes nothing (`--device null`). Every stream has its own connection. Times are CPU times of whole
processes, in microseconds per token, over a window in which all streams run. Several tokens share one event if they
share a character, or if the frontend falls behind. With a step time that overloads one frontend, `tokens_a_second`
shows the gain from more frontends. `-- --device cpu` measures a real model. With `--paired`, rounds alternate between a
server with the arguments after `--` and one without them, which is idle meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from support.servers.server import Server, title_of

PROMPT_TOKENS = 16
FIRST_ORDINARY_ID = 300
MAX_TOKENS = 8000
SETTLE_S = 0.5


class Counts:
    """The numbers of streams begun and ended and of events received by a client process, in shared memory."""

    def __init__(self) -> None:
        self.begun: Synchronized[int] = multiprocessing.Value("q", 0, lock=False)
        self.events: Synchronized[int] = multiprocessing.Value("q", 0, lock=False)
        self.ended: Synchronized[int] = multiprocessing.Value("q", 0, lock=False)


class Stream(asyncio.Protocol):
    def __init__(self, counts: Counts, request: bytes) -> None:
        self._counts = counts
        self._request = request
        self._has_begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if events := data.count(b"data: {"):
            self._counts.events.value += events
            if not self._has_begun:
                self._has_begun = True
                self._counts.begun.value += 1

    def connection_lost(self, error: Exception | None) -> None:
        self._counts.ended.value += 1


def run_client(url: str, streams: int, counts: Counts) -> None:
    """Stream until this process is killed."""
    address = urllib.parse.urlsplit(url)
    host, port = address.hostname, address.port
    assert host is not None and port is not None

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for number in range(streams):
            body = json.dumps(
                {
                    "prompt": [FIRST_ORDINARY_ID + number % 64] * PROMPT_TOKENS,
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                    "stream": True,
                }
            ).encode()
            request = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
                % (len(body), body)
            )
            stream = Stream(counts, request)
            await loop.create_connection(
                lambda stream=stream: stream,  # type: ignore[misc]
                host,
                port,
            )
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def clients(url: str, streams: int, processes: int) -> Iterator[list[Counts]]:
    """Return client processes, after all of their streams have begun."""
    counts = [Counts() for _ in range(processes)]
    shares = [len(range(i, streams, processes)) for i in range(processes)]
    started = [
        multiprocessing.Process(target=run_client, args=(url, share, each), daemon=True)
        for share, each in zip(shares, counts, strict=True)
    ]
    for process in started:
        process.start()
    try:
        while total(counts, "begun") < streams:
            if total(counts, "ended") or not all(process.is_alive() for process in started):
                raise SystemExit("a stream ended before all streams had started")
            time.sleep(0.01)
        yield counts
    finally:
        for process in started:
            process.kill()
            process.join()


def total(counts: list[Counts], name: str) -> int:
    return sum(getattr(each, name).value for each in counts)


def cpu_ns(pid: int) -> int:
    """Return the CPU time of a process in nanoseconds, summed over its threads.

    `/proc/PID/task/*/schedstat` counts nanoseconds; `/proc/PID/stat` counts ticks of 10 ms.
    """
    return sum(
        int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def measure(server: Server, streams: int, processes: int, window_s: float) -> dict[str, Any]:
    def read(counts: list[Counts]) -> tuple[float, int, int, dict[str, int]]:
        # One frontend answers for all. Its figures of the others are up to a second old.
        tokens = round(server.metric("engine:generation_tokens_total"))
        times = {title_of(child): cpu_ns(child.pid) for child in server.children}
        return time.perf_counter(), total(counts, "events"), tokens, times

    with clients(server.url, streams, processes) as counts:
        time.sleep(SETTLE_S)
        begin, events_before, tokens_before, before = read(counts)
        time.sleep(window_s)
        end, events_after, tokens_after, after = read(counts)
        if total(counts, "ended"):
            raise SystemExit(
                "a stream ended during the measurement; use a longer step or fewer seconds"
            )
    tokens = tokens_after - tokens_before
    result: dict[str, Any] = {
        "tokens_a_second": round(tokens / (end - begin)),
        "events_to_tokens": round((events_after - events_before) / tokens, 3),
    }
    for kind in ("frontend", "store", "core", "worker"):
        names = [name for name in before if name.split()[0] == kind]
        spent = sum(after[name] - before[name] for name in names)
        result[f"{kind}_us"] = round(spent / tokens / 1e3, 2)
        result[f"{kind}_busy"] = round(spent / (end - begin) / 1e9, 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-c", "--streams", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--api-server-count", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--clients", type=int, default=1, help="number of client processes that read the streams"
    )
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--paired", action="store_true", help="compare with a server without them")
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    arguments = parser.parse_args()
    null = ["--device", "null", "--null-step-ms", str(arguments.step_ms)]
    slots = ["--max-num-seqs", str(arguments.streams)]
    for count in arguments.api_server_count:
        frontends = ["--api-server-count", str(count)]
        given = [[], arguments.serve] if arguments.paired else [arguments.serve]
        with ExitStack() as stack:
            servers = [
                stack.enter_context(Server(*null, *slots, *frontends, *more)) for more in given
            ]
            for _, (more, server) in product(
                range(arguments.rounds), zip(given, servers, strict=True)
            ):
                result = measure(server, arguments.streams, arguments.clients, arguments.seconds)
                point = {"cores": os.cpu_count(), "frontends": count, "streams": arguments.streams}
                print(json.dumps({**point, "serve": " ".join(more), **result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
