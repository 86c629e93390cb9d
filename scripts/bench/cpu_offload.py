"""Measure the delay of an evicted conversation, with its prefix copied back from CPU memory or recomputed.

    scripts/bench/run cpu_offload [--model PATH] [--tokens 1024]

The KV cache has space for one conversation. Two conversations take turns, so that each finds its blocks evicted by the
other.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from engine import LLM, SamplingParams

BLOCK_SIZE = 16


def time_turns(model: str | None, num_tokens: int, turns: int, host_gib: float) -> dict[str, Any]:
    """Return the seconds of each turn after the first, which generates one token, and its number of cached tokens."""
    rng = random.Random(1)
    conversations = [[rng.randrange(1000, 20_000) for _ in range(num_tokens)] for _ in range(2)]
    max_model_len = num_tokens + 4 * BLOCK_SIZE
    engine = LLM(
        model,
        max_model_len=max_model_len,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=max_model_len // BLOCK_SIZE + 2,
        kv_host_gib=host_gib,
    )
    seconds, cached, tokens = [], [], []
    with engine:
        for turn in range(turns + 1):
            for conversation in conversations:
                start = time.perf_counter()
                (output,) = engine.generate(
                    conversation, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
                )
                if turn:
                    seconds.append(time.perf_counter() - start)
                    cached.append(output.num_cached_tokens)
                    tokens += output.outputs[0].token_ids
    return {
        "host_gib": host_gib,
        "median_s": round(statistics.median(seconds), 4),
        "max_s": round(max(seconds), 4),
        "cached_tokens": statistics.median(cached),
        "tokens": tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="model to measure (default: the default model)")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens in each conversation")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    results = [time_turns(args.model, args.tokens, args.turns, gib) for gib in (0.0, 1.0)]
    recompute, copy = results
    if recompute.pop("tokens") != copy.pop("tokens"):
        raise SystemExit("the tokens differ")
    for result in results:
        print(json.dumps(result) if args.json else result)
    if not args.json:
        print(f"{recompute['median_s'] / copy['median_s']:.1f} times as fast, same tokens")


if __name__ == "__main__":
    main()
