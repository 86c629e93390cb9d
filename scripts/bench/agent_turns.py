"""Measure each turn of a coding agent's conversation: time to the first token and cached share, beside other servers.

    scripts/bench/run agent_turns [--model FILE.gguf] [--llama-server PATH] [--vllm PATH --vllm-model DIRECTORY]
        [--turns 20] [--rounds 3]

Every contender gets the same conversations, greedily, and its own answers are part of the next prompt. In the second
kind of conversation the system prompt begins with a header and the time, which differ in every turn, as those of some
agents do.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from support.server import COMMAND, default_model

CONTEXT = 8192
START_TIMEOUT_S = 300.0
_TEXT = (
    "the file function returns value test error line list type name path class method string number "
    "import module open read write change fix call data user server request answer token cache block "
    "index loop check field key result state queue thread lock time size limit default option build run"
)
WORDS = _TEXT.split()


class Transcript:
    """The messages of an agent, without the answers."""

    def __init__(self, args: argparse.Namespace, *, is_volatile: bool) -> None:
        rng = random.Random(0)
        self._is_volatile = is_volatile
        self._system = _text(rng, args.system_words)
        self.inputs = [_text(rng, args.input_words) for _ in range(args.turns)]

    def system(self, turn: int) -> str:
        if not self._is_volatile:
            return self._system
        header = f"x-anthropic-billing-header: cc_version=2.1.197; cch={turn:05x};"
        clock = f"Current time: 2026-11-25 21:{turn:02}:{turn * 7 % 60:02}"
        return f"{header}\n{clock}\n{self._system}"


def _text(rng: random.Random, count: int) -> str:
    lines = (" ".join(rng.choices(WORDS, k=12)) for _ in range(count // 12))
    return "\n".join(lines)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    """Run a server until it is healthy, and yield its URL."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while True:
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=5).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > deadline:
                        sys.exit(f"the server did not start: {' '.join(command)}")
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def ask(client: httpx.Client, messages: list[dict[str, str]], num_tokens: int) -> dict[str, Any]:
    """Send a request. Return its first-token time, its answer, and its prompt tokens and cached tokens."""
    body = {
        "model": "bench",
        "messages": messages,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    first_s = 0.0
    start = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if text := choice["delta"].get("content"):
                    first_s = first_s or time.perf_counter() - start
                    pieces.append(text)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return {
        "first_s": first_s,
        "total_s": time.perf_counter() - start,
        "answer": "".join(pieces),
        "prompt": usage["prompt_tokens"],
        "cached": cached,
    }


def converse(url: str, transcript: Transcript, num_tokens: int) -> list[dict[str, Any]]:
    """Return the figures of each turn."""
    turns: list[dict[str, Any]] = []
    history: list[dict[str, str]] = []
    # llama.cpp closes a connection after a few requests, without saying so.
    limits = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=url, timeout=600, limits=limits) as client:
        # The first request of a server is always slower.
        ask(client, [{"role": "user", "content": "Hello"}], 4)
        for turn, text in enumerate(transcript.inputs):
            history.append({"role": "user", "content": text})
            system = {"role": "system", "content": transcript.system(turn)}
            figures = ask(client, [system, *history], num_tokens)
            history.append({"role": "assistant", "content": figures["answer"]})
            turns.append(figures)
    return turns


def contenders(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the command of each contender. `{port}` is its port."""
    engine = [*COMMAND, "serve", args.model, "--port", "{port}", "--served-model-name", "bench"]
    engine += ["--max-model-len", str(CONTEXT), "--enable-prompt-tokens-details"]
    found = {
        "engine": engine,
        "engine --stable-prefix": [*engine, "--stable-prefix", "billing", "clock"],
    }
    if args.llama_server:
        llama = [args.llama_server, "-m", args.model, "--port", "{port}", "--alias", "bench"]
        llama += ["-c", str(CONTEXT), "-np", "1", "-fa", "on", "-t", "2", "-tb", "2"]
        found["llama.cpp"] = llama
        found["llama.cpp --cache-reuse 64"] = [*llama, "--cache-reuse", "64"]
    if args.vllm:
        vllm = [args.vllm, "serve", args.vllm_model, "--port", "{port}", "--max-num-seqs", "64"]
        vllm += ["--served-model-name", "bench", "--max-model-len", str(CONTEXT)]
        found["vllm"] = [*vllm, "--dtype", "bfloat16", "--enable-prompt-tokens-details"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--llama-server", help="llama.cpp's server, to measure it as well")
    parser.add_argument("--vllm", help="vLLM's command, to measure it as well")
    parser.add_argument(
        "--vllm-model", help="the model's directory for vLLM, with bfloat16 weights"
    )
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--system-words", type=int, default=1800)
    parser.add_argument("--input-words", type=int, default=180)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kinds", nargs="*", default=["stable", "volatile"])
    parser.add_argument("--contenders", nargs="*", help="numbers of those to run, from 0")
    args = parser.parse_args()
    chosen = list(contenders(args).items())
    if args.contenders is not None:
        chosen = [chosen[int(number)] for number in args.contenders]
    for number in range(args.rounds):
        for kind in args.kinds:
            transcript = Transcript(args, is_volatile=kind == "volatile")
            for name, command in chosen:
                port = free_port()
                filled = [part.format(port=port) for part in command]
                with running(filled, port) as url:
                    turns = converse(url, transcript, args.answer_tokens)
                later = turns[1:]
                share = sum(t["cached"] for t in turns) / sum(t["prompt"] for t in turns)
                firsts = [turn["first_s"] for turn in later]
                print(
                    json.dumps(
                        {
                            "round": number,
                            "kind": kind,
                            "contender": name,
                            "prompt_tokens": [turns[0]["prompt"], turns[-1]["prompt"]],
                            "cached_share": round(share, 3),
                            "first_turn_s": round(turns[0]["first_s"], 3),
                            "later_median_s": round(statistics.median(firsts), 3),
                            "last_turn_s": round(firsts[-1], 3),
                            "all_turns_s": round(sum(t["total_s"] for t in turns), 2),
                            "each_turn_s": [round(t["first_s"], 3) for t in turns],
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
