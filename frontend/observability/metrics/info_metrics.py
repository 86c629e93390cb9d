"""Metrics whose information is in their labels: the KV cache, and the LoRA adapters in use.

Names and labels are vLLM's, because the endpoint picker of the Gateway API Inference Extension reads them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client.core import GaugeMetricFamily

from ....protocol.config import EngineConfig
from .core_metrics import CoreMetrics


def lora_family(
    prefix: str, config: EngineConfig, cores: Sequence[CoreMetrics]
) -> GaugeMetricFamily:
    """Return the metric with the LoRA adapters of running and waiting requests."""
    family = GaugeMetricFamily(
        f"{prefix}:lora_requests_info",
        "The LoRA adapters of running and waiting requests; the value is the time in seconds since 1970.",
        labels=[
            *("model_name", "engine", "max_lora"),
            *("running_lora_adapters", "waiting_lora_adapters"),
        ],
    )
    for index, core in enumerate(cores):
        age_s = time.monotonic() - core.stats_time
        family.add_metric(
            [
                config.model.served_names[0],
                str(index),
                str(config.scheduler.max_loras),
                ",".join(core.stats.running_loras),
                ",".join(core.stats.waiting_loras),
            ],
            time.time() - age_s if core.stats_time else 0.0,
        )
    return family


def cache_family(
    prefix: str, config: EngineConfig, cores: Sequence[CoreMetrics]
) -> GaugeMetricFamily:
    """Return the metric with the size and the settings of each core's KV cache."""
    cache = config.cache
    family = GaugeMetricFamily(
        f"{prefix}:cache_config_info",
        "The block size, block count and settings of each core's KV cache.",
        labels=[
            *("model_name", "engine", "block_size", "num_gpu_blocks"),
            *("enable_prefix_caching", "gpu_memory_utilization", "cache_dtype"),
            *("kv_cache_size_tokens", "kv_cache_max_concurrency"),
        ],
    )
    for index, core in enumerate(cores):
        if core.ready is not None:
            family.add_metric(
                [
                    config.model.served_names[0],
                    str(index),
                    str(core.ready.block_size),
                    str(core.ready.num_blocks),
                    str(cache.enable_prefix_caching),
                    str(cache.gpu_memory_utilization),
                    cache.kv_cache_dtype,
                    # Windows and states take fewer blocks than all tokens of a request would.
                    str(int(core.ready.max_concurrency * config.model.max_model_len)),
                    str(core.ready.max_concurrency),
                ],
                1.0,
            )
    return family
