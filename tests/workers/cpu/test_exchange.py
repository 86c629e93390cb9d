"""Tensor-parallel ranks agree on whether they share memory; see also `test_parallel.py`."""

from __future__ import annotations

import pytest
import torch
from engine.workers.cpu.exchange import share_memory
from engine.workers.cpu.library import NotSupportedNatively
from engine.workers.layers.parallel.tensor_parallel import TensorParallel
from torch import Tensor


class RemotePeer(TensorParallel):
    """Rank 0, whose peer is a process with the same id on another machine."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def stack(self, x: Tensor) -> Tensor:
        other = x.clone()
        if x.dtype == torch.int64:
            other[-1] += 1
        return torch.stack((x, other))


class TwinPeer(TensorParallel):
    """Rank 0, whose peer repeats its messages."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack((x, x))


def test_ranks_on_two_machines_share_no_memory() -> None:
    with pytest.raises(NotSupportedNatively, match=r"the 2 workers .* cannot share memory"):
        share_memory(RemotePeer(), 4096)


def test_shared_memory_is_zeroed_and_writable() -> None:
    memory = share_memory(TwinPeer(), 4096)
    assert bytes(memory) == bytes(4096)
    memory[5] = 7
    assert memory[5] == 7
