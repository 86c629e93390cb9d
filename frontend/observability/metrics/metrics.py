"""The metrics of one engine. Everything is counted once in `CoreMetrics`, and a scrape adds those of all frontends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from ....protocol.arrays import float32_view, int32_list
from ....protocol.config import EngineConfig
from ....protocol.messages import CoreReady, FinishReason, SchedulerStats
from ....protocol.store.messages import StoreState
from ....protocol.supervisor_messages import EngineStatus
from .core_metrics import CoreMetrics, Counts, SharedMetrics
from .histogram import Histogram, decimal_bounds
from .names import (
    COUNTERS,
    DISK_COUNTERS,
    HISTOGRAMS,
    OWN_COUNTERS,
    OWN_HISTOGRAMS,
    REJECTIONS,
    TRANSFER_COUNTERS,
)

if TYPE_CHECKING:
    from .exposition import Exposition, Family

MAX_LORA_LABELS: Final = 1000
"""Maximum number of LoRA adapters with counts of their own; `OTHER_LORAS` counts the rest."""
OTHER_LORAS: Final = "other"

LOAD_AGE_S: Final = 0.1
"""Maximum age in seconds of the load in response headers. The counts of other frontends are read from files."""


class MeasuredSequence(Protocol):
    """The fields of a sequence that the metrics read. Times are CLOCK_MONOTONIC seconds; 0 means not yet."""

    core_index: int
    num_prompt_tokens: int
    num_preemptions: int
    max_tokens: int | None
    arrival_time: float
    queued_time: float
    scheduled_time: float
    first_token_time: float
    last_token_time: float
    finish_time: float

    @property
    def num_generated_tokens(self) -> int:
        """The number of generated tokens so far."""

    @property
    def lora_name(self) -> str:
        """The name of the LoRA adapter; "" for the base model."""


class Metrics:
    """Records events and renders the metrics for a scrape."""

    def __init__(self, config: EngineConfig, client_index: int = 0) -> None:
        num_cores = config.parallel.data_parallel_size
        self._shared = SharedMetrics(config, client_index)
        self._cores = [_new_core_metrics(config) for _ in range(num_cores)]
        for core, previous in zip(self._cores, self._shared.load_previous() or (), strict=False):
            core.add_counts(previous)
        self._num_frames_dropped_before = [core.num_frames_dropped_here for core in self._cores]
        self._count_dropped_frames: list[Callable[[], int]] = [int] * num_cores
        self._is_up: Callable[[int], bool] = lambda _: False
        self._count_unfinished: Callable[[], int] = int
        self._stats: list[SchedulerStats] = []
        self._stats_time = -math.inf
        self._get_status: Callable[[], EngineStatus] = lambda: EngineStatus([])
        self._get_store_state: Callable[[], StoreState] = StoreState
        self._config = config
        self._exposition: Exposition | None = None

    def watch_dropped_frames(self, core_index: int, count: Callable[[], int]) -> None:
        """Use `count` to read how many messages of a core this frontend has dropped."""
        self._count_dropped_frames[core_index] = count

    def watch_replicas(self, is_up: Callable[[int], bool]) -> None:
        """Use `is_up` to read whether a replica can compute."""
        self._is_up = is_up

    def watch_unfinished(self, count: Callable[[], int]) -> None:
        """Use `count` to read the number of this frontend's unfinished sequences."""
        self._count_unfinished = count

    def watch_status(self, get_status: Callable[[], EngineStatus]) -> None:
        """Use `get_status` to read the latest supervisor status."""
        self._get_status = get_status

    def watch_store(self, get_state: Callable[[], StoreState]) -> None:
        """Use `get_state` to read the latest state of the store."""
        self._get_store_state = get_state

    def record_ready(self, ready: CoreReady) -> None:
        """Record that a core is ready and idle."""
        core = self._cores[ready.core_index]
        core.ready = ready
        core.stats, core.stats_time = SchedulerStats(), time.monotonic()

    def record_tokens(self, core_index: int, num_tokens: int, intervals: list[float]) -> None:
        """Record the tokens of one message. `intervals` are the seconds since each sequence's previous token."""
        core = self._cores[core_index]
        core.counters["generation_tokens"] += num_tokens
        if intervals:
            core.histograms["inter_token_latency_seconds"].observe_all(intervals)

    def record_first_token(self, sequence: MeasuredSequence) -> None:
        """Record that a sequence has received its first token."""
        core = self._cores[sequence.core_index]
        core.counters["prompt_tokens"] += sequence.num_prompt_tokens
        waited = time.monotonic() - sequence.arrival_time
        core.histograms["time_to_first_token_seconds"].observe(waited)

    def record_finished(self, sequence: MeasuredSequence, outcome: FinishReason) -> None:
        """Record a finished sequence. `outcome` may differ from the finish reason that the client receives."""
        core = self._cores[sequence.core_index]
        observed = core.histograms
        num_tokens = sequence.num_generated_tokens
        core.num_finished[outcome] += 1
        if name := sequence.lora_name:
            counts = core.num_finished_by_lora
            if name not in counts and len(counts) >= MAX_LORA_LABELS:
                name = OTHER_LORAS
            counts[name] = counts.get(name, 0) + 1
        observed["e2e_request_latency_seconds"].observe(
            sequence.finish_time - sequence.arrival_time
        )
        observed["request_prompt_tokens"].observe(sequence.num_prompt_tokens)
        observed["request_generation_tokens"].observe(num_tokens)
        observed["request_num_preemptions"].observe(sequence.num_preemptions)
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

    def record_scheduler_times(self, core_index: int, seconds: list[float]) -> None:
        """Record the scheduler times of finished sequences in seconds; 0.0 is for a sequence that never ran."""
        observed = self._cores[core_index].histograms["request_scheduler_time_seconds"]
        observed.observe_all([each for each in seconds if each])

    def record_group(self, outputs_by_prompt: Iterable[Sequence[MeasuredSequence]]) -> None:
        """Record a finished group. In vLLM's metrics, the sequences of one prompt are one request."""
        # A group may have thousands of prompts, most of them with equal counts.
        requests: dict[tuple[int, int, int], int] = {}
        for outputs in outputs_by_prompt:
            num_tokens = max([sequence.num_generated_tokens for sequence in outputs])
            counts = outputs[0].core_index, len(outputs), num_tokens
            requests[counts] = requests.get(counts, 0) + 1
        for (core_index, num_outputs, num_tokens), times in requests.items():
            observed = self._cores[core_index].histograms
            observed["request_params_n"].observe(num_outputs, times)
            observed["request_max_num_generation_tokens"].observe(num_tokens, times)

    def record_rejection(self, core_index: int, reason: str) -> None:
        """Record that a core did not admit a request."""
        self._cores[core_index].num_rejected[reason] += 1

    def record_audio(self, core_index: int, seconds: float) -> None:
        """Record a transcribed file of this length in seconds, if a core decoded at least one of its windows."""
        self._cores[core_index].counters["audio_seconds"] += math.ceil(seconds)

    def record_stats(self, core_index: int, stats: SchedulerStats, sent_time: float) -> None:
        """Record the statistics that a core sent at a time in CLOCK_MONOTONIC seconds."""
        core = self._cores[core_index]
        core.stats, core.stats_time = stats, sent_time
        counters = core.counters
        counters["prefix_cache_queries"] += stats.prefix_cache_queries
        counters["prefix_cache_hits"] += stats.prefix_cache_hits
        counters["cpu_offload_hits"] += stats.cpu_offload_hits
        counters["num_preemptions"] += stats.num_preemptions
        counters["corrupted_requests"] += stats.num_corrupted_requests
        core.num_frames_dropped_there += stats.num_dropped_frames
        counters["scheduler_steps"] += stats.num_steps
        counters["scheduled_tokens"] += stats.num_scheduled_tokens
        counters["invariant_violations"] += stats.num_invariant_violations
        counters["kv_blocks_copied_out"] += stats.num_blocks_copied_out
        counters["kv_blocks_copied_in"] += stats.num_blocks_copied_in
        if (connector := stats.kv_connector) is not None:
            counters["kv_disk_hits"] += connector.prefix_cache_hits
            for name in ("read_bytes", "written_bytes", "errors"):
                counters[f"kv_disk_{name}"] += int(connector.counts.get(name, 0))
            counters["kv_transfer_hits"] += connector.prefix_cache_hits
            counters["kv_transfer_failed_loads"] += connector.num_failed_loads
            counters["kv_transfer_expired"] += connector.num_expired_transfers
            for name in ("received_bytes", "sent_bytes"):
                counters[f"kv_transfer_{name}"] += int(connector.counts.get(name, 0))
        if (drafts := stats.spec_decoding) is not None:
            counters["spec_decode_num_drafts"] += drafts.num_drafts
            counters["spec_decode_num_draft_tokens"] += drafts.num_draft_tokens
            counters["spec_decode_num_accepted_tokens"] += drafts.num_accepted_tokens
            core.count_accepted(drafts.num_accepted_tokens_per_pos)
        for name, seconds in (
            ("kv_block_lifetime_seconds", stats.block_lifetimes),
            ("kv_block_idle_before_evict_seconds", stats.block_idle_times),
            ("kv_block_reuse_gap_seconds", stats.block_reuse_gaps),
        ):
            if seconds:
                core.histograms[name].observe_all(float32_view(seconds).tolist())
        if stats.step_tokens:
            core.histograms["iteration_tokens_total"].observe_all(int32_list(stats.step_tokens))

    def count_unfinished(self) -> int:
        """Return the number of running and waiting sequences of all frontends."""
        return sum(core.num_unfinished for core in self._shared.total(self._recorded()))

    def read_stats(self) -> list[SchedulerStats]:
        """Return the newest statistics of each replica's scheduler."""
        now = time.monotonic()
        if now - self._stats_time > LOAD_AGE_S:
            self._stats = [core.stats for core in self._shared.total(self._recorded())]
            self._stats_time = now
        return self._stats

    def read_load(self) -> dict[str, float]:
        """Return vLLM's metric name -> load: sums over the replicas, and the usage of the fullest KV cache."""
        stats = self.read_stats()
        return {
            "kv_cache_usage_perc": max(each.kv_cache_usage for each in stats),
            "num_requests_running": float(sum(each.num_running for each in stats)),
            "num_requests_waiting": float(sum(each.num_waiting for each in stats)),
        }

    def cache_sizes(self) -> list[int]:
        """Return the number of tokens that fit in the KV cache of each replica; 0 until it is ready."""
        readies = (core.ready for core in self._cores)
        return [ready.num_blocks * ready.block_size if ready else 0 for ready in readies]

    def count_cached_tokens(self) -> int:
        """Return the number of tokens that fit in the KV cache of the smallest ready replica."""
        return min(filter(None, self.cache_sizes()), default=0)

    def publish(self) -> None:
        """Publish this frontend's counts to the other frontends."""
        self._shared.publish(self._recorded())

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the body and content type of a scrape in the format preferred by the Accept header."""
        if self._exposition is None:
            # A late import, because the first tokens do not need prometheus-client.
            from .exposition import Exposition

            self._exposition = Exposition(self._config, self.count)
        return self._exposition.render(accept)

    def families(self) -> list[Family]:
        """Return all metrics, under vLLM's names, too."""
        from .exposition import Exposition

        return list(Exposition(self._config, self.count, also=("vllm",)).collect())

    def count(self) -> Counts:
        """Return the counts of all frontends."""
        cores = self._shared.total(self._recorded())
        are_up = [self._is_up(index) for index in range(len(cores))]
        return Counts(cores, are_up, self._get_status(), self._get_store_state())

    def _recorded(self) -> list[CoreMetrics]:
        for core, before, count in zip(
            self._cores, self._num_frames_dropped_before, self._count_dropped_frames, strict=True
        ):
            core.num_frames_dropped_here = before + count()
        self._cores[0].num_unfinished = self._count_unfinished()
        return self._cores


def _new_core_metrics(config: EngineConfig) -> CoreMetrics:
    lengths = decimal_bounds(config.model.max_model_len)
    drafts = config.scheduler.speculative
    return CoreMetrics(
        counters=dict.fromkeys((*COUNTERS, *OWN_COUNTERS, *DISK_COUNTERS, *TRANSFER_COUNTERS), 0),
        histograms={
            name: Histogram.with_bounds(lengths if bounds is None else bounds)
            for name, (_, bounds) in (HISTOGRAMS | OWN_HISTOGRAMS).items()
        },
        num_finished=dict.fromkeys(FinishReason, 0),
        num_rejected=dict.fromkeys((*REJECTIONS.values(), "draining"), 0),
        stats=SchedulerStats(),
        num_finished_by_lora={},
        num_accepted_per_pos=[0] * (drafts.num_speculative_tokens if drafts is not None else 0),
    )
