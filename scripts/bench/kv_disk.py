"""Measure the 20th turn of a conversation: cold, warm, after a restart, and after kill -9, with its KV cache on disk.

    scripts/bench/run kv_disk [--model PATH] [--tokens 8000] [--directory PATH] [-- serve arguments]

At every start the segments are not in the page cache. For comparison, the time of plain reads of as many bytes from the
same files is measured, also outside of the page cache. Each start is compared with the sum of that time and the time of
the same request with as many tokens cached in memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from support.processes.program import wait_until
from support.servers.server import Server, default_model

TURNS = 20
NUM_OUTPUT_TOKENS = 16
READ_BYTES = 1 << 22


class Conversation:
    """The token ids of a conversation whose 20th turn has a prompt of `num_tokens` tokens."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        rng = random.Random(seed)
        self._token_ids = [rng.randrange(1000, 20_000) for _ in range(num_tokens)]

    def prompt(self, turn: int) -> list[int]:
        return self._token_ids[: len(self._token_ids) * turn // TURNS]


def ask(server: Server, prompt: list[int]) -> tuple[float, list[int], int]:
    """Send a request. Return its seconds, its tokens, and how many prompt tokens were cached."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    start = time.perf_counter()
    status, answer = server.post("/v1/completions", body, timeout=1200)
    seconds = time.perf_counter() - start
    assert status == 200, answer
    details: dict[str, Any] = answer["usage"].get("prompt_tokens_details") or {}
    return seconds, answer["choices"][0]["token_ids"], details.get("cached_tokens", 0)


def segments(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.suffix in (".open", ".sealed")]


def drop_pages(directory: Path) -> None:
    """Write the segments to the disk, and drop them from the page cache."""
    for path in segments(directory):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_speed(directory: Path, num_bytes: int) -> float:
    """Return the bytes per second of plain reads of the segments."""
    drop_pages(directory)
    left = num_bytes
    start = time.perf_counter()
    buffer = bytearray(READ_BYTES)
    for path in segments(directory):
        with open(path, "rb", buffering=0) as file:
            while left > 0 and (count := file.readinto(buffer)):
                left -= count
    return (num_bytes - max(left, 0)) / (time.perf_counter() - start)


def measure(args: argparse.Namespace, directory: Path, seed: int) -> dict[str, Any]:
    conversation = Conversation(args.tokens, seed)
    earlier, last = conversation.prompt(TURNS - 1), conversation.prompt(TURNS)
    serve = (
        *(args.model, "--max-model-len", str(args.tokens + 64), "--kv-disk", str(directory)),
        *("--kv-disk-gib", str(args.gib), "--enable-prompt-tokens-details", *args.serve),
    )
    seconds: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}

    def time_turn(name: str, server: Server) -> None:
        # Send another request first, because the first one of a server is always slower.
        ask(server, [1] * 8)
        seconds[name], tokens[name], cached[name] = ask(server, last)

    with Server(*serve) as server:
        time_turn("cold", server)
    shutil.rmtree(directory)
    with Server(*serve) as server:
        ask(server, earlier)
        time_turn("warm", server)
    drop_pages(directory)
    with Server(*serve) as server:
        time_turn("restart", server)
        # Files are larger, because the space for new blocks is reserved.
        num_bytes = int(server.metric("engine:kv_disk_read_bytes_total"))
        # Its prompt is in memory now, as far as it was on disk.
        time_turn("again", server)
    speed = read_speed(directory, num_bytes)
    shutil.rmtree(directory)
    with Server(*serve) as server:
        ask(server, earlier)
        # One turn less than before, of which `num_bytes` were read.
        wanted = args.stored * num_bytes * (TURNS - 1) / TURNS
        wait_until(lambda: server.metric("engine:kv_disk_written_bytes_total") >= wanted, 600)
        children = server.find_children()
        server.process.kill()
        for child in children:
            child.kill()
        wait_until(lambda: server.process.poll() is not None)
    drop_pages(directory)
    with Server(*serve) as server:
        time_turn("kill", server)
    assert len({tuple(each) for each in tokens.values()}) == 1, f"the tokens differ: {tokens}"
    read_s = num_bytes / speed
    return {
        "tokens": args.tokens,
        **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
        "cached": cached,
        "stored_mib": round(num_bytes / 2**20, 1),
        "read_mib_per_s": round(speed / 2**20),
        "read_alone_s": round(read_s, 3),
        "restart_of_possible": round(seconds["restart"] / (seconds["again"] + read_s), 2),
        "kill_of_possible": round(seconds["kill"] / (seconds["warm"] + read_s), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--tokens", type=int, default=8000, help="tokens in the last turn's prompt")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--stored", type=float, default=0.9, help="fraction of the blocks on disk before the kill"
    )
    parser.add_argument("--directory", type=Path, help="default: a temporary directory")
    parser.add_argument("serve", nargs="*", help="additional arguments for `engine serve`")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=args.directory) as root:
        for number in range(args.rounds):
            result = measure(args, Path(root) / "kv", number)
            results.append(result)
            print(json.dumps(result), flush=True)
    names = [name for name in results[0] if name.endswith("_s")]
    print({name: statistics.median(result[name] for result in results) for name in names})


if __name__ == "__main__":
    main()
