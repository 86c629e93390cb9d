from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from engine.protocol.arrays import int32_bytes
from engine.workers.device.cpu_offload import CPUOffloadCache


def filled(block: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((2, 4), float(block)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_3_10_blocks_are_copied_out_and_back_in_every_layer(dtype: torch.dtype) -> None:
    caches = [
        torch.cat([filled(8 * layer + n, dtype).view(torch.uint8) for n in range(8)])
        .view(dtype)
        .view(8, 2, 4)
        for layer in range(2)
    ]
    host = CPUOffloadCache(4, caches)
    host.copy_out(int32_bytes([(5, 2), (1, 0)]))
    for cache in caches:
        cache.zero_()
    host.copy_in(int32_bytes([(0, 7), (2, 3), (2, 4)]))
    for layer, cache in enumerate(caches):
        expected = {7: 8 * layer + 1, 3: 8 * layer + 5, 4: 8 * layer + 5}
        for block in range(8):
            assert torch.equal(cache[block].float(), filled(expected.get(block, 0), dtype).float())


@pytest.mark.slow
def test_copying_a_long_prefix_needs_little_extra_memory() -> None:
    num_blocks, num_layers = 100, 2
    random = np.random.default_rng(0)
    caches = [torch.rand(num_blocks, 2, 1024) for _ in range(num_layers)]
    before = [cache.clone() for cache in caches]
    block_bytes = num_layers * caches[0][0].nbytes
    host = CPUOffloadCache(num_blocks, caches, staged_bytes=7 * block_bytes)
    blocks, places, back = (random.permutation(num_blocks) for _ in range(3))
    tracemalloc.start()
    host.copy_out(int32_bytes(np.stack((blocks, places), 1)))
    for cache in caches:
        cache.zero_()
    host.copy_in(int32_bytes(np.stack((places, back), 1)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0 < peak <= 7 * block_bytes
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[torch.from_numpy(back)], old[torch.from_numpy(blocks)])
