"""The names, documentation and buckets of the Prometheus series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Final, TypeAlias

from ....protocol.messages import FinishReason, SchedulerStats

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
"""Former vLLM name, which dashboards still use -> the current name."""

OWN_GAUGES: Final[dict[str, tuple[str, Callable[[SchedulerStats], float]]]] = {
    "cpu_offload_usage_perc": (
        "Share of the blocks for CPU KV offload in use, 0 to 1.",
        lambda s: s.cpu_offload_usage,
    ),
}

COUNTERS: Final = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Times that a running sequence was preempted.",
    "corrupted_requests": "Requests with NaNs in their logits.",
    "spec_decode_num_drafts": "Drafts that the model verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that the model verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that became output.",
    "prompt_tokens": "Prompt tokens of sequences that have received their first token.",
    "generation_tokens": "Tokens generated.",
}

CounterValue: TypeAlias = Callable[[Mapping[str, int]], int]


def _found_on_device(counters: Mapping[str, int]) -> int:
    return counters["prefix_cache_hits"] - counters["cpu_offload_hits"]


VLLM_COUNTERS: Final[dict[str, tuple[str, CounterValue]]] = {
    "prefix_cache_hits": (
        "Prompt tokens found in the prefix cache on the device.",
        _found_on_device,
    ),
    "gpu_prefix_cache_hits": ("Former name of prefix_cache_hits.", _found_on_device),
    "gpu_prefix_cache_queries": (
        "Former name of prefix_cache_queries.",
        itemgetter("prefix_cache_queries"),
    ),
}
"""Counters that vLLM defines differently, or for which it formerly used another name."""

VLLM_HOST_COUNTERS: Final[dict[str, tuple[str, CounterValue]]] = {
    "external_prefix_cache_queries": (
        "Prompt tokens looked up in CPU offload, on disk or in LMCache, because they were not on the device.",
        lambda counters: counters["prefix_cache_queries"] - _found_on_device(counters),
    ),
    "external_prefix_cache_hits": (
        "Prompt tokens found in CPU offload, on disk or in LMCache.",
        lambda counters: counters["cpu_offload_hits"] + counters["kv_disk_hits"],
    ),
}
"""Counters of CPU offload, the disk and LMCache, which vLLM's metrics call an external cache."""

REJECTIONS: Final = {
    FinishReason.REJECTED: "queue_full",
    FinishReason.THROTTLED: "tenant_limit",
    FinishReason.EXPIRED: "deadline",
}
"""Finish reason -> the label for a request that a core did not admit."""

OWN_COUNTERS: Final = {
    "scheduler_steps": "Steps that the core scheduled.",
    "scheduled_tokens": "Tokens scheduled in all steps, including draft tokens.",
    "cpu_offload_hits": "Prompt tokens found in the prefix cache that came from CPU offload.",
    "invariant_violations": "Failed invariant checks of the core.",
    "kv_blocks_copied_out": "KV-cache blocks copied to CPU memory.",
    "audio_seconds": "Seconds of transcribed audio, rounded up for each file.",
    "kv_blocks_copied_in": "KV-cache blocks copied back from CPU memory.",
}

DISK_COUNTERS: Final = {
    "kv_disk_hits": "Prompt tokens found on disk or in LMCache, beyond those in the prefix cache.",
    "kv_disk_read_bytes": "Bytes of KV-cache blocks read from disk or LMCache.",
    "kv_disk_written_bytes": "Bytes of KV-cache blocks written to disk or LMCache.",
    "kv_disk_errors": "KV-cache blocks that could not be read or written, and failures of the disk or LMCache.",
}
"""Counters of a server with --kv-disk."""

TRANSFER_COUNTERS: Final = {
    "kv_transfer_hits": "Prompt tokens loaded by KV connectors, beyond those in the prefix cache.",
    "kv_transfer_failed_loads": "Requests whose blocks a KV connector could not load, in whole or in part.",
    "kv_transfer_expired": "Requests whose blocks were held for another replica, and not fetched in time.",
    "kv_transfer_received_bytes": "Bytes of KV-cache blocks received from other replicas.",
    "kv_transfer_sent_bytes": "Bytes of KV-cache blocks sent to other replicas.",
}
"""Counters of a server with KV connectors."""

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

SCHEDULER_TIME_BOUNDS: Final = (
    *(0.00001, 0.00005, 0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0),
)

HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...] | None]]] = {
    "time_to_first_token_seconds": ("Seconds from arrival to the first token.", FIRST_TOKEN_BOUNDS),
    "inter_token_latency_seconds": (
        "Seconds between successive tokens of a sequence.",
        TOKEN_BOUNDS,
    ),
    "request_time_per_output_token_seconds": (
        "Mean seconds per generated token of a sequence, after the first.",
        TOKEN_BOUNDS,
    ),
    "e2e_request_latency_seconds": (
        "Seconds from a sequence's arrival to its end.",
        REQUEST_BOUNDS,
    ),
    "request_queue_time_seconds": (
        "Seconds that a sequence waited in the queue before it was first scheduled.",
        REQUEST_BOUNDS,
    ),
    "request_prefill_time_seconds": (
        "Seconds from when a sequence was first scheduled to its first token.",
        REQUEST_BOUNDS,
    ),
    "request_decode_time_seconds": (
        "Seconds from the first token of a sequence to its last.",
        REQUEST_BOUNDS,
    ),
    "request_inference_time_seconds": (
        "Seconds from when a sequence was first scheduled to its last token.",
        REQUEST_BOUNDS,
    ),
    "iteration_tokens_total": (
        (
            "Prompt and generated tokens of a step; a prompt counts in the step that returns "
            "its first token."
        ),
        STEP_TOKEN_BOUNDS,
    ),
    "request_prompt_tokens": ("Prompt tokens of a sequence.", None),
    "request_generation_tokens": ("Tokens generated for a sequence.", None),
    "request_max_num_generation_tokens": ("Tokens of the longest of a request's n outputs.", None),
    "request_num_preemptions": (
        "Times that a sequence was preempted.",
        (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0),
    ),
    "request_params_max_tokens": ("The max_tokens that a sequence's request set.", None),
    "request_params_n": (
        "Outputs per prompt that a request asked for (its n).",
        (1.0, 2.0, 5.0, 10.0, 20.0),
    ),
    "kv_block_lifetime_seconds": (
        "Seconds from when a sampled block was cached until it was evicted.",
        BLOCK_TIME_BOUNDS,
    ),
    "kv_block_idle_before_evict_seconds": (
        "Seconds from a sampled block's last use until it was evicted.",
        BLOCK_TIME_BOUNDS,
    ),
    "kv_block_reuse_gap_seconds": (
        "Seconds between two uses of a sampled block that was free in between.",
        BLOCK_TIME_BOUNDS,
    ),
}
"""Name -> documentation and bucket bounds; None stands for 1, 2, 5, 10 ... up to the context length."""

OWN_HISTOGRAMS: Final[dict[str, tuple[str, tuple[float, ...] | None]]] = {
    "request_scheduler_time_seconds": (
        "Seconds that the scheduler worked while a sequence was running.",
        SCHEDULER_TIME_BOUNDS,
    ),
}
