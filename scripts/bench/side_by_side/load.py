"""A closed loop of greedy requests with random token ids, on any server with OpenAI's API."""

from __future__ import annotations

from typing import Any

from engine.frontend.cli.bench.client import Endpoint, run_sessions
from engine.frontend.cli.bench.datasets import DatasetOptions, make_sessions
from engine.frontend.cli.bench.figures import summarize

from .points import Point

NAMES = {
    "wall_s": "duration",
    "failed": "failed",
    "first_error": "first_error",
    "output_tok_s": "output_throughput",
    "total_tok_s": "total_token_throughput",
    "ttft_ms_p50": "median_ttft_ms",
    "ttft_ms_p99": "p99_ttft_ms",
    "itl_ms_p50": "median_itl_ms",
    "itl_ms_p99": "p99_itl_ms",
    "cached_tokens": "cached_tokens",
}
"""The names of `engine bench` for the figures in the files of `peers`."""


async def measure(url: str, model: str, point: Point, seed: int = 1) -> dict[str, Any]:
    """Measure one point. Times are in milliseconds, rates in tokens per second.

    Prompts begin with different ids, except those that the point shares, so that no prefix cache helps otherwise.
    """
    options = DatasetOptions(
        random_input_len=point.prompt,
        random_output_len=point.output,
        random_prefix_len=point.shared,
        random_vocab_size=49_152,
        seed=seed,
    )
    answers, wall = await run_sessions(
        Endpoint(url, model, fields={"temperature": 0, "ignore_eos": True}),
        make_sessions(options, point.requests, as_text=False),
        max_concurrency=point.concurrency,
    )
    found = summarize(answers, wall)
    return {
        name: round(value, 3) if isinstance(value := found.get(key), float) else value
        for name, key in NAMES.items()
    }
