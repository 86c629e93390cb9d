"""Measure how many prompt tokens are found in the prefix caches, with one replica and with two.

    scripts/bench/run prefix_routing --streams 64 --prefixes 8

All streams begin at the same time, and each sends the next prompt when one ends. Prints a line of JSON for each number
of replicas: the share of prompt tokens that were found in a prefix cache, and how evenly the work was spread.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from support.server import Server, default_model

VOCABULARY = range(1000, 20000)


def make_prompts(
    num_requests: int, num_prefixes: int, prefix_tokens: int, suffix_tokens: int
) -> list[list[int]]:
    """Return prompts that each begin with one of a few long prefixes and have different endings."""
    generator = random.Random(0)
    prefixes = [generator.sample(VOCABULARY, prefix_tokens) for _ in range(num_prefixes)]
    return [
        generator.choice(prefixes) + generator.sample(VOCABULARY, suffix_tokens)
        for _ in range(num_requests)
    ]


def complete(server: Server, tokens: int, prompt: list[int]) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
    status, answer = server.post("/v1/completions", body, timeout=600)
    assert status == 200, answer


def by_replica(server: Server, name: str) -> list[float]:
    """Return the value of a counter for each replica."""
    _, text = server.get("/metrics")
    return [float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)]


def measure(num_replicas: int, args: argparse.Namespace) -> dict[str, Any]:
    prompts = make_prompts(args.requests, args.prefixes, args.prefix_tokens, args.suffix_tokens)
    flags = ["--data-parallel-size", str(num_replicas), "--api-server-count", str(args.frontends)]
    if args.threads:
        flags += ["--threads", str(args.threads)]
    with Server(args.model, "--max-model-len", "1024", *flags) as server:
        start = time.perf_counter()
        with ThreadPoolExecutor(args.streams) as pool:
            list(pool.map(partial(complete, server, args.tokens), prompts))
        seconds = time.perf_counter() - start
        queries = sum(by_replica(server, "engine:prefix_cache_queries_total"))
        hits = sum(by_replica(server, "engine:prefix_cache_hits_total"))
        generated = by_replica(server, "engine:generation_tokens_total")
    return {
        "replicas": num_replicas,
        "frontends": args.frontends,
        "streams": args.streams,
        "requests": args.requests,
        "prefixes": args.prefixes,
        "hit_rate": round(hits / queries, 4),
        "generated_by_replica": generated,
        "seconds": round(seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each worker")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prefixes", type=int, default=8)
    parser.add_argument("--prefix-tokens", type=int, default=256)
    parser.add_argument("--suffix-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    for num_replicas in args.replicas:
        print(json.dumps(measure(num_replicas, args)), flush=True)


if __name__ == "__main__":
    main()
