"""Measure how long streams pause when a process of a real server is killed, up to the next token.

    scripts/bench/run recovery --streams 32 --kills 5 [-- serve arguments]

Prints a line of JSON for each kind of process that is killed. Times are in milliseconds: until the first stream
continues, and until the last does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from support.processes.program import wait_until
from support.requests.mixed_streams import Streams
from support.servers.server import Server, default_model

IN_TRANSIT_S = 0.05
"""Seconds after a kill in which arriving tokens had been sent before it."""

START_S = 60.0

SETTLE_S = 4.0
"""Seconds between two kills. Real crashes are rarer."""


def measure(server: Server, title: str, num_streams: int) -> tuple[float, float]:
    """Return the seconds from the kill to the next token of the first and of the last stream."""
    body = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    streams = Streams(server, [{"prompt": f"Tale {i}:", **body} for i in range(num_streams)])
    wait_until(lambda: all(stream.num_events > 3 for stream in streams.streams), START_S)
    victim = server.child(title)
    killed = time.perf_counter()
    victim.kill()
    time.sleep(IN_TRANSIT_S)
    waiting = {id(stream): stream.num_events for stream in streams.streams}
    first = 0.0
    while waiting:
        for stream in streams.streams:
            if stream.num_events > waiting.get(id(stream), sys.maxsize):
                del waiting[id(stream)]
                first = first or time.perf_counter() - killed
        time.sleep(0.001)
    last = time.perf_counter() - killed
    for stream in streams.streams:
        stream.max_events = 0
    for answer in streams.answers():
        assert "error" not in answer and "connection" not in answer, answer
    wait_until(lambda: server.metric("engine:num_requests_running") == 0)
    return first, last


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--kills", type=int, default=3, help="number of times to kill each victim")
    parser.add_argument("--victims", nargs="+", default=["core 0", "worker 0"])
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    args = parser.parse_args()
    limits = ("--max-model-len", "1024", "--max-num-seqs", str(max(args.streams, 16)))
    with Server(args.model, *limits, *args.serve) as server:
        for title in args.victims:
            pauses = []
            for _ in range(args.kills):
                time.sleep(SETTLE_S)
                pauses.append(measure(server, title, args.streams))
            first, last = zip(*pauses, strict=True)
            result = {
                "victim": title,
                "streams": args.streams,
                "kills": args.kills,
                "first_ms_median": round(statistics.median(first) * 1e3),
                "last_ms_median": round(statistics.median(last) * 1e3),
                "last_ms_worst": round(max(last) * 1e3),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
