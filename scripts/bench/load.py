"""Put closed-loop load on any OpenAI-compatible server: tokens a second, first-token and inter-token times.

Prompts are token ids, so their length is exact. Each begins with different ids, so no prefix cache helps unless
`--shared-prefix` asks for a common prefix. Requests are greedy and streamed, with `ignore_eos` and usage.

    scripts/bench/run load --url http://127.0.0.1:8000 --model NAME -c 8 -n 32

Needs the `bench` extra.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import uvloop
from engine.frontend.cli.bench.client import Endpoint, run_sessions
from engine.frontend.cli.bench.datasets import FIRST_ORDINARY_ID, Session, Turn


def make_prompts(count: int, own: int, shared: int, vocabulary: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_ID, vocabulary) for _ in range(n)]

    head = ids(shared)
    return [head + ids(own) for _ in range(count)]


async def measure(
    url: str,
    model: str,
    *,
    concurrency: int,
    requests: int,
    prompt_tokens: int,
    max_tokens: int,
    shared_prefix: int = 0,
    vocabulary: int = 49152,
    seed: int = 1,
) -> dict[str, Any]:
    """Measure one point. Times are in milliseconds, rates in tokens per second."""
    prompts = make_prompts(requests, prompt_tokens, shared_prefix, vocabulary, seed)
    answers, wall = await run_sessions(
        Endpoint(url, model, fields={"temperature": 0, "ignore_eos": True}),
        [Session([Turn(prompt, max_tokens)]) for prompt in prompts],
        max_concurrency=concurrency,
    )
    good = [a for a in answers if a.error is None]
    first = [a.chunk_times[0] - a.start for a in good]
    gaps = [b - a for x in good for a, b in pairwise(x.chunk_times)]
    output = sum(a.output_tokens for a in good)
    total = output + sum(a.prompt_tokens for a in good)
    return {
        "concurrency": concurrency,
        "requests": requests,
        "wall_s": round(wall, 3),
        "failed": len(answers) - len(good),
        "first_error": next((a.error for a in answers if a.error), None),
        "output_tok_s": round(output / wall, 1),
        "total_tok_s": round(total / wall, 1),
        "ttft_ms_p50": _percentile_ms(first, 0.5),
        "ttft_ms_p99": _percentile_ms(first, 0.99),
        "itl_ms_p50": _percentile_ms(gaps, 0.5),
        "itl_ms_p99": _percentile_ms(gaps, 0.99),
        "cached_tokens": round(statistics.fmean(a.cached_tokens for a in good), 1) if good else 0,
    }


def _percentile_ms(values: list[float], fraction: float) -> float | None:
    if not values:
        return None
    return round(float(np.quantile(values, fraction)) * 1e3, 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("-c", "--concurrency", type=int, default=8)
    parser.add_argument("-n", "--requests", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--shared-prefix", type=int, default=0)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--seed", type=int, default=1)
    options = vars(parser.parse_args())
    # Use uvloop, because the client shares the CPU cores with the server: what it takes is missing for the contender.
    result = uvloop.run(measure(options.pop("url"), options.pop("model"), **options))
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
