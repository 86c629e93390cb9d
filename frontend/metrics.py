"""The Prometheus series of one engine.

Everything is counted once, in `CoreMetrics`; a scrape adds up those of all frontends and renders them under
`engine:` and, on request, under vLLM's names too, whose meanings and buckets they share.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..protocol.arrays import float32_view
from ..protocol.config import EngineConfig
from ..protocol.messages import CoreReady, FinishReason, SchedulerStats
from ..protocol.supervisor_messages import EngineStatus
from .core_metrics import CoreMetrics, SharedMetrics
from .histogram import Histogram, decimal_bounds

if TYPE_CHECKING:
    from .request_group import RequestGroup, Sequence

ScalarFamily = GaugeMetricFamily | CounterMetricFamily
Family = ScalarFamily | HistogramMetricFamily

GAUGES: Final[dict[str, tuple[str, Callable[[SchedulerStats], float]]]] = {
    "num_requests_running": ("Sequences in the running batch.", lambda s: s.num_running),
    "num_requests_waiting": ("Sequences waiting to be scheduled.", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Share of the KV-cache blocks in use, 0 to 1.",
        lambda s: s.kv_cache_usage,
    ),
}

WAITING_REASONS: Final[dict[str, Callable[[SchedulerStats], float]]] = {
    "capacity": lambda s: s.num_waiting - s.num_deferred,
    "deferred": lambda s: s.num_deferred,
}

OLD_GAUGES: Final = {"gpu_cache_usage_perc": GAUGES["kv_cache_usage_perc"]}
OLD_HISTOGRAMS: Final = {"time_per_output_token_seconds": "inter_token_latency_seconds"}
"""What vLLM called some metrics before; dashboards still do."""

OWN_GAUGES: Final[dict[str, tuple[str, Callable[[SchedulerStats], float]]]] = {
    "host_cache_usage_perc": (
        "Share of the host tier's blocks with content, 0 to 1.",
        lambda s: s.host_cache_usage,
    ),
}

COUNTERS: Final = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Preemptions of running sequences.",
    "corrupted_requests": "Requests with NaNs in their logits.",
    "spec_decode_num_drafts": "How often drafts of a sequence were verified.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were right.",
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Tokens generated.",
}

CounterValue: TypeAlias = Callable[[Mapping[str, int]], int]


def _found_on_device(counters: Mapping[str, int]) -> int:
    return counters["prefix_cache_hits"] - counters["host_cache_hits"]


VLLM_COUNTERS: Final[dict[str, tuple[str, CounterValue]]] = {
    "prefix_cache_hits": ("Prompt tokens found on the device.", _found_on_device),
    "gpu_prefix_cache_hits": ("The same, as it was called before.", _found_on_device),
    "gpu_prefix_cache_queries": (
        "prefix_cache_queries, as it was called before.",
        itemgetter("prefix_cache_queries"),
    ),
}
"""Counters that vLLM counts in another way, or called otherwise before."""

VLLM_HOST_COUNTERS: Final[dict[str, tuple[str, CounterValue]]] = {
    "external_prefix_cache_queries": (
        "Prompt tokens looked up in the host tier: those that were not on the device.",
        lambda counters: counters["prefix_cache_queries"] - _found_on_device(counters),
    ),
    "external_prefix_cache_hits": (
        "Prompt tokens found in the host tier.",
        itemgetter("host_cache_hits"),
    ),
}
"""To vLLM, too, memory for offloading is a cache outside its own."""

REJECTIONS: Final = {
    FinishReason.REJECTED: "queue_full",
    FinishReason.THROTTLED: "tenant_limit",
    FinishReason.EXPIRED: "deadline",
}
"""Why a core did not admit a request."""

OWN_COUNTERS: Final = {
    "scheduler_steps": "Steps that the scheduler made.",
    "scheduled_tokens": "Tokens computed in all steps.",
    "host_cache_hits": "Those of the prompt tokens found in the prefix cache that were in its host tier.",
    "conservation_violations": "Blocks or requests that the core's own checks found miscounted.",
    "kv_blocks_copied_out": "KV-cache blocks copied to the host tier.",
    "kv_blocks_copied_in": "KV-cache blocks copied back from the host tier.",
}

FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKEN_BOUNDS: Final = (
    *(1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0),
)

BLOCK_TIME_BOUNDS: Final = (
    *(0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0),
)

HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...] | None]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN_BOUNDS),
    "inter_token_latency_seconds": ("Between successive tokens of a sequence.", TOKEN_BOUNDS),
    "request_time_per_output_token_seconds": ("A sequence's mean time per token.", TOKEN_BOUNDS),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_BOUNDS),
    "request_queue_time_seconds": ("From queued to first scheduled.", REQUEST_BOUNDS),
    "request_prefill_time_seconds": ("From first scheduled to first token.", REQUEST_BOUNDS),
    "request_decode_time_seconds": ("From first token to last.", REQUEST_BOUNDS),
    "request_inference_time_seconds": ("From first scheduled to last token.", REQUEST_BOUNDS),
    "iteration_tokens_total": ("Tokens computed in a step.", STEP_TOKEN_BOUNDS),
    "request_prompt_tokens": ("Prompt tokens of a sequence.", None),
    "request_generation_tokens": ("Tokens generated for a sequence.", None),
    "request_max_num_generation_tokens": ("Tokens of the longest of a request's n outputs.", None),
    "request_params_max_tokens": ("The max_tokens of a sequence.", None),
    "request_params_n": ("The n of a request.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    "kv_block_lifetime_seconds": (
        "From when a sampled block was cached until it was evicted.",
        BLOCK_TIME_BOUNDS,
    ),
    "kv_block_idle_before_evict_seconds": (
        "From a sampled block's last use until it was evicted.",
        BLOCK_TIME_BOUNDS,
    ),
    "kv_block_reuse_gap_seconds": (
        "Between two uses of a sampled block that was free in between.",
        BLOCK_TIME_BOUNDS,
    ),
}
"""Name -> documentation and bucket bounds; None stands for 1, 2, 5, 10 ... up to the context length."""


class Metrics(Collector):
    """Records what happens and renders it for a scrape."""

    def __init__(self, config: EngineConfig, client_index: int = 0) -> None:
        num_cores = config.parallel.data_parallel_size
        self._shared = SharedMetrics(config, client_index)
        self._cores = self._shared.inherit() or [
            _new_core_metrics(config.model.max_model_len) for _ in range(num_cores)
        ]
        self._num_frames_dropped_before = [core.num_frames_dropped_here for core in self._cores]
        self._count_dropped_frames: list[Callable[[], int]] = [int] * num_cores
        self._is_up: Callable[[int], bool] = lambda _: False
        self._get_status: Callable[[], EngineStatus] = lambda: EngineStatus([])
        self._config = config
        self._model_name = config.model.served_names[0]
        self._registry = CollectorRegistry()
        self._registry.register(self)
        if config.parallel.api_server_count == 1:
            # A scrape does not choose the frontend that answers, and these counts do not add up.
            ProcessCollector(registry=self._registry)

    def watch_dropped_frames(self, core_index: int, count: Callable[[], int]) -> None:
        """`count` tells how many messages of a core this frontend has dropped."""
        self._count_dropped_frames[core_index] = count

    def watch_replicas(self, is_up: Callable[[int], bool]) -> None:
        """`is_up` tells whether a replica can compute."""
        self._is_up = is_up

    def watch_status(self, get_status: Callable[[], EngineStatus]) -> None:
        """`get_status` tells what the supervisor last said."""
        self._get_status = get_status

    def record_ready(self, ready: CoreReady) -> None:
        """A core has nothing to do as yet."""
        core = self._cores[ready.core_index]
        core.ready = ready
        core.stats, core.stats_time = SchedulerStats(), time.monotonic()

    def record_tokens(self, core_index: int, num_tokens: int, intervals: list[float]) -> None:
        """Tokens of one message; `intervals` are the seconds since each sequence's previous token."""
        core = self._cores[core_index]
        core.counters["generation_tokens"] += num_tokens
        if intervals:
            core.histograms["inter_token_latency_seconds"].observe_all(intervals)

    def record_first_token(self, sequence: Sequence) -> None:
        core = self._cores[sequence.core_index]
        core.counters["prompt_tokens"] += sequence.num_prompt_tokens
        waited = time.monotonic() - sequence.arrival_time
        core.histograms["time_to_first_token_seconds"].observe(waited)

    def record_finished(self, sequence: Sequence) -> None:
        core = self._cores[sequence.core_index]
        observed = core.histograms
        num_tokens = sequence.num_generated_tokens
        if sequence.finish_reason is not None:
            core.num_finished[sequence.finish_reason] += 1
        observed["e2e_request_latency_seconds"].observe(
            sequence.finish_time - sequence.arrival_time
        )
        observed["request_prompt_tokens"].observe(sequence.num_prompt_tokens)
        observed["request_generation_tokens"].observe(num_tokens)
        if sequence.max_tokens is not None:
            observed["request_params_max_tokens"].observe(sequence.max_tokens)
        scheduled, first = sequence.scheduled_time, sequence.first_token_time
        if scheduled and sequence.queued_time:
            observed["request_queue_time_seconds"].observe(scheduled - sequence.queued_time)
        if not first:
            return
        decode_time = sequence.last_token_time - first
        observed["request_decode_time_seconds"].observe(decode_time)
        if scheduled:
            observed["request_prefill_time_seconds"].observe(first - scheduled)
            observed["request_inference_time_seconds"].observe(first + decode_time - scheduled)
        if num_tokens > 1:
            observed["request_time_per_output_token_seconds"].observe(
                decode_time / (num_tokens - 1)
            )

    def record_group(self, group: RequestGroup) -> None:
        """All sequences of a group have ended: those of each prompt are what vLLM calls a request."""
        for outputs in group.outputs_by_prompt():
            observed = self._cores[outputs[0].core_index].histograms
            observed["request_params_n"].observe(len(outputs))
            observed["request_max_num_generation_tokens"].observe(
                max(sequence.num_generated_tokens for sequence in outputs)
            )

    def record_rejection(self, core_index: int, reason: str) -> None:
        self._cores[core_index].num_rejected[reason] += 1

    def record_stats(self, core_index: int, stats: SchedulerStats) -> None:
        core = self._cores[core_index]
        core.stats, core.stats_time = stats, time.monotonic()
        counters = core.counters
        counters["prefix_cache_queries"] += stats.prefix_cache_queries
        counters["prefix_cache_hits"] += stats.prefix_cache_hits
        counters["host_cache_hits"] += stats.host_cache_hits
        counters["num_preemptions"] += stats.num_preemptions
        counters["corrupted_requests"] += stats.num_corrupted_requests
        core.num_frames_dropped_there += stats.num_dropped_frames
        counters["scheduler_steps"] += stats.num_steps
        counters["scheduled_tokens"] += stats.num_scheduled_tokens
        counters["conservation_violations"] += stats.num_violations
        counters["kv_blocks_copied_out"] += stats.num_blocks_copied_out
        counters["kv_blocks_copied_in"] += stats.num_blocks_copied_in
        if (drafts := stats.spec_decoding) is not None:
            counters["spec_decode_num_drafts"] += drafts.num_drafts
            counters["spec_decode_num_draft_tokens"] += drafts.num_draft_tokens
            counters["spec_decode_num_accepted_tokens"] += drafts.num_accepted_tokens
        for name, seconds in (
            ("kv_block_lifetime_seconds", stats.block_lifetimes),
            ("kv_block_idle_before_evict_seconds", stats.block_idle_times),
            ("kv_block_reuse_gap_seconds", stats.block_reuse_gaps),
        ):
            if seconds:
                core.histograms[name].observe_all(float32_view(seconds).tolist())
        if stats.num_steps:
            core.histograms["iteration_tokens_total"].observe(
                stats.num_scheduled_tokens / stats.num_steps, stats.num_steps
            )

    def publish(self) -> None:
        """Show the other frontends, if there are any, what has been recorded here."""
        self._shared.publish(self._recorded())

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The body and content type of a scrape, in the format that the Accept header prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Family]:
        cores = self._shared.total(self._recorded())
        yield from self._families(
            "engine", cores, {**GAUGES, **OWN_GAUGES}, _counted({**COUNTERS, **OWN_COUNTERS})
        )
        yield self._dropped_frames(cores)
        yield self._replicas_up(len(cores))
        if "vllm" in self._config.frontend.metrics_compat:
            counters = _counted(COUNTERS) | VLLM_COUNTERS
            if self._config.cache.host_gib:
                counters |= VLLM_HOST_COUNTERS
            yield from self._families("vllm", cores, GAUGES | OLD_GAUGES, counters)
            yield from self._histograms("vllm", cores, OLD_HISTOGRAMS)

    def describe(self) -> Iterator[Family]:
        return iter(())

    def _recorded(self) -> list[CoreMetrics]:
        for core, before, count in zip(
            self._cores, self._num_frames_dropped_before, self._count_dropped_frames, strict=True
        ):
            core.num_frames_dropped_here = before + count()
        return self._cores

    def _families(
        self,
        prefix: str,
        cores: list[CoreMetrics],
        gauges: dict[str, tuple[str, Callable[[SchedulerStats], float]]],
        counters: dict[str, tuple[str, CounterValue]],
    ) -> Iterator[Family]:
        for name, (documentation, value_of) in gauges.items():
            values = [value_of(core.stats) for core in cores]
            yield self._family(GaugeMetricFamily, f"{prefix}:{name}", documentation, values)
        yield self._family_by(
            GaugeMetricFamily,
            f"{prefix}:num_requests_waiting_by_reason",
            "Sequences that wait for room, or first for a grammar or for blocks from elsewhere.",
            "reason",
            [{why: count(core.stats) for why, count in WAITING_REASONS.items()} for core in cores],
        )
        for name, (documentation, count_of) in counters.items():
            counts = [count_of(core.counters) for core in cores]
            yield self._family(CounterMetricFamily, f"{prefix}:{name}", documentation, counts)
        yield self._family_by(
            CounterMetricFamily,
            f"{prefix}:request_success",
            "Sequences that ended, by reason.",
            "finished_reason",
            [{str(why): count for why, count in core.num_finished.items()} for core in cores],
        )
        yield self._family_by(
            CounterMetricFamily,
            f"{prefix}:admission_rejections",
            "Requests that were refused at the door.",
            "reason",
            [core.num_rejected for core in cores],
        )
        yield from self._histograms(prefix, cores, {name: name for name in HISTOGRAMS})
        yield self._cache_config(prefix, cores)

    def _family(
        self, kind: type[ScalarFamily], name: str, documentation: str, values: Iterable[float]
    ) -> ScalarFamily:
        """One sample for each replica."""
        family = kind(name, documentation, labels=["model_name", "engine"])
        for index, value in enumerate(values):
            family.add_metric([self._model_name, str(index)], value)
        return family

    def _family_by(
        self,
        kind: type[ScalarFamily],
        name: str,
        documentation: str,
        label: str,
        values: Iterable[Mapping[str, float]],
    ) -> ScalarFamily:
        """One sample for each replica and value of `label`."""
        family = kind(name, documentation, labels=["model_name", "engine", label])
        for index, by_label in enumerate(values):
            for label_value, value in by_label.items():
                family.add_metric([self._model_name, str(index), label_value], value)
        return family

    def _histograms(
        self, prefix: str, cores: list[CoreMetrics], names: dict[str, str]
    ) -> Iterator[Family]:
        """Histograms under other names: `names` maps each to its own."""
        for name, source in names.items():
            family = HistogramMetricFamily(
                f"{prefix}:{name}", HISTOGRAMS[source][0], labels=["model_name", "engine"]
            )
            for index, core in enumerate(cores):
                histogram = core.histograms[source]
                family.add_metric(
                    [self._model_name, str(index)], histogram.cumulative_buckets(), histogram.sum
                )
            yield family

    def _dropped_frames(self, cores: list[CoreMetrics]) -> Family:
        family = self._family_by(
            CounterMetricFamily,
            "engine:dropped_frames",
            "Messages that did not decode, made no sense or came twice, by who dropped them.",
            "process",
            [
                {"core": core.num_frames_dropped_there, "frontend": core.num_frames_dropped_here}
                for core in cores
            ],
        )
        status = self._get_status()
        num_dropped: Counter[int | None] = Counter()
        for process in status.processes:
            num_dropped[process.replica] += process.num_dropped_frames
        for index in range(len(cores)):
            family.add_metric([self._model_name, str(index), "worker"], num_dropped[index])
        # What the supervisor and the frontends tell one another is of no replica; every frontend tells the same.
        family.add_metric([self._model_name, "", "frontend"], num_dropped[None])
        family.add_metric([self._model_name, "", "supervisor"], status.num_dropped_frames)
        return family

    def _replicas_up(self, num_replicas: int) -> Family:
        return self._family(
            GaugeMetricFamily,
            "engine:replica_up",
            "1 while the replica's core and workers are ready, else 0.",
            map(self._is_up, range(num_replicas)),
        )

    def _cache_config(self, prefix: str, cores: list[CoreMetrics]) -> Family:
        cache = self._config.cache
        family = GaugeMetricFamily(
            f"{prefix}:cache_config_info",
            "How the KV cache of each core is cut.",
            labels=[
                *("model_name", "engine", "block_size", "num_gpu_blocks"),
                *("enable_prefix_caching", "gpu_memory_utilization", "cache_dtype"),
            ],
        )
        for index, core in enumerate(cores):
            if core.ready is not None:
                family.add_metric(
                    [
                        self._model_name,
                        str(index),
                        str(core.ready.block_size),
                        str(core.ready.num_blocks),
                        str(cache.enable_prefix_caching),
                        str(cache.gpu_memory_utilization),
                        cache.kv_cache_dtype,
                    ],
                    1.0,
                )
        return family


def _counted(documentation: dict[str, str]) -> dict[str, tuple[str, CounterValue]]:
    return {name: (text, itemgetter(name)) for name, text in documentation.items()}


def _new_core_metrics(max_model_len: int) -> CoreMetrics:
    lengths = decimal_bounds(max_model_len)
    return CoreMetrics(
        counters=dict.fromkeys((*COUNTERS, *OWN_COUNTERS), 0),
        histograms={
            name: Histogram.with_bounds(lengths if bounds is None else bounds)
            for name, (_, bounds) in HISTOGRAMS.items()
        },
        num_finished=dict.fromkeys(FinishReason, 0),
        num_rejected=dict.fromkeys((*REJECTIONS.values(), "draining"), 0),
        stats=SchedulerStats(),
    )
