"""Compute how many KV-cache blocks a worker can hold."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import (
    FULL_ATTENTION,
    KVCacheGroup,
    max_request_blocks,
    max_request_tokens,
)
from ...protocol.machine.memory import available_bytes, total_bytes
from .memory_profile import GIB, MemoryProfile

CPU_SHARE = 0.25
"""Fraction of the free memory for the KV caches of all workers. The rest is for other work and the page cache."""


def count_kv_blocks(
    config: EngineConfig,
    block_bytes: int,
    groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
    profile: MemoryProfile | None = None,
    *,
    reserved_bytes: int = 0,
) -> int:
    """Return the number of blocks that fit, including the null block, but at most as many as requests can use.

    Args:
        config: The configuration.
        block_bytes: Size of one block in bytes.
        groups: The KV-cache groups.
        profile: The memory of the GPU; None for host memory.
        reserved_bytes: Host memory that is free now, and that the worker will need for something else.

    Raises:
        ConfigError: Not even one request of `max_model_len` tokens fits. The message has the memory that would suffice
            and the length that fits.
    """
    cache = config.cache
    num_uncertain = config.scheduler.max_uncertain_tokens
    max_step_tokens = max(config.scheduler.max_num_batched_tokens, num_uncertain)
    num_excess = config.scheduler.max_excess_tokens
    max_tokens = config.model.max_model_len + num_excess
    blocks_per_request = max_request_blocks(
        groups, max_tokens, max_step_tokens, cache.block_size, num_uncertain
    )
    useful = blocks_per_request * config.scheduler.max_num_seqs + 1
    if config.model.is_encoder:
        # A request has its blocks during one step, and at most one of them is not full.
        num_steps = config.scheduler.max_steps_in_flight
        full_blocks = num_steps * max_step_tokens // cache.block_size
        in_flight = len(groups) * (full_blocks + config.scheduler.max_num_seqs) + 1
        useful = max(min(useful, in_flight), blocks_per_request + 1)
    remedy: Callable[[int], str] = "--kv-cache-memory-bytes {}".format
    if cache.num_blocks_override is not None:
        num_blocks = cache.num_blocks_override
        origin = "--num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = min(cache.kv_cache_memory_bytes // block_bytes, useful)
        origin = "--kv-cache-memory-bytes"
    elif profile is None:
        num_blocks = min(free_host_bytes(config, reserved_bytes) // block_bytes, useful)
        origin = "the free memory"
    else:
        num_blocks = min(profile.kv_cache // block_bytes, useful)
        origin = f"the GPU's memory ({profile})"
        remedy = partial(_larger_share, profile)
    if num_blocks < blocks_per_request + 1:
        fits = max_request_tokens(
            groups,
            max(num_blocks - 1, 0),
            max_step_tokens,
            cache.block_size,
            max_tokens,
            num_uncertain,
        )
        fits = max(fits - num_excess, 0)
        needed = (blocks_per_request + 1) * block_bytes
        raise ConfigError(
            f"{origin} holds a KV cache of {fits} tokens, but a request may have "
            f"{config.model.max_model_len}, which needs {needed / GIB:.2f} GiB ({remedy(needed)}), or use "
            f"--max-model-len {fits}"
        )
    return int(num_blocks)


def _larger_share(profile: MemoryProfile, needed: int) -> str:
    utilization = profile.utilization_for(needed)
    if utilization is None:
        return "more than the GPU has beside the model; use several with --tensor-parallel-size"
    return f"--gpu-memory-utilization {utilization:g}"


def count_host_blocks(config: EngineConfig, block_bytes: int, num_local_workers: int) -> int:
    """Return the number of blocks of a worker's CPU KV offload; 0 if it is disabled.

    Raises:
        ConfigError: The CPU offload of a replica's workers exceeds the machine's free memory, or that of all workers
            exceeds its total memory (other replicas may have allocated theirs already), or an offload is smaller than a
            block.
    """
    host_gib = config.cache.host_gib
    if not host_gib:
        return 0
    num_bytes = int(host_gib * GIB)
    for num_workers, limit, what in (
        (min(num_local_workers, config.parallel.workers_per_core), available_bytes(), "the free"),
        (num_local_workers, total_bytes(), "the machine's"),
    ):
        if num_workers * num_bytes > limit:
            share = f" for each of the {num_workers} workers here" if num_workers > 1 else ""
            raise ConfigError(
                f"--kv-host-gib {host_gib:g}{share} exceeds {what} memory of {limit / GIB:.2f} GiB"
            )
    if num_bytes < block_bytes:
        raise ConfigError(
            f"--kv-host-gib {host_gib:g} is less than one KV-cache block of {block_bytes} bytes"
        )
    return num_bytes // block_bytes


def free_host_bytes(config: EngineConfig, reserved_bytes: int) -> int:
    """Return the number of bytes that the KV cache of one worker may take on a machine without a GPU.

    Each worker needs `reserved_bytes` for something else.
    """
    num_workers = config.parallel.num_workers
    free = max(0, available_bytes() - num_workers * reserved_bytes)
    return int(free * CPU_SHARE) // num_workers
