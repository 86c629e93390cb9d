"""The names of metrics of SGLang and llama.cpp (`--metrics-compat`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeAlias

from .core_metrics import CoreMetrics

Value: TypeAlias = Callable[[CoreMetrics], float]


class PeerNames(NamedTuple):
    """The names of one server's metrics.

    Attributes:
        prefix: The beginning of all names.
        gauges: Name -> documentation and value.
        counters: Name, without `_total` -> documentation and value.
        histograms: Name -> Engine's histogram.
    """

    prefix: str
    gauges: Mapping[str, tuple[str, Value]]
    counters: Mapping[str, tuple[str, Value]]
    histograms: Mapping[str, str]


def _counter(name: str) -> Value:
    return lambda core: core.counters[name]


def _sum(name: str) -> Value:
    return lambda core: core.histograms[name].sum


def _ratio(part: Value, whole: Value) -> Value:
    return lambda core: part(core) / (whole(core) or 1)


def _running(core: CoreMetrics) -> float:
    return core.stats.num_running


def _waiting(core: CoreMetrics) -> float:
    return core.stats.num_waiting


def _kv_cache_usage(core: CoreMetrics) -> float:
    return core.stats.kv_cache_usage


def _finished(core: CoreMetrics) -> float:
    return sum(core.num_finished.values())


_PROMPT: Final = "Prompt tokens of sequences that have received their first token."
_GENERATED: Final = "Tokens generated."
_RUNNING: Final = "Sequences in the running batch."
_WAITING: Final = "Sequences waiting to be scheduled."

SGLANG: Final = PeerNames(
    "sglang",
    gauges={
        "num_running_reqs": (_RUNNING, _running),
        "num_queue_reqs": (_WAITING, _waiting),
        "token_usage": ("Share of the KV-cache blocks in use, 0 to 1.", _kv_cache_usage),
        "cache_hit_rate": (
            "Share of the prompt tokens that were found in the prefix cache, 0 to 1.",
            _ratio(_counter("prefix_cache_hits"), _counter("prefix_cache_queries")),
        ),
        "spec_accept_rate": (
            "Share of the draft tokens that became output, 0 to 1.",
            _ratio(
                _counter("spec_decode_num_accepted_tokens"),
                _counter("spec_decode_num_draft_tokens"),
            ),
        ),
    },
    counters={
        "prompt_tokens": (_PROMPT, _counter("prompt_tokens")),
        "generation_tokens": (_GENERATED, _counter("generation_tokens")),
        "cached_tokens": (
            "Prompt tokens found in the prefix cache.",
            _counter("prefix_cache_hits"),
        ),
        "num_requests": ("Sequences that ended.", _finished),
        "num_retracted_requests": (
            "Times that a running sequence was preempted.",
            _counter("num_preemptions"),
        ),
    },
    histograms={
        "time_to_first_token_seconds": "time_to_first_token_seconds",
        "inter_token_latency_seconds": "inter_token_latency_seconds",
        "e2e_request_latency_seconds": "e2e_request_latency_seconds",
        "queue_time_seconds": "request_queue_time_seconds",
        "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
        "prompt_tokens_histogram": "request_prompt_tokens",
        "generation_tokens_histogram": "request_generation_tokens",
    },
)

_PROMPT_S: Final = _sum("request_prefill_time_seconds")
_PREDICTED_S: Final = _sum("request_decode_time_seconds")

LLAMA_CPP: Final = PeerNames(
    "llamacpp",
    gauges={
        "requests_processing": (_RUNNING, _running),
        "requests_deferred": (_WAITING, _waiting),
        "kv_cache_usage_ratio": ("Share of the KV-cache blocks in use, 0 to 1.", _kv_cache_usage),
        "prompt_tokens_seconds": (
            "Prompt tokens per second of a sequence, on average.",
            _ratio(_counter("prompt_tokens"), _PROMPT_S),
        ),
        "predicted_tokens_seconds": (
            "Generated tokens per second of a sequence, on average.",
            _ratio(_counter("generation_tokens"), _PREDICTED_S),
        ),
    },
    counters={
        "prompt_tokens": (_PROMPT, _counter("prompt_tokens")),
        "prompt_seconds": (
            "Seconds from when sequences were scheduled to their first token.",
            _PROMPT_S,
        ),
        "tokens_predicted": (_GENERATED, _counter("generation_tokens")),
        "tokens_predicted_seconds": (
            "Seconds from the first tokens of sequences to their last.",
            _PREDICTED_S,
        ),
        "n_decode": ("Steps that the core scheduled.", _counter("scheduler_steps")),
        **{
            name: (text, _counter(name))
            for name, text in {
                "spec_decode_num_drafts": "Drafts that the model verified.",
                "spec_decode_num_draft_tokens": "Draft tokens that the model verified.",
                "spec_decode_num_accepted_tokens": "Draft tokens that became output.",
            }.items()
        },
    },
    histograms={},
)

PEERS: Final = {"sglang": SGLANG, "llama.cpp": LLAMA_CPP}
"""Value of `--metrics-compat` -> the names."""
