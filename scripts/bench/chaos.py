"""Run traffic of many kinds on real servers, and crash, stop or reload random processes every few seconds.

    scripts/bench/run chaos --minutes 30 --every 20
    scripts/bench/run chaos --sides model speech live --setup tensor

Each side is a server with its requests. `streams` continues texts with the features that a crash could affect, and
has clients that disconnect. `model` has a small random model that reads images, adapters and a store: it answers
chats with and without images, tools and adapters, completions, beams, constrained output, prompts of embeddings,
embeddings, reranking, batches, responses in the background and on WebSockets, interactions whose streams are
continued, sessions, adapters that are loaded for one request, and streams in the formats of Ollama and Anthropic.
`speech` transcribes files and realtime sessions with a small random Whisper, and `live` sessions with a small random
Voxtral, which writes while the audio arrives. The other sides are streams on small random models with recurrent
layers, experts, heads that draft, or blocks that are denoised.

Traffic comes in waves of all requests. Every answer must equal the one from before any fault. Connections of `streams`
may break only at a frontend that was disturbed; the clients of the other sides retry then. After each wave, every block
and slot must be free, and the core checks its invariants, which include adapters and encoder outputs. Prints a line of
JSON per wave and a summary. Exits with 1 after a wrong answer, a leak or a violated invariant.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from support.checkpoints.source import WINDOW_S, multilingual_whisper, realtime_directory
from support.checkpoints.tiny import layers_directory, mixture_directory
from support.drafts.layered_heads import minimax3_layers
from support.drafts.models_with_heads import Head, eagle
from support.own_code.block_diffusion import llada2
from support.processes.faults import ENVIRONMENT, FAULTS
from support.processes.program import wait_until
from support.requests.all_kinds import (
    ADAPTERS,
    SPEECH_FLAGS,
    Request,
    answers,
    model_requests,
    speech_requests,
)
from support.requests.all_kinds import write_model as write_vision_model
from support.requests.conversations import (
    background_response,
    batch,
    claude_stream,
    interaction,
    make_adapter_use,
    make_live_session,
    ollama_chat,
    response_on_socket,
    session,
    tool_response,
)
from support.requests.mixed_streams import WITHOUT_LOGPROBS, Streams, bodies
from support.servers.server import Server, default_model, title_of

ALL_REPLICAS = "all replicas"
"""A victim that is no process: the model is unloaded and loaded again, or its weights are updated to the same ones."""

LACKS_MEMORY = ("out of memory",)
"""Faults that are not for the supervisor, because its children inherit the limit of memory."""

RECOVERY_S = 60.0
"""Seconds until a server is idle after a wave."""
TICK_S = 0.05
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
NUM_CLIPS = 8
WINDOWS_OF_CLIP = 3
NUM_TALKS = 4
TALK_SAMPLES = 30_000

NGRAMS = {"method": "ngram", "num_speculative_tokens": 3}
ROLES = ("--replica-roles", "prefill=1,decode=1", "--remote-prefill-tokens", "16")
LAYERS: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "delta net": lambda path: (layers_directory(path, "delta net")[0], NGRAMS),
    "mamba": lambda path: (layers_directory(path, "mamba")[0], NGRAMS),
    "experts": lambda path: (mixture_directory(path)[0], NGRAMS),
    "eagle": lambda path: _with_head(eagle(path)),
    "prediction layers": lambda path: _with_head(minimax3_layers(path)),
    "diffusion": lambda path: _with_blocks(path),
}
"""The models of sides, and what drafts for them."""

NEEDS_ORDER = ("repetition_penalty", "structured_outputs", "bad_words", "dry_multiplier")
"""Fields that block-diffusion models refuse."""

SIDES = ("streams", "model", "speech", "live", *LAYERS)
SETUPS: dict[str, tuple[str, ...]] = {
    "one": (),
    "tensor": ("-tp", "2", "--kv-host-gib", "0.001", "--inject-preemption", "0.02"),
    "pipeline": ("-pp", "2", "--kv-disk", "DIRECTORY/blocks", "--kv-disk-gib", "0.01"),
    "grid": ("-pp", "2", "-tp", "2"),
    "replicas": ("-dp", "2", "--api-server-count", "2"),
    "roles tensor": (*ROLES, "-tp", "2"),
    "roles": ROLES,
}
"""Additional flags of the servers with small models for text and images."""

COMMON_BEGINNING = "This is the preface of all chapters. " * 5
"""A text after which models with recurrent layers keep their states."""

COMMON_FLAGS = ("--max-restarts", "50", "--heartbeat-timeout", "3")
LAYER_FLAGS = (
    *("--dtype", "float32", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "100"),
    *("--watermark", "0.1"),
)
STREAM_FLAGS = ("--max-model-len", "512", "--api-server-count", "2")
STORE_FLAGS = ("--store", "DIRECTORY/store.db", "--resume-grace", "60")
MODEL_FLAGS = ("--allow-runtime-lora-updating", "--encoder-disk", "DIRECTORY/embeddings")
LIVE_FLAGS = ("--max-num-batched-tokens", "24", "--max-num-seqs", "8")
CONVERSATIONS: list[Request] = [
    response_on_socket,
    background_response,
    interaction,
    tool_response,
    batch,
    session,
    ollama_chat,
    claude_stream,
]


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
        self.num_refusals = 0
        """Number of faults after which clients may have to repeat requests: of frontends, and lacks of memory."""

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
            if title == "supervisor" and fault in LACKS_MEMORY:
                continue
            if title == ALL_REPLICAS:
                # A frontend may still be harmed.
                with suppress(OSError, http.client.HTTPException):
                    self._reload()
            victims = [c for c in self._server.find_children() if title_of(c) == title]
            for victim in victims:
                self.faults[f"{title} {fault}"] += 1
                self.num_refusals += fault in LACKS_MEMORY
                print(f"{time.strftime('%X')} {title} {fault}", file=sys.stderr, flush=True)
                if title.startswith("frontend"):
                    self._harm_frontend(victim, fault)
                else:
                    FAULTS[fault](victim)

    def _reload(self) -> None:
        """Let all replicas sleep and wake, or load their weights again."""
        if self._rng.random() < 0.5:
            self.faults[f"{ALL_REPLICAS} slept"] += 1
            self._server.post("/sleep?mode=keep", b"")
            self._server.post("/wake_up", b"")
            return
        self.faults[f"{ALL_REPLICAS} loaded weights"] += 1
        self._server.post("/collective_rpc", {"method": "reload_weights"})

    def _harm_frontend(self, victim: psutil.Process, fault: str) -> None:
        """Stop a frontend, so that it accepts no more clients, record the ports of its clients, and apply the fault."""
        self.num_refusals += 1
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


def is_ready(server: Server) -> bool:
    try:
        return server.get("/readyz")[0] == 200
    except OSError:
        return False


def is_idle(server: Server) -> bool:
    try:
        return all(server.metric(f"engine:{gauge}") == 0 for gauge in GAUGES)
    except (OSError, AssertionError, http.client.HTTPException):
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


class Side:
    """A server, its requests, and its answers before any fault."""

    def __init__(self, name: str, server: Server, requests: list[Any]) -> None:
        self.name = name
        self.server = server
        self._requests = requests
        self._undisturbed: list[Any] = []
        self._num_refusals = 0

    def start(self) -> None:
        """Answer all requests, twice, while nothing is harmed."""
        self._undisturbed = self.ask(self._requests)
        again = self.ask(self._requests)
        failed = [
            (_name_of(request), *pair)
            for request, *pair in zip(self._requests, self._undisturbed, again, strict=True)
            if pair[0] != pair[1] or "error" in pair[0]
        ]
        if failed:
            raise SystemExit(
                f"the undisturbed run of {self.name} failed: {failed}\n{self.server.log}"
            )
        wait_until(lambda: is_idle(self.server), RECOVERY_S, "an idle server")

    def ask(self, requests: list[Any]) -> list[Any]:
        """Return the answers while nothing is harmed."""
        return answers(self.server, requests)

    def ask_disturbed(
        self, requests: list[Any], havoc: Havoc, rng: random.Random
    ) -> Iterator[tuple[Any, bool]]:
        """Yield each answer, and whether its connection may break."""
        harmed = self._num_refusals
        # A process may be disturbed only after a while.
        self._num_refusals = havoc.num_refusals
        for answer in answers(self.server, requests, lambda: havoc.num_refusals > harmed):
            yield answer, False

    def run_wave(self, havoc: Havoc, rng: random.Random) -> Counter[str]:
        """Send all requests in another order. Return how many answers were right, cut and wrong."""
        order = rng.sample(range(len(self._requests)), len(self._requests))
        found = self.ask_disturbed([self._requests[index] for index in order], havoc, rng)
        wave: Counter[str] = Counter()
        for index, (answer, may_break) in zip(order, found, strict=True):
            expected = self._undisturbed[index]
            kind = "right" if answer == expected else "cut" if may_break else "wrong"
            wave[kind] += 1
            if kind == "wrong":
                name = f"{time.strftime('%X')} {self.name} {_name_of(self._requests[index])}"
                print(f"{name}: {answer}\ninstead of\n{expected}", file=sys.stderr)
        wave["leaks"] = int(not becomes_idle(self.server))
        # A frontend may be harmed at this moment. The next wave reads the same counter.
        with suppress(OSError, http.client.HTTPException):
            wave["violations"] = int(self.server.metric("engine:invariant_violations_total"))
        return wave


class StreamsSide(Side):
    """A server of mixed streams. In each wave, some more clients read a few events and then disconnect."""

    def ask(self, requests: list[Any]) -> list[Any]:
        found = Streams(self.server, requests).answers()
        return [each if "done" in each else {"error": each} for each in found]

    def ask_disturbed(
        self, requests: list[Any], havoc: Havoc, rng: random.Random
    ) -> Iterator[tuple[Any, bool]]:
        havoc.ports.clear()
        streams = Streams(self.server, requests)
        leaving = requests[: len(requests) // 10]
        hung_up = Streams(self.server, leaving, [rng.randrange(1, 20) for _ in leaving])
        found = streams.answers()
        hung_up.answers()
        for stream, answer in zip(streams.streams, found, strict=True):
            yield answer, "connection" in answer and stream.port in havoc.ports


def _with_head(head: Head) -> tuple[Path, dict[str, Any]]:
    """Return the path of a model, and the fields that choose its head."""
    fields = {"method": head.speculative.method, "model": head.speculative.model}
    return head.path, {name: str(value) for name, value in fields.items() if value}


def _with_blocks(path: Path) -> tuple[Path, dict[str, Any]]:
    """Write a model that fills blocks. Return its path; nothing drafts for it."""
    llada2(path)
    return path, {}


def _name_of(request: Any) -> str:
    if isinstance(request, dict):
        return str(request["prompt"])
    return str(request.__name__ if callable(request) else request[0])


def make_sides(args: argparse.Namespace, directory: Path) -> Iterator[Side]:
    """Yield the sides, whose servers are ready."""
    setup = SETUPS[args.setup]
    parallel = setup[:2] if setup[:1] in (("-tp",), ("-pp",)) else ()
    start = partial(Server, env=ENVIRONMENT)
    talks: list[Request] = [
        make_live_session(0.3 * np.random.default_rng(seed).standard_normal(TALK_SAMPLES))
        for seed in range(NUM_TALKS)
    ]
    for name in args.sides:
        if name == "streams":
            server = start(args.model, *COMMON_FLAGS, *STREAM_FLAGS, *args.server_args)
            yield StreamsSide(name, server, bodies(args.streams))
            continue
        if name in LAYERS:
            path, drafts = LAYERS[name](directory / name.replace(" ", "_"))
            flags = [str(path), *LAYER_FLAGS, *STREAM_FLAGS, *setup, *COMMON_FLAGS]
            if drafts:
                flags += ["--speculative-config", json.dumps(drafts)]
            server = start(*(flag.replace("DIRECTORY", str(path)) for flag in flags))
            # The last digits of log-probabilities depend on the batch where torch multiplies.
            texts = [{**body, **WITHOUT_LOGPROBS} for body in bodies(args.streams)]
            for text in texts[::2]:
                text["prompt"] = COMMON_BEGINNING + text["prompt"]
            if name == "diffusion":
                texts = [text for text in texts if not any(map(text.get, NEEDS_ORDER))]
            yield StreamsSide(name, server, texts)
            continue
        if name == "model":
            flags = [*write_vision_model(directory), *STORE_FLAGS, *MODEL_FLAGS, *setup]
            flags = [flag.replace("DIRECTORY", str(directory)) for flag in flags]
            own = make_adapter_use(directory / ADAPTERS[0])
            requests = [*model_requests(), *CONVERSATIONS, own]
        elif name == "speech":
            whisper, _ = multilingual_whisper(directory / "whisper")
            flags = [str(whisper), *SPEECH_FLAGS]
            requests = [*speech_requests(NUM_CLIPS, WINDOWS_OF_CLIP * WINDOW_S - 1), *talks]
        else:
            live, _ = realtime_directory(directory / "live")
            flags, requests = [str(live), *SPEECH_FLAGS, *LIVE_FLAGS, *parallel], talks
        yield Side(name, start(*flags, *COMMON_FLAGS), requests * args.repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", default=["streams"], choices=SIDES)
    parser.add_argument("--model", default=default_model(), help="model of the side streams")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=20, help="seconds between faults")
    parser.add_argument("--streams", type=int, default=200, help="streams per wave")
    parser.add_argument(
        "--repeats", type=int, default=2, help="copies of each other request in a wave"
    )
    parser.add_argument(
        "--setup", choices=SETUPS, default="one", help="additional flags of small models"
    )
    parser.add_argument(
        "--victims",
        nargs="+",
        help="process titles such as 'core 0', or 'all replicas' to let them sleep (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "server_args", nargs="*", help="after --: additional arguments for the side streams"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(args.seed)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = []
        for side in make_sides(args, Path(directory)):
            sides.append(side)
            stack.enter_context(side.server)
            side.start()
        first_mb = [resident_mb(side.server) for side in sides]
        started = time.monotonic()
        totals = {side.name: Counter[str]() for side in sides}
        havocs = []
        for side in sides:
            children = [title_of(child) for child in side.server.children]
            titles = args.victims or [*children, ALL_REPLICAS]
            havocs.append(stack.enter_context(Havoc(side.server, args.every, titles, rng)))
        pool = stack.enter_context(ThreadPoolExecutor(len(sides)))
        while time.monotonic() - started < args.minutes * 60:
            waves = pool.map(Side.run_wave, sides, havocs, [rng] * len(sides))
            for side, wave in zip(sides, waves, strict=True):
                totals[side.name] += wave
                seconds = round(time.monotonic() - started)
                print(json.dumps({"seconds": seconds, "side": side.name, **wave}), flush=True)
        for havoc in havocs:
            havoc.stop()
        for side, havoc, before in zip(sides, havocs, first_mb, strict=True):
            wait_until(partial(is_ready, side.server), RECOVERY_S, "ready")
            summary = {
                "side": side.name,
                "minutes": round((time.monotonic() - started) / 60, 1),
                **totals[side.name],
                "faults": havoc.faults,
                "resident_mb_first": before,
                "resident_mb_last": resident_mb(side.server),
                "exit_code": side.server.stop(),
            }
            print(json.dumps(summary, indent=1))
            totals[side.name]["failed exits"] = int(summary["exit_code"] != 0)
        logs = [side.server.log for side in sides]
    bads = ("wrong", "leaks", "violations", "failed exits")
    bad = any(total[name] for total in totals.values() for name in bads)
    if bad:
        print(*logs, sep="\n", file=sys.stderr)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
