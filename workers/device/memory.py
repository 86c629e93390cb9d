"""How many KV-cache blocks a worker can hold."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from ...protocol.config import EngineConfig
from ...protocol.errors import ConfigError
from ...protocol.kv_cache_groups import (
    FULL_ATTENTION,
    KVCacheGroup,
    max_request_blocks,
    max_request_tokens,
)
from .control_groups import CGROUPS, control_groups
from .memory_profile import GIB, MemoryProfile

CPU_SHARE = 0.25
"""Of the free memory, for all workers together; the rest belongs to other work and to the page cache."""

_LIMITS = ("memory.max", "memory.limit_in_bytes")
"""Of a control group of version 2, and of version 1, which has a number beyond all memory in place of none."""


def count_kv_blocks(
    config: EngineConfig,
    block_bytes: int,
    groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION,
    profile: MemoryProfile | None = None,
) -> int:
    """Blocks that fit, the null block included; into host memory without the `profile` of a GPU's.

    Never more than `max_num_seqs` full-length requests can use. Raises ConfigError when not even one
    request of `max_model_len` fits, with the memory that would do and the length that does.
    """
    cache = config.cache
    max_step_tokens = config.scheduler.max_num_batched_tokens
    blocks_per_request = max_request_blocks(
        groups, config.model.max_model_len, max_step_tokens, cache.block_size
    )
    useful = blocks_per_request * config.scheduler.max_num_seqs + 1
    remedy: Callable[[int], str] = "--kv-cache-memory-bytes {}".format
    if cache.num_blocks_override is not None:
        num_blocks = cache.num_blocks_override
        origin = "--num-gpu-blocks-override"
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = min(cache.kv_cache_memory_bytes // block_bytes, useful)
        origin = "--kv-cache-memory-bytes"
    elif profile is None:
        num_blocks = min(free_host_bytes(config) // block_bytes, useful)
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
            config.model.max_model_len,
        )
        needed = (blocks_per_request + 1) * block_bytes
        raise ConfigError(
            f"{origin} holds a KV cache of {fits} tokens but one request may have "
            f"{config.model.max_model_len}: it needs {needed / GIB:.2f} GiB "
            f"({remedy(needed)}), or use --max-model-len {fits}"
        )
    return int(num_blocks)


def _larger_share(profile: MemoryProfile, needed: int) -> str:
    utilization = profile.utilization_for(needed)
    if utilization is None:
        return (
            "more than the GPU has beside the model; share it among several, --tensor-parallel-size"
        )
    return f"--gpu-memory-utilization {utilization:g}"


def count_host_blocks(config: EngineConfig, block_bytes: int, num_local_workers: int) -> int:
    """Blocks of a worker's host tier; 0 without one.

    Raises ConfigError when the tiers of a replica's workers are larger than the machine's free memory, when those of
    all workers here are larger than its whole memory (other replicas may have taken theirs already), or when a tier is
    too small for a block.
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
                f"--kv-host-gib {host_gib:g}{share} is more than {what} memory of {limit / GIB:.2f} GiB"
            )
    if num_bytes < block_bytes:
        raise ConfigError(
            f"--kv-host-gib {host_gib:g} holds no KV-cache block: one takes {block_bytes} bytes"
        )
    return num_bytes // block_bytes


def free_host_bytes(config: EngineConfig) -> int:
    """What the KV cache of one worker may take of a machine without a GPU."""
    return int(available_bytes() * CPU_SHARE) // config.parallel.num_workers


def total_bytes(cgroups: Path = CGROUPS) -> int:
    """The machine's memory, or the least that a control group of this process may have."""
    return _least(psutil.virtual_memory().total, _limit_of, cgroups)


def available_bytes(cgroups: Path = CGROUPS) -> int:
    """Of the machine's memory, and of what the control groups that this process is in leave of theirs."""
    return _least(psutil.virtual_memory().available, _left_of, cgroups)


def _least(of_machine: int, of_group: Callable[[Path], int], cgroups: Path) -> int:
    amounts = [of_machine]
    with suppress(OSError, ValueError):
        amounts += map(of_group, control_groups("memory", cgroups))
    return min(amounts)


def _limit_of(group: Path) -> int:
    for name in _LIMITS:
        if (group / name).exists():
            limit = (group / name).read_text().strip()
            return sys.maxsize if limit == "max" else int(limit)
    return sys.maxsize


def _left_of(group: Path) -> int:
    limit = _limit_of(group)
    if limit == sys.maxsize:
        return limit
    statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    is_v2 = (group / "memory.max").exists()
    used, prefix = ("memory.current", "") if is_v2 else ("memory.usage_in_bytes", "total_")
    # The page cache is counted, and given back where memory is wanted.
    page_cache = sum(
        int(statistics.get(f"{prefix}{part}_file", 0)) for part in ("active", "inactive")
    )
    return max(0, limit - int((group / used).read_text()) + page_cache)
