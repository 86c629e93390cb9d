"""Run requests of every kind on real servers, and crash or stop a random process of each every few seconds.

    scripts/bench/run chaos_kinds --minutes 5 --every 20

One server (`model`) has a small random model that reads images, adapters and a store: it answers chats with and without
images, tools and adapters, completions, beams, constrained output, prompts of embeddings, embeddings, reranking,
batches, responses in the background and on WebSockets, and streams in the formats of Ollama and Anthropic. Another one
(`speech`) transcribes files and realtime sessions with a small random Whisper, the third one (`live`) sessions with a
small random Voxtral, which writes while the audio arrives. Traffic comes in waves, as in `chaos`: every answer must
equal the answer before any fault, clients of a disturbed frontend retry, and after each wave everything must be free.
Blocks, slots, adapters and encoder outputs are among the invariants that the core checks. Prints a line of JSON a wave
and a summary; exits with 1 for a wrong answer, a leak or a violation.
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

import numpy as np
import torch
from chaos import Havoc, becomes_idle
from support.all_kinds import SPEECH_FLAGS, Request, answers, model_requests, speech_requests
from support.all_kinds import write_model as write_vision_model
from support.conversations import (
    background_response,
    batch,
    claude_stream,
    make_live_session,
    ollama_chat,
    response_on_socket,
    tool_response,
)
from support.faults import ENVIRONMENT
from support.server import Server, title_of
from support.source_checkpoints import WINDOW_S, multilingual_whisper, realtime_directory

NUM_CLIPS = 8
WINDOWS_OF_CLIP = 3
NUM_TALKS = 4
TALK_SAMPLES = 30_000

SETUPS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tensor": ("-tp", "2", "--kv-host-gib", "0.001", "--inject-preemption", "0.02"),
    "pipeline": ("-pp", "2", "--kv-disk", "DIRECTORY/blocks", "--kv-disk-gib", "0.01"),
    "replicas": ("-dp", "2", "--api-server-count", "2"),
    "roles": ("--replica-roles", "prefill=1,decode=1", "--remote-prefill-tokens", "16"),
}
"""Additional flags of the server with the model that reads images."""

STORE_FLAGS = ("--store", "DIRECTORY/store.db", "--resume-grace", "60")
LIVE_FLAGS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
CONVERSATIONS: list[Request] = [
    response_on_socket,
    background_response,
    tool_response,
    batch,
    ollama_chat,
    claude_stream,
]


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
        self._num_frontend_faults = 0

    def start(self) -> None:
        """Answer all requests, twice, while nothing is harmed."""
        self.undisturbed = answers(self.server, self.requests)
        again = answers(self.server, self.requests)
        failed = [
            (_name_of(request), *pair)
            for request, *pair in zip(self.requests, self.undisturbed, again, strict=True)
            if pair[0] != pair[1] or "error" in pair[0]
        ]
        if failed:
            raise SystemExit(f"the undisturbed run of {self.name} failed: {failed}")

    def run_wave(self, havoc: Havoc, rng: random.Random) -> Counter[str]:
        """Send all requests in another order. Return how many answers were correct and how many were wrong."""
        harmed = self._num_frontend_faults
        # A frontend may be disturbed only after a while.
        self._num_frontend_faults = havoc.num_frontend_faults
        order = rng.sample(range(len(self.requests)), len(self.requests))
        found = answers(
            self.server,
            [self.requests[index] for index in order],
            may_retry=lambda: havoc.num_frontend_faults > harmed,
        )
        wave: Counter[str] = Counter()
        for index, answer in zip(order, found, strict=True):
            is_right = answer == self.undisturbed[index]
            wave["right" if is_right else "wrong"] += 1
            if not is_right:
                name = _name_of(self.requests[index])
                print(
                    f"{time.strftime('%X')} {self.name} {name}: {answer}\ninstead of\n{self.undisturbed[index]}",
                    file=sys.stderr,
                )
        wave["leaks"] = int(not becomes_idle(self.server))
        if not wave["leaks"]:
            wave["violations"] = int(self.server.metric("engine:invariant_violations_total"))
        return wave


def _name_of(request: Request) -> str:
    return request.__name__ if callable(request) else request[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--every", type=float, default=20, help="seconds between faults")
    parser.add_argument("--repeats", type=int, default=2, help="copies of each request in a wave")
    parser.add_argument("--setup", choices=SETUPS, default="one")
    parser.add_argument(
        "--sides",
        nargs="+",
        default=["model", "speech", "live"],
        choices=["model", "speech", "live"],
    )
    parser.add_argument("--victims", nargs="+", help="process titles such as 'core 0'")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        whisper, _ = multilingual_whisper(Path(name) / "whisper")
        clips = speech_requests(NUM_CLIPS, WINDOWS_OF_CLIP * WINDOW_S - 1)
        live, _ = realtime_directory(Path(name) / "live")
        talks: list[Request] = [
            make_live_session(0.3 * np.random.default_rng(seed).standard_normal(TALK_SAMPLES))
            for seed in range(NUM_TALKS)
        ]
        setup = SETUPS[args.setup]
        in_directory = [each.replace("DIRECTORY", name) for each in (*STORE_FLAGS, *setup)]
        parallel = setup[:2] if setup[:1] in (("-tp",), ("-pp",)) else ()
        arguments = {
            "model": (*write_vision_model(Path(name)), *in_directory),
            "speech": (str(whisper), *SPEECH_FLAGS),
            "live": (str(live), *SPEECH_FLAGS, *LIVE_FLAGS, *parallel),
        }
        requests = {
            "model": [*model_requests(), *CONVERSATIONS],
            "speech": [*clips, *talks],
            "live": talks,
        }
        sides = []
        for side_name in args.sides:
            side = Side(side_name, arguments[side_name], requests[side_name], args.repeats)
            sides.append(side)
            stack.enter_context(side.server)
            side.start()
        started = time.monotonic()
        totals = {side.name: Counter[str]() for side in sides}
        havocs = [
            stack.enter_context(
                Havoc(
                    side.server,
                    args.every,
                    args.victims or [title_of(c) for c in side.server.children],
                    rng,
                )
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
