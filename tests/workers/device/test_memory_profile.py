"""The memory profile of a GPU, which determines the size of its KV cache."""

from __future__ import annotations

import pytest
import torch
from engine.protocol.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.protocol.errors import ConfigError, EngineError
from engine.workers.device.cpu_offload import staging_bytes
from engine.workers.device.errors import explaining_device_errors
from engine.workers.device.memory import count_kv_blocks
from engine.workers.device.memory_profile import GIB, MemoryProfile, profile_memory
from support.gpu.host_accelerator import HostAccelerator

PROFILE = MemoryProfile(
    total=80 * GIB,
    utilization=0.9,
    non_torch=2 * GIB,
    weights=15 * GIB,
    activations=1 * GIB,
    graphs=GIB // 2,
)
MODEL = ModelConfig("m", "p", "t", ("m",), "llama", 9, 64, (2,))
CONFIG = EngineConfig("/run", 1, MODEL, CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=4))


def test_the_cache_gets_the_rest_of_gpu_memory_utilization() -> None:
    assert PROFILE.kv_cache == 72 * GIB - int(18.5 * GIB)
    assert "80.00 GiB x 0.9" in str(PROFILE) and "KV cache 53.50" in str(PROFILE)
    full = MemoryProfile(80 * GIB, 0.2, 0, 20 * GIB, 0, 0)
    assert full.kv_cache == 0


def test_each_part_is_measured_and_the_smaller_graphs_are_extrapolated() -> None:
    accelerator = HostAccelerator(total=1000, others=50, graph_bytes=3)
    accelerator.allocated = 400

    def run_largest_step() -> None:
        accelerator.peak = 520

    def capture() -> None:
        accelerator.graphs.begin()
        accelerator.graphs.end()

    profile = profile_memory(accelerator, 0.9, run_largest_step, [[capture] * 5, [capture]])
    # The first graph of a kind takes 30, including the memory that all graphs share; the other kind reuses this memory.
    assert profile == MemoryProfile(1000, 0.9, 50, 400, 120, graphs=30 + 4 * 3 + 3)


def test_memory_for_cpu_offload_copies_is_reserved() -> None:
    accelerator = HostAccelerator(total=1000)
    profile = profile_memory(accelerator, 0.9, lambda: None, [], staging=30)
    assert profile.kv_cache == 870
    assert "CPU KV offload 0.00" in str(profile)
    # One part of 128 MiB, or one larger block, is being copied out while another is copied in and assembled.
    assert staging_bytes(1 << 20) == 384 << 20
    assert staging_bytes(1 << 30) == 3 << 30


def test_an_error_for_too_little_memory_names_the_needed_utilization() -> None:
    profile = MemoryProfile(1000, 0.5, 100, 300, 50, 0)
    with pytest.raises(ConfigError, match="holds a KV cache of 16 tokens") as caught:
        count_kv_blocks(CONFIG, 20, profile=profile)
    # 4 blocks of the request and the null block.
    assert "--gpu-memory-utilization 0.55" in str(caught.value)
    assert count_kv_blocks(CONFIG, 20, profile=MemoryProfile(1000, 0.55, 100, 300, 50, 0)) == 5


def test_an_error_says_if_the_gpu_is_too_small() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size"):
        count_kv_blocks(CONFIG, 200, profile=MemoryProfile(1000, 0.9, 100, 300, 50, 0))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB.\nmore"), "out of memory in step 3"),
        (
            RuntimeError("CUDA error: an illegal memory access\nhint"),
            "failed in step 3: CUDA error",
        ),
        (
            RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
            "failed in step 3: Triton Error",
        ),
    ],
)
def test_a_gpu_failure_is_one_line(error: RuntimeError, message: str) -> None:
    with pytest.raises(EngineError, match=message) as caught, explaining_device_errors("in step 3"):
        raise error
    assert "\n" not in str(caught.value)


def test_errors_unrelated_to_the_device_are_not_wrapped() -> None:
    with pytest.raises(RuntimeError, match=r"^shapes$") as caught, explaining_device_errors("now"):
        raise RuntimeError("shapes")
    assert not isinstance(caught.value, EngineError)
