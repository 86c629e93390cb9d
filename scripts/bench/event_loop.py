"""Measure how long heavy requests block the frontend's event loop and delay other clients.

    scripts/bench/run event_loop [--only prompts streams] [--rounds 3] [--stacks] [-- serve arguments]

The worker computes nothing (`--device null`). Each kind of request is sent several times, while two clients request
`/livez` every 5 ms. A row shows the round whose longest pause was shortest, because other programs on the machine can
only lengthen it. Times are in milliseconds: the longest pause of the loop, the CPU time of its thread and of garbage
collections, the time by which all pauses together exceeded the limit, and the longest wait of a client. The frontend
measures its pauses itself, by `tests/support/processes/customizations/loop_pauses`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.processes.faults import environment_with
from support.requests.longest_wait import longest_wait
from support.servers.server import Server, default_model

LIMIT_MS = 20.0
"""The longest pause, in milliseconds, that a request may cause."""

MAX_MODEL_LEN = 8192
LARGE = 30_000_000
AFTER_S = 0.2
"""Seconds for which the loop is still observed after an answer."""

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


NO_PAUSE: dict[str, Any] = {"pause_s": 0, "cpu_s": 0, "gc_s": 0, "stacks": []}


def chat(content: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}


def text(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}


def raw(prefix: bytes, unit: bytes, suffix: bytes) -> bytes:
    return prefix + unit * (LARGE // len(unit)) + suffix


def function(number: int) -> dict[str, Any]:
    properties = {f"field_{i}": {"type": "string", "description": "a word " * 5} for i in range(8)}
    parameters = {"type": "object", "properties": properties, "required": ["field_0"]}
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": parameters}}


def schema(properties: int) -> dict[str, Any]:
    members = {f"property_{i}": {"type": ["string", "null"]} for i in range(properties)}
    return {"type": "object", "properties": members, "required": list(members)}


def json_schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}


USER = b'{"max_tokens":2,"messages":[{"role":"user","content":"'
USAGE = {"include_usage": True, "continuous_usage_stats": True}
WORDS = "the quick brown fox jumps over the lazy dog "

KINDS: dict[str, dict[str, Callable[[], Any]]] = {
    CHAT: {
        "chat, 30 MB ASCII": lambda: raw(USER, b"word ", b'"}]}'),
        "chat, 30 MB non-ASCII": lambda: raw(USER, "пример ".encode(), b'"}]}'),
        "chat, 30 MB emoji": lambda: raw(USER, "😀".encode(), b'"}]}'),
        "chat, 30 MB escapes": lambda: raw(USER, b"\\n", b'"}]}'),
        "chat, 30 MB \\u escapes": lambda: raw(USER, b"\\u0439", b'"}]}'),
        "chat, 30 MB blanks": lambda: raw(b'{"messages":[', b" ", b"]}"),
        "chat, 2 MB of text": lambda: chat(WORDS * 45_000),
        "chat, 2 MB non-ASCII": lambda: chat("пример " * 250_000),
        "chat, 400 KB of text": lambda: chat(WORDS * 9_000),
        "chat, 60 KB of text": lambda: chat(WORDS * 700 + "a" * 20_000),
        "chat, 5,000 messages": lambda: {
            "messages": [{"role": "user", "content": "a"}] * 5000,
            "max_tokens": 2,
        },
        "chat, 60,000 parts": lambda: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 10_000}],
            "max_tokens": 2,
        },
        "chat, n 128": lambda: chat("a", n=128),
        "chat, 500 tools": lambda: chat("a", tools=[function(i) for i in range(500)]),
        "chat, 500 tools, required": lambda: chat(
            "a", tools=[function(i) for i in range(500)], tool_choice="required"
        ),
        "chat, schema of 100": lambda: chat("a", response_format=json_schema(schema(100))),
        "chat, schema of 5,000": lambda: chat("a", response_format=json_schema(schema(5000))),
        "chat, choice of 20,000": lambda: chat(
            "a", structured_outputs={"choice": [f"word {i}" for i in range(20_000)]}
        ),
        "chat, prediction of 2 MB": lambda: chat(
            "a", prediction={"type": "content", "content": WORDS * 45_000}
        ),
        "chat, n 128, usage": lambda: chat(
            "a", n=128, stream=True, stream_options=USAGE, ignore_eos=True
        ),
    },
    f"{CHAT}/batch": {
        "batch chat, 4,000": lambda: {
            "messages": [[{"role": "user", "content": "a"}]] * 4000,
            "max_tokens": 2,
        },
        "batch chat, 300 of 1 KB": lambda: {
            "messages": [[{"role": "user", "content": WORDS * 25}]] * 300,
            "max_tokens": 2,
        },
    },
    COMPLETIONS: {
        "text, 30 MB": lambda: raw(b'{"prompt":"', b"word ", b'"}'),
        "text, 30 MB truncated": lambda: raw(
            b'{"truncate_prompt_tokens":5,"prompt":"', b"word ", b'"}'
        ),
        "text, 30 MB non-ASCII truncated": lambda: raw(
            b'{"truncate_prompt_tokens":5,"prompt":"', "пример ".encode(), b'"}'
        ),
        "4,096 texts": lambda: text(["a"] * 4096),
        "4,096 texts, streamed": lambda: text(["a"] * 4096, stream=True),
        "4,096 texts, echo, logprobs": lambda: text(["a b c"] * 4096, echo=True, logprobs=5),
        "4,096 lists of ids": lambda: text([[300, 301]] * 4096),
        "500,000 ids in 1,100 lists": lambda: text([[300] * 450] * 1100),
        "2,000,000 ids in 4,000 lists": lambda: text([[300] * 500] * 4000),
        "2,000,000 ids": lambda: text([300] * 2_000_000),
        "1,500,000 ids, truncated": lambda: text([300] * 1_500_000, truncate_prompt_tokens=100),
        "8,000 ids returned": lambda: text([300] * 8000, return_token_ids=True, n=128),
        "8,000 ids, n 128": lambda: text([300] * 8000, n=128),
        "n 4,096": lambda: text("a", n=4096),
        "32 texts, n 128": lambda: text(["a"] * 32, n=128),
        "32 texts, n 128, streamed": lambda: text(["a"] * 32, n=128, stream=True, max_tokens=8),
        "32 texts, n 128, usage": lambda: text(
            ["a"] * 32, n=128, stream=True, max_tokens=8, stream_options=USAGE
        ),
        "logprobs 20, n 128, 200 tokens": lambda: text("a", n=128, logprobs=20, max_tokens=200),
        "logprobs 20, n 128, streamed": lambda: text(
            "a", n=128, logprobs=20, max_tokens=50, stream=True
        ),
        "logprobs 4,000": lambda: text([5] * 100, logprobs=4000, max_tokens=100),
        "logprobs of all, 80 tokens": lambda: text([5] * 10, logprobs=-1, max_tokens=80),
        "logprobs 100, streamed": lambda: text([5], logprobs=100, max_tokens=200, stream=True),
        "prompt_logprobs 4,000": lambda: text([5] * 500, prompt_logprobs=4000),
        "prompt_logprobs 5 of 8,000": lambda: text([5] * 8000, prompt_logprobs=5),
        "bad words of 1,000": lambda: text(
            ["a"] * 2, n=128, bad_words=[f"word {i}" for i in range(1000)]
        ),
        "64 stop strings, n 128": lambda: text(
            "a", n=128, stop=[f"stop {i}" for i in range(64)], max_tokens=50
        ),
        "10,000 stop strings": lambda: text(
            "a", stop=[f"stop {i}" for i in range(10_000)], max_tokens=50
        ),
        "30,000 stop token ids": lambda: text("a", stop_token_ids=list(range(30_000)), n=100),
        "49,000 allowed ids": lambda: text("a", allowed_token_ids=list(range(49_000)), n=64),
        "49,000 biases": lambda: text("a", logit_bias={str(i): 1.0 for i in range(49_000)}, n=64),
        "regex": lambda: text("a", structured_outputs={"regex": "(a|b)*c" * 2000}),
        "metadata of 250,000 values": lambda: text("a", metadata={"a": list(range(250_000))}),
        "60,000 unknown fields": lambda: text("a", **{f"field_{i}": i for i in range(60_000)}),
        "64 KB of unknown fields": lambda: text("a", **{f"f{i}": i for i in range(4_500)}),
    },
    "/tokenize": {
        "tokenize 4 MB": lambda: {"prompt": WORDS * 90_000},
        "tokenize 4 MB, strings": lambda: {"prompt": WORDS * 90_000, "return_token_strs": True},
    },
    "/detokenize": {
        "detokenize 250,000": lambda: {"tokens": [300] * 250_000},
    },
}
"""The kinds of requests to each path, with a function that returns the body: bytes, or a value to be encoded."""


class Round(NamedTuple):
    """The cost of one request: the longest pause, and the CPU time of the loop's thread and of garbage collections.

    `total_ms` is the time by which all pauses together exceeded the limit.
    """

    pause_ms: float
    cpu_ms: float
    gc_ms: float
    total_ms: float
    wait_ms: float
    stacks: list[tuple[str, int]]


class Gauge:
    """Reads the pauses that a frontend has recorded in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pauses(self, since: float) -> Iterator[dict[str, Any]]:
        for line in self._path.read_text().splitlines():
            pause = json.loads(line)
            if pause["end"] >= since:
                yield pause


