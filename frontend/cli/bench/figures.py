"""The figures of a measurement, with the names of `vllm bench serve`.

`ttft` is the time to first token, `tpot` the mean time per output token after the first, `itl` the time between two
pieces of a stream, and `e2el` the latency from the request to the end of its answer. All are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from .client import Answer

Figures: TypeAlias = dict[str, Any]

LATENCIES: Final = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def latencies_of(answer: Answer) -> dict[str, float]:
    """Return the latencies of one request in milliseconds. An answer with only one token has no `tpot`."""
    first = answer.chunk_times[0] - answer.start
    whole = answer.chunk_times[-1] - answer.start
    found = {"ttft": first * 1e3, "e2el": whole * 1e3}
    if answer.output_tokens > 1:
        found["tpot"] = (whole - first) / (answer.output_tokens - 1) * 1e3
    return found


def summarize(
    answers: Sequence[Answer],
    duration_s: float,
    *,
    goodput: Mapping[str, float] | None = None,
    percentiles: Sequence[float] = (99.0,),
) -> Figures:
    """Return the figures of a measurement.

    Args:
        answers: The answers of all requests, including failed ones.
        duration_s: The duration of the measurement in seconds.
        goodput: Name of a latency -> its limit in milliseconds. Requests within all limits count as good.
        percentiles: The percentiles of each latency, from 0 to 100.
    """
    good = [answer for answer in answers if answer.error is None]
    output = sum(answer.output_tokens for answer in good)
    prompt = sum(answer.prompt_tokens for answer in good)
    figures: Figures = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "cached_tokens": sum(answer.cached_tokens for answer in good),
        "request_throughput": len(good) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": (prompt + output) / duration_s,
        "max_concurrent_requests": _most_at_once(answers),
    }
    by_request = [latencies_of(answer) for answer in good]
    if goodput:
        num_good = sum(
            all(latencies.get(name, 0.0) <= limit for name, limit in goodput.items())
            for latencies in by_request
        )
        figures["request_goodput"] = num_good / duration_s
    samples = {name: [found[name] for found in by_request if name in found] for name in LATENCIES}
    samples["itl"] = [(b - a) * 1e3 for x in good for a, b in pairwise(x.chunk_times)]
    for name, values in samples.items():
        figures |= _distribution(name, values, percentiles)
    if errors := [answer.error for answer in answers if answer.error is not None]:
        figures["first_error"] = errors[0]
    return figures


def _distribution(name: str, values: list[float], percentiles: Sequence[float]) -> Figures:
    """Return the mean, the median, the standard deviation and the percentiles; None for each if there are no values."""
    array = np.array(values) if values else None
    figures: Figures = {
        f"mean_{name}_ms": None if array is None else float(array.mean()),
        f"median_{name}_ms": None if array is None else float(np.median(array)),
        f"std_{name}_ms": None if array is None else float(array.std()),
    }
    for p in percentiles:
        figures[f"p{p:g}_{name}_ms"] = None if array is None else float(np.percentile(array, p))
    return figures


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted(
        change
        for answer in answers
        for change in ((answer.start, 1), (answer.end or answer.start, -1))
    )
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
