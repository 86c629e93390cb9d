from __future__ import annotations

import pytest
import torch
from engine.protocol.arrays import int32_bytes
from engine.workers.host_cache import HostCache


def filled(block: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((2, 4), float(block)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_3_10_blocks_go_out_and_come_back_in_every_layer(dtype: torch.dtype) -> None:
    caches = [
        torch.cat([filled(8 * layer + n, dtype).view(torch.uint8) for n in range(8)])
        .view(dtype)
        .view(8, 2, 4)
        for layer in range(2)
    ]
    host = HostCache(4, caches)
    host.copy_out(int32_bytes([(5, 2), (1, 0)]))
    for cache in caches:
        cache.zero_()
    host.copy_in(int32_bytes([(0, 7), (2, 3), (2, 4)]))
    for layer, cache in enumerate(caches):
        expected = {7: 8 * layer + 1, 3: 8 * layer + 5, 4: 8 * layer + 5}
        for block in range(8):
            assert torch.equal(cache[block].float(), filled(expected.get(block, 0), dtype).float())
