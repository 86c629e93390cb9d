"""Run mixed traffic on a real server, and crash or stop a random process every few seconds.

    scripts/bench/run chaos --minutes 30 --every 20

Traffic comes in waves: requests of all kinds at the same time, and clients that disconnect. Every answer must equal the
one from an undisturbed run; connections may break only at a frontend that was crashed or stopped. After each wave,
every block and slot must be free. Prints a line of JSON per wave and a summary. Exits with 1 after a wrong stream, a
leak or a violated invariant.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import psutil
from support.faults import ENVIRONMENT, FAULTS
from support.mixed_streams import Streams, bodies
from support.program import wait_until
from support.server import Server, default_model, title_of

HARMS_CHILDREN = ("terminated", "out of memory")
"""Faults that are not for the supervisor: it stops the server, or its children inherit the limit of memory."""

RECOVERY_S = 60.0
TICK_S = 0.05
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Havoc:
    """A thread that crashes or stops a random process every `every_s` seconds, except while one is being replaced."""

    def __init__(
        self, server: Server, every_s: float, titles: list[str], rng: random.Random
    ) -> None:
        self._server = server
        self._every_s = every_s
        self._titles = titles
        self._rng = rng
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._frontends: list[psutil.Process] = []
        self.faults: Counter[str] = Counter()
        self.ports: set[int] = set()
        """Ports of the clients whose frontend was crashed or stopped."""
        self.num_frontend_faults = 0

    def __enter__(self) -> Havoc:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop causing faults."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        next_at = time.monotonic() + self._every_s
        while not self._over.wait(TICK_S):
            # A frontend may still accept connections between the fault and its exit.
            self._frontends = [each for each in self._frontends if self._note_clients(each)]
            if time.monotonic() < next_at:
                continue
            next_at = time.monotonic() + self._every_s
            if not is_ready(self._server):
                continue
            title, fault = self._rng.choice(self._titles), self._rng.choice(list(FAULTS))
            if title == "supervisor" and fault in HARMS_CHILDREN:
                continue
            victims = [c for c in self._server.find_children() if title_of(c) == title]
            for victim in victims:
                self.faults[f"{title} {fault}"] += 1
                print(f"{time.strftime('%X')} {title} {fault}", file=sys.stderr, flush=True)
                if title.startswith("frontend"):
                    self._harm_frontend(victim, fault)
                else:
                    FAULTS[fault](victim)

    def _harm_frontend(self, victim: psutil.Process, fault: str) -> None:
        """Stop a frontend, so that it accepts no more clients, record the ports of its clients, and apply the fault."""
        self.num_frontend_faults += 1
        victim.suspend()
        self._note_clients(victim)
        FAULTS[fault](victim)
        if fault not in ("killed", "stopped"):
            victim.resume()
            self._frontends.append(victim)

    def _note_clients(self, frontend: psutil.Process) -> bool:
        """Record the ports of a frontend's clients. Return whether the process is still running."""
        try:
            self.ports |= {c.raddr.port for c in frontend.net_connections("tcp") if c.raddr}
        except psutil.Error:
            return False
        return True


def hang_up(server: Server, requests: list[dict[str, Any]], rng: random.Random) -> Streams:
    """Run clients that read a few events and then disconnect."""
    return Streams(server, requests, max_events=[rng.randrange(1, 20) for _ in requests])


def is_ready(server: Server) -> bool:
    try:
        return server.get("/readyz")[0] == 200
    except OSError:
        return False


def is_idle(server: Server) -> bool:
    try:
        return all(server.metric(f"engine:{gauge}") == 0 for gauge in GAUGES)
    except (OSError, AssertionError):
        return False


def becomes_idle(server: Server) -> bool:
    """Return whether every block and slot becomes free within the time limit for a recovery."""
    deadline = time.monotonic() + RECOVERY_S
    while not is_idle(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def resident_mb(server: Server) -> dict[str, float]:
    processes = [psutil.Process(server.process.pid), *server.find_children()]
    return {title_of(p) or "?": round(p.memory_info().rss / 1e6, 1) for p in processes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20, help="seconds between faults")
    parser.add_argument("--streams", type=int, default=200, help="streams per wave")
    parser.add_argument(
        "--victims", nargs="+", help="process titles such as 'core 0' (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "server_args", nargs="*", help="additional arguments for the server, after --"
    )
    args = parser.parse_args()
    rng = random.Random(args.seed)
    requests = bodies(args.streams)
    server_args = (
        *("--max-model-len", "512", "--heartbeat-timeout", "3", "--api-server-count", "2"),
        *("--max-restarts", "20", *args.server_args),
    )
    total: Counter[str] = Counter()
    with Server(args.model, *server_args, env=ENVIRONMENT) as server:
        titles = [title_of(child) for child in server.children]
        undisturbed = Streams(server, requests).answers()
        if any("error" in answer or "done" not in answer for answer in undisturbed):
            raise SystemExit(f"the undisturbed run failed: {undisturbed}")
        wait_until(lambda: is_idle(server), RECOVERY_S, "an idle server")
        first_mb = resident_mb(server)
        started = time.monotonic()
        with Havoc(server, args.every, args.victims or titles, rng) as havoc:
            while time.monotonic() - started < args.minutes * 60:
                havoc.ports.clear()
                order = rng.sample(range(args.streams), args.streams)
                streams = Streams(server, [requests[index] for index in order])
                hung_up = hang_up(server, requests[: args.streams // 10], rng)
                answers = streams.answers()
                hung_up.answers()
                wave: Counter[str] = Counter(streams=len(answers))
                for index, stream, answer in zip(order, streams.streams, answers, strict=True):
                    if answer == undisturbed[index]:
                        wave["right"] += 1
                    elif "connection" in answer and stream.port in havoc.ports:
                        wave["cut"] += 1
                    else:
                        wave["wrong"] += 1
                        print(f"{answer}\ninstead of\n{undisturbed[index]}", file=sys.stderr)
                wave["leaks"] += not becomes_idle(server)
                wave["violations"] = int(server.metric("engine:invariant_violations_total"))
                total += wave
                print(
                    json.dumps({"seconds": round(time.monotonic() - started), **wave}), flush=True
                )
        wait_until(lambda: is_ready(server), RECOVERY_S, "ready")
        last_mb = resident_mb(server)
        exit_code = server.stop()
        log = server.log
    print(
        json.dumps(
            {
                "minutes": round((time.monotonic() - started) / 60, 1),
                **total,
                "faults": havoc.faults,
                "resident_mb_first": first_mb,
                "resident_mb_last": last_mb,
                "exit_code": exit_code,
            },
            indent=1,
        )
    )
    bad = total["wrong"] or total["leaks"] or total["violations"] or exit_code
    if bad:
        print(log, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
