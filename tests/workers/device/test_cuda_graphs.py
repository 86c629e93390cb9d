"""CUDA graphs, simulated by tapes: a captured step is repeated with the data of a later one."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch
from engine.workers.device.cuda_graphs import SizedGraphs, chunk_sizes, decode_sizes, unowned
from support.gpu.taped_graphs import TapedGraphs


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 64, 100, 256, 300, 512, 700])
@pytest.mark.parametrize("sizes_up_to", [decode_sizes, chunk_sizes])
def test_graph_sizes_reach_the_maximum_with_little_padding(sizes_up_to, largest: int) -> None:
    sizes = sizes_up_to(largest)
    assert sizes[0] == 1 and sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    assert all(b <= max(2 * a, a + 8) for a, b in pairwise(sizes))


def test_a_step_runs_in_the_smallest_graph_that_holds_it() -> None:
    x = torch.zeros(8)
    graphs = SizedGraphs(lambda size: [x[:size].add_(1)], [4, 1, 8], TapedGraphs())
    assert graphs.size_for(1) is None
    for size in (8, 4, 1):
        graphs.capture(size)
    assert [graphs.size_for(count) for count in (1, 2, 4, 5, 8, 9)] == [1, 4, 4, 8, 8, None]
    x.zero_()
    (result,) = graphs.replay(4)
    assert result.tolist() == [1] * 4
    assert x.tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_after_an_error_the_next_step_is_captured() -> None:
    x, runs = torch.ones(3), []

    def run(size: int) -> list[torch.Tensor]:
        runs.append(size)
        # The first run is not captured, the second one is.
        if len(runs) == 2:
            raise MemoryError("too little")
        return [x.add_(1)]

    graphs = SizedGraphs(run, [3], TapedGraphs())
    with pytest.raises(MemoryError, match="too little"):
        graphs.capture(3)
    assert graphs.size_for(3) is None
    graphs.capture(3)
    x.fill_(1)
    assert graphs.replay(3)[0].tolist() == [2.0] * 3


def test_no_cycle_is_collected_while_a_graph_is_captured() -> None:
    class Node:
        def __init__(self) -> None:
            self.itself = self

    # Without this, a collection could be due before the capture begins.
    gc.collect()
    garbage = weakref.ref(Node())
    was_there = []

    def run(size: int) -> list[torch.Tensor]:
        nodes = [Node() for _ in range(100 * gc.get_threshold()[0])]
        was_there.append(len(nodes) > 0 and garbage() is not None)
        return []

    assert gc.isenabled()
    SizedGraphs(run, [1], TapedGraphs()).capture(1)
    assert was_there == [True, True]
    assert gc.isenabled()


def test_a_borrowed_tensor_shares_memory_without_keeping_it_alive() -> None:
    memory = np.arange(12, dtype=np.int32)
    tensor = torch.from_numpy(memory).view(3, 4)[1:, 1:3]
    borrowed = unowned(tensor)
    memory[5] = 50
    assert borrowed.tolist() == tensor.tolist() == [[50, 6], [9, 10]]
    kept = weakref.ref(memory)
    del memory, tensor
    assert kept() is None
