"""Measure each turn of a coding agent's conversation: time to the first token and cached share, beside other servers.

    scripts/bench/run agent_turns [--model FILE.gguf] [--llama-server PATH] [--vllm PATH --vllm-model DIRECTORY]
        [--turns 20] [--rounds 3]

Every contender gets the same conversations, greedily, and its own answers are part of the next prompt. In the second
kind of conversation the system prompt begins with a header and the time, which differ in every turn, as those of some
agents do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from engine.frontend.cli.bench.client import Answer, Endpoint, ask
from side_by_side.clients import free_port
from support.servers.server import COMMAND, default_model

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


async def converse(url: str, transcript: Transcript, num_tokens: int) -> list[Answer]:
    """Return the answer of each turn."""
    endpoint = Endpoint(url, "bench", is_chat=True, fields={"temperature": 0, "ignore_eos": True})
    turns: list[Answer] = []
    history: list[dict[str, str]] = []
    async with endpoint.connect() as client:

        async def send(messages: list[dict[str, str]], count: int) -> Answer:
            answer = await ask(client, endpoint.full_url, endpoint.body(messages, count))
            if answer.error is not None:
                raise SystemExit(answer.error)
            return answer

        # The first request of a server is always slower.
        await send([{"role": "user", "content": "Hello"}], 4)
        for turn, text in enumerate(transcript.inputs):
            history.append({"role": "user", "content": text})
            system = {"role": "system", "content": transcript.system(turn)}
            turns.append(await send([system, *history], num_tokens))
            history.append({"role": "assistant", "content": turns[-1].text})
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
                    turns = asyncio.run(converse(url, transcript, args.answer_tokens))
                firsts = [round(turn.chunk_times[0] - turn.start, 3) for turn in turns]
                share = sum(t.cached_tokens for t in turns) / sum(t.prompt_tokens for t in turns)
                result = {
                    "round": number,
                    "kind": kind,
                    "contender": name,
                    "prompt_tokens": [turns[0].prompt_tokens, turns[-1].prompt_tokens],
                    "cached_share": round(share, 3),
                    "first_turn_s": firsts[0],
                    "later_median_s": round(statistics.median(firsts[1:]), 3),
                    "last_turn_s": firsts[-1],
                    "all_turns_s": round(sum(t.end - t.start for t in turns), 2),
                    "each_turn_s": firsts,
                }
                print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
