"""Where tensor-parallel ranks share no memory, all of them learn it; see also `test_parallel.py`."""

from __future__ import annotations

import pytest
import torch
from engine.workers.cpu.exchange import share_memory
from engine.workers.cpu.library import NotSupportedNatively
from engine.workers.parallel.tensor_parallel import TensorParallel
from torch import Tensor


class RemotePeer(TensorParallel):
    """Rank 0, whose peer is a process of the same number on another machine."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def stack(self, x: Tensor) -> Tensor:
        other = x.clone()
        if x.dtype == torch.int64:
            other[-1] += 1
        return torch.stack((x, other))


class TwinPeer(TensorParallel):
    """Rank 0, whose peer says what it says."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def stack(self, x: Tensor) -> Tensor:
        return torch.stack((x, x))


def test_ranks_on_two_machines_have_no_memory_in_common() -> None:
    with pytest.raises(NotSupportedNatively, match=r"the 2 workers .* cannot share memory"):
        share_memory(RemotePeer(), 4096)


def test_memory_of_one_machine_is_zero_and_can_be_written() -> None:
    memory = share_memory(TwinPeer(), 4096)
    assert bytes(memory) == bytes(4096)
    memory[5] = 7
    assert memory[5] == 7
