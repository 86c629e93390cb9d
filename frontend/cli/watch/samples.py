"""Read the series of a server's /metrics, and compute rates and latencies from two readings."""

from __future__ import annotations

import math
import time
from typing import Final

import msgspec
from prometheus_client.parser import text_string_to_metric_families

PREFIXES: Final = ("engine:", "vllm:")
"""The prefixes of metric names: Engine's, and vLLM's, which other servers use too."""

LATENCIES: Final = {
    "ttft": "time_to_first_token_seconds",
    "itl": "inter_token_latency_seconds",
    "queue": "request_queue_time_seconds",
    "e2e": "e2e_request_latency_seconds",
}


class Sample(msgspec.Struct):
    """One reading of /metrics. All values are sums over the replicas.

    Attributes:
        at: The time of the reading, in seconds of `time.monotonic`.
        values: Name of a gauge or counter -> its value.
        num_series: Name -> the number of replicas that have it.
        buckets: Name of a histogram -> the upper bounds in seconds of its buckets -> their cumulative counts.
    """

    at: float
    values: dict[str, float]
    num_series: dict[str, int]
    buckets: dict[str, dict[float, float]]


class Rates(msgspec.Struct):
    """The figures between two readings. None means that there was nothing to count.

    Attributes:
        generated_tokens_s: Generated tokens per second.
        prompt_tokens_s: Prompt tokens per second.
        requests_s: Finished requests per second.
        running: Number of running requests.
        waiting: Number of waiting requests.
        kv_use: Share of the KV-cache blocks in use, 0 to 1.
        hit_rate: Share of the prompt tokens found in the prefix cache.
        accepted: Share of the draft tokens that were accepted.
        latencies_ms: Median and 99th percentile of each of `LATENCIES`, in milliseconds.
    """

    generated_tokens_s: float
    prompt_tokens_s: float
    requests_s: float
    running: int
    waiting: int
    kv_use: float
    hit_rate: float | None
    accepted: float | None
    latencies_ms: dict[str, tuple[float, float] | None]


def read_sample(text: str, at: float | None = None) -> Sample:
    """Parse the text of /metrics. Raise ValueError if the text has no series of an inference server."""
    sample = Sample(time.monotonic() if at is None else at, {}, {}, {})
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            short = _without_prefix(name)
            if short is None:
                continue
            if short.endswith("_bucket"):
                histogram = sample.buckets.setdefault(short.removesuffix("_bucket"), {})
                bound = float(labels["le"])
                histogram[bound] = histogram.get(bound, 0.0) + value
            else:
                sample.values[short] = sample.values.get(short, 0.0) + value
                sample.num_series[short] = sample.num_series.get(short, 0) + 1
    if "num_requests_running" not in sample.values:
        raise ValueError("/metrics has no metrics of an inference server; check the URL")
    return sample


def _without_prefix(name: str) -> str | None:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return None


def rates_between(before: Sample, after: Sample, since: Sample) -> Rates:
    """Return the rates between two readings.

    Args:
        before: The reading before the last one.
        after: The last reading.
        since: An earlier reading. Shares and latencies are computed since then, because they need many requests.
    """
    seconds = max(after.at - before.at, 1e-9)

    def per_second(name: str) -> float:
        return _increase(before, after, name) / seconds

    return Rates(
        per_second("generation_tokens_total"),
        per_second("prompt_tokens_total"),
        per_second("request_success_total"),
        int(after.values["num_requests_running"]),
        int(after.values.get("num_requests_waiting", 0)),
        after.values.get("kv_cache_usage_perc", 0.0)
        / max(1, after.num_series.get("kv_cache_usage_perc", 1)),
        _share(since, after, "prefix_cache_hits_total", "prefix_cache_queries_total"),
        _share(
            since,
            after,
            "spec_decode_num_accepted_tokens_total",
            "spec_decode_num_draft_tokens_total",
        ),
        {name: _latency(since, after, series) for name, series in LATENCIES.items()},
    )


def _increase(before: Sample, after: Sample, name: str) -> float:
    """Return the increase of a counter. A counter starts at 0 again when the server restarts."""
    now, then = after.values.get(name, 0.0), before.values.get(name, 0.0)
    return now - then if now >= then else now


def _share(before: Sample, after: Sample, part: str, whole: str) -> float | None:
    total = _increase(before, after, whole)
    return _increase(before, after, part) / total if total else None


def _latency(before: Sample, after: Sample, name: str) -> tuple[float, float] | None:
    then = before.buckets.get(name, {})
    counts = {
        bound: count - then.get(bound, 0.0) for bound, count in after.buckets.get(name, {}).items()
    }
    if any(count < 0 for count in counts.values()):
        counts = after.buckets[name]
    median, p99 = quantile(counts, 0.5), quantile(counts, 0.99)
    return None if median is None or p99 is None else (median * 1e3, p99 * 1e3)


def quantile(counts: dict[float, float], fraction: float) -> float | None:
    """Return a quantile of a histogram, interpolated within its bucket as Prometheus does; None if it is empty.

    Args:
        counts: Upper bound of a bucket -> its cumulative count.
        fraction: The quantile, from 0 to 1.
    """
    bounds = sorted(counts)
    if not bounds or not counts[bounds[-1]]:
        return None
    rank = fraction * counts[bounds[-1]]
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if math.isinf(bound):
                return low
            within = counts[bound] - below
            return low + (bound - low) * ((rank - below) / within if within else 1.0)
        low, below = bound, counts[bound]
    return low
