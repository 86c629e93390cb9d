from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
from engine.protocol.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from engine.protocol.errors import ConfigError
from engine.protocol.kv_cache_groups import AttentionKind, KVCacheGroup
from engine.workers.device.device import usable_cores
from engine.workers.device.memory import (
    available_bytes,
    count_host_blocks,
    count_kv_blocks,
    total_bytes,
)

MODEL = ModelConfig("m", "p", "t", ("m",), "llama", 9, 64, (2,))
CONFIG = EngineConfig("/run", 1, MODEL, CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=4))


def config(**cache: int) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, cache=CacheConfig(block_size=16, **cache))


def test_cache_size_is_limited_by_what_requests_can_use() -> None:
    assert count_kv_blocks(CONFIG, block_bytes=1) == 4 * 4 + 1


def test_an_encoder_gets_blocks_for_the_steps_in_flight() -> None:
    longer = msgspec.structs.replace(CONFIG.model, max_model_len=10 * CONFIG.model.max_model_len)
    encoder = msgspec.structs.replace(longer, is_encoder=True)
    scheduler = msgspec.structs.replace(
        CONFIG.scheduler, max_num_batched_tokens=longer.max_model_len
    )
    found = [
        count_kv_blocks(
            msgspec.structs.replace(CONFIG, model=model, scheduler=scheduler), block_bytes=1
        )
        for model in (longer, encoder)
    ]
    step_blocks = longer.max_model_len // CONFIG.cache.block_size
    num_steps = scheduler.max_steps_in_flight
    assert found == [4 * step_blocks + 1, num_steps * step_blocks + 4 + 1]


def test_recurrent_layers_get_blocks_for_the_drafts_in_flight() -> None:
    groups = (KVCacheGroup(), KVCacheGroup(AttentionKind.STATE_SPACE, 8))
    drafting = msgspec.structs.replace(CONFIG.scheduler, speculative=SpeculativeConfig(4))
    found = [
        count_kv_blocks(msgspec.structs.replace(CONFIG, scheduler=scheduler), 1, groups)
        for scheduler in (CONFIG.scheduler, drafting)
    ]
    # 20 tokens of a request may be uncertain. They are in two blocks, in addition to the block that is read.
    assert found == [4 * (4 + 2) + 1, 4 * (4 + 3) + 1]


def test_kv_cache_memory_bytes_limits_the_cache() -> None:
    assert count_kv_blocks(config(kv_cache_memory_bytes=1000), block_bytes=100) == 10


def test_num_gpu_blocks_override_sets_the_cache_size() -> None:
    assert count_kv_blocks(config(num_blocks_override=7), block_bytes=100) == 7


def test_kv_cache_takes_a_quarter_of_free_memory_by_default() -> None:
    block_bytes = psutil.virtual_memory().available // 48
    assert count_kv_blocks(CONFIG, block_bytes) in range(10, 15)


def test_the_memory_limit_of_a_control_group_is_used(tmp_path: Path) -> None:
    def limit(value: str) -> int:
        (tmp_path / "memory.max").write_text(f"{value}\n")
        return available_bytes(tmp_path)

    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text("anon 3000\ninactive_file 400\nactive_file 600\n")
    assert limit("9000") == 9000 - 5000 + 400 + 600
    assert limit("2000") == 0
    assert limit("max") > 10**6


def test_the_limit_of_the_address_space_is_used() -> None:
    """With `ulimit -v`, a cache of a quarter of the machine's memory could not be allocated."""
    limit = psutil.Process().memory_info().vms + 2**30
    command = "from engine.protocol.machine.memory import available_bytes; print(available_bytes())"
    limited = f"ulimit -v {limit // 1024}; exec {sys.executable} -c '{command}'"
    found = subprocess.run(["bash", "-c", limited], check=True, capture_output=True, text=True)
    assert int(found.stdout) < limit


def test_the_memory_limit_of_a_version_1_control_group_is_used(tmp_path: Path) -> None:
    group = tmp_path / "memory"
    group.mkdir()

    def limit(value: int) -> None:
        (group / "memory.limit_in_bytes").write_text(f"{value}\n")

    (group / "memory.usage_in_bytes").write_text("5000\n")
    (group / "memory.stat").write_text(
        "active_file 1\ninactive_file 2\ntotal_inactive_file 400\ntotal_active_file 600\n"
    )
    limit(9000)
    assert available_bytes(tmp_path) == 9000 - 5000 + 400 + 600
    assert total_bytes(tmp_path) == 9000
    limit(9223372036854771712)
    assert available_bytes(tmp_path) > 10**6
    assert total_bytes(tmp_path) == psutil.virtual_memory().total


def test_the_cpu_limit_of_a_version_1_control_group_is_used(
    tmp_path: Path,
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    cores = len(psutil.Process().cpu_affinity())
    for quota, expected in ((-1, cores), (100000 * cores, cores), (150000, 1), (50000, 1)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        assert usable_cores(tmp_path) == expected


def test_the_cpu_limit_of_a_control_group_is_used(tmp_path: Path) -> None:
    def limit(value: str) -> int:
        (tmp_path / "cpu.max").write_text(f"{value}\n")
        return usable_cores(tmp_path)

    cores = len(psutil.Process().cpu_affinity())
    assert limit("max 100000") == limit(f"{100000 * cores} 100000") == cores
    assert limit("150000 100000") == limit("50000 100000") == 1


def test_an_error_for_too_little_memory_names_the_needed_size() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 32\b.*") as caught:
        count_kv_blocks(config(kv_cache_memory_bytes=300), block_bytes=100)
    assert "--kv-cache-memory-bytes 500" in str(caught.value)


def test_cpu_offload_memory_is_counted_for_all_workers_of_the_machine() -> None:
    memory = psutil.virtual_memory()

    def blocks(share: float, of: int, **parallel: int) -> int:
        with_tier = msgspec.structs.replace(
            config(host_gib=share * of / (1 << 30)), parallel=ParallelConfig(**parallel)
        )
        return count_host_blocks(with_tier, 1 << 20, with_tier.parallel.workers_per_node)

    one = blocks(0.3, memory.available)
    assert one == int(0.3 * memory.available) >> 20
    assert blocks(0.3, memory.available, tensor_parallel_size=8, nnodes=4) == one
    with pytest.raises(ConfigError, match=r"for each of the 4 workers here .* the free memory of"):
        blocks(0.3, memory.available, tensor_parallel_size=2, pipeline_parallel_size=2)
    # When a replica restarts, other replicas may already use their share of the machine's memory.
    assert blocks(0.3, memory.available, data_parallel_size=3) == one
    with pytest.raises(
        ConfigError, match=r"for each of the 20 workers here .* the machine's memory"
    ):
        blocks(0.08, memory.total, data_parallel_size=20)


def test_total_memory_is_the_limit_of_a_control_group(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("9000\n")
    assert total_bytes(tmp_path) == 9000
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path) == psutil.virtual_memory().total