def send(url: str, path: str, body: bytes) -> tuple[int, bytes]:
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=120)
    headers = {"content-type": "application/json"}
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def measure(server: Server, gauge: Gauge, path: str, body: bytes) -> tuple[Round, int, bytes]:
    pids = [server.child("frontend 0").pid]
    began = time.monotonic()
    with longest_wait(server.url, pids) as first, longest_wait(server.url, pids) as second:
        status, answer = send(server.url, path, body)
        time.sleep(AFTER_S)
    pauses = list(gauge.pauses(began))
    longest = max(pauses, key=lambda pause: pause["pause_s"], default=NO_PAUSE)
    total = sum(max(pause["pause_s"] * 1e3 - LIMIT_MS, 0) for pause in pauses)
    wait_ms = max(*first, *second) * 1e3
    result = Round(
        longest["pause_s"] * 1e3,
        longest["cpu_s"] * 1e3,
        longest["gc_s"] * 1e3,
        total,
        wait_ms,
        longest["stacks"],
    )
    return result, status, answer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="run only kinds of requests whose names contain one of these texts",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--stacks", action="store_true", help="print the calls that blocked the event loop"
    )
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    arguments = parser.parse_args()
    args = ["--device", "null", "--null-step-ms", "1", "--max-model-len", str(MAX_MODEL_LEN)]
    args += ["--max-logprobs", "-1"]
    num_slow = 0
    with tempfile.TemporaryDirectory() as directory:
        pauses = Path(directory, "pauses")
        env = {**environment_with("loop_pauses"), "LOOP_PAUSES_FILE": str(pauses)}
        if arguments.stacks:
            env["LOOP_PAUSES_STACKS"] = "1"
        with Server(default_model(), *args, *arguments.serve, env=env) as server:
            # The first large body starts a decoder process, so it is not measured.
            send(server.url, COMPLETIONS, raw(b'{"prompt":"', b"a", b'"}'))
            print(
                f"{'kind':34}{'status':>7}{'pause':>8}{'CPU':>8}{'GC':>8}{'beyond':>8}{'wait':>8}"
            )
            for path, name, make in (
                (path, name, make)
                for path, kinds in KINDS.items()
                for name, make in kinds.items()
                if any(part in name for part in arguments.only)
            ):
                made = make()
                body = made if isinstance(made, bytes) else json.dumps(made).encode()
                rounds = []
                for _ in range(arguments.rounds):
                    result, status, answer = measure(server, Gauge(pauses), path, body)
                    rounds.append(result)
                best = min(rounds)
                num_slow += best.pause_ms > LIMIT_MS
                row = f"{name:34}{status:>7}{best.pause_ms:>8.1f}{best.cpu_ms:>8.1f}{best.gc_ms:>8.1f}"
                row += f"{best.total_ms:>8.1f}{best.wait_ms:>8.1f}"
                print(row + (f"  {answer[:110]!r}" if status >= 400 else ""), flush=True)
                if arguments.stacks and best.pause_ms > LIMIT_MS:
                    for stack, count in best.stacks:
                        print(f"    {count:3} {stack}")
    print(f"{num_slow} kinds hold the loop for more than {LIMIT_MS:g} ms")
    return int(num_slow > 0)


if __name__ == "__main__":
    sys.exit(main())
