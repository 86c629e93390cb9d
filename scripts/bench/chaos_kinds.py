"""Run requests of every kind on two real servers, and crash or stop a random process of each every few seconds.

    scripts/bench/run chaos_kinds --minutes 5 --every 20

One server has a small random model that reads images and has adapters: it answers chats with and without images, with
and without adapters, completions, beams, prompts of embeddings, embeddings and reranking. The other one transcribes
speech with a small random Whisper. Traffic comes in waves, as in `chaos`: every answer must equal the answer before any
fault, a client of a disturbed frontend retries, and after each wave everything must be free. Blocks, slots, adapters
and encoder outputs are among the invariants that the core checks. Prints a line of JSON a wave and a summary; exits
with 1 for a wrong answer, a leak or a violation.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from chaos import Havoc, becomes_idle
from support.all_kinds import SPEECH_FLAGS, Request, answers, model_requests, speech_requests
from support.all_kinds import write_model as write_vision_model
from support.faults import ENVIRONMENT
from support.server import Server, title_of
from support.source_checkpoints import WINDOW_S, multilingual_whisper

NUM_CLIPS = 8
WINDOWS_OF_CLIP = 3


class Side:
    """A server, its requests, and its answers before any fault."""

    def __init__(
        self, name: str, arguments: tuple[str, ...], requests: list[Request], repeats: int
    ) -> None:
        self.name = name
        restarts = ("--max-restarts", "50", "--heartbeat-timeout", "3")
        self.server = Server(*arguments, *restarts, env=ENVIRONMENT)
        self.requests = requests * repeats
        self.undisturbed: list[Any] = []

    def start(self) -> None:
        """Answer all requests, twice, while nothing is harmed."""
        self.undisturbed = answers(self.server, self.requests)
        failed = [answer for answer in self.undisturbed if "error" in answer]
        if failed or answers(self.server, self.requests) != self.undisturbed:
            raise SystemExit(f"the undisturbed run of {self.name} failed: {failed}")

    def run_wave(self, havoc: Havoc, rng: random.Random) -> Counter[str]:
        """Send all requests in another order. Return how many answers were correct and how many were wrong."""
        harmed = havoc.num_frontend_faults
        order = rng.sample(range(len(self.requests)), len(self.requests))
        try:
            found = answers(
                self.server,
                [self.requests[index] for index in order],
                may_retry=lambda: havoc.num_frontend_faults > harmed,
            )
        except OSError:
            print(self.server.log, file=sys.stderr)
            raise
        wave: Counter[str] = Counter()
        for index, answer in zip(order, found, strict=True):
            is_right = answer == self.undisturbed[index]
            wave["right" if is_right else "wrong"] += 1
            if not is_right:
                path = self.requests[index][0]
                print(
                    f"{path}: {answer}\ninstead of\n{self.undisturbed[index]}",
                    file=sys.stderr,
                )
        wave["leaks"] = int(not becomes_idle(self.server))
        wave["violations"] = int(self.server.metric("engine:invariant_violations_total"))
        return wave


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--every", type=float, default=20, help="seconds between faults")
    parser.add_argument("--repeats", type=int, default=2, help="copies of each request in a wave")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        whisper, _ = multilingual_whisper(Path(name) / "whisper")
        clips = speech_requests(NUM_CLIPS, WINDOWS_OF_CLIP * WINDOW_S - 1)
        sides = [
            Side("model", write_vision_model(Path(name)), model_requests(), args.repeats),
            Side("speech", (str(whisper), *SPEECH_FLAGS), clips, args.repeats),
        ]
        for side in sides:
            stack.enter_context(side.server)
            side.start()
        started = time.monotonic()
        totals = {side.name: Counter[str]() for side in sides}
        havocs = [
            stack.enter_context(
                Havoc(side.server, args.every, [title_of(c) for c in side.server.children], rng)
            )
            for side in sides
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        while time.monotonic() - started < args.minutes * 60:
            waves = pool.map(
                lambda each: each[0].run_wave(each[1], rng), zip(sides, havocs, strict=True)
            )
            for side, wave in zip(sides, waves, strict=True):
                totals[side.name] += wave
                print(
                    json.dumps(
                        {"seconds": round(time.monotonic() - started), "server": side.name, **wave}
                    ),
                    flush=True,
                )
        for havoc in havocs:
            havoc.stop()
        exit_codes = [side.server.stop() for side in sides]
        logs = [side.server.log for side in sides]
    for side, havoc, exit_code in zip(sides, havocs, exit_codes, strict=True):
        summary = {"server": side.name, **totals[side.name]}
        print(json.dumps(summary | {"faults": havoc.faults, "exit_code": exit_code}, indent=1))
    bad = any(exit_codes) or any(
        total["wrong"] or total["leaks"] or total["violations"] for total in totals.values()
    )
    if bad:
        print(*logs, sep="\n", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
