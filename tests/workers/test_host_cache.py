from __future__ import annotations

import torch
from engine.protocol.arrays import int32_bytes
from engine.workers.host_cache import HostCache


def filled(block: int) -> torch.Tensor:
    return torch.full((2, 3), float(block))


def test_3_10_blocks_go_out_and_come_back_in_every_layer() -> None:
    caches = [torch.stack([filled(10 * layer + n) for n in range(8)]) for layer in range(3)]
    host = HostCache(4, caches)
    host.copy_out(int32_bytes([(5, 2), (1, 0)]))
    for cache in caches:
        cache.zero_()
    host.copy_in(int32_bytes([(0, 7), (2, 3), (2, 4)]))
    for layer, cache in enumerate(caches):
        expected = {7: 10 * layer + 1, 3: 10 * layer + 5, 4: 10 * layer + 5}
        for block in range(8):
            assert torch.equal(cache[block], filled(expected.get(block, 0)))
