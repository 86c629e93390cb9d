"""Tensor parallelism: the ranks of a group divide every layer, and sum their results.

As in Megatron (Shoeybi et al., 2019), the first matrix of a block is split by outputs and the second by inputs, so that
a block needs only one sum over the ranks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """The position of one rank in its tensor-parallel group; by default it is alone.

    If `sums_in_rank_order`, a token's sum does not depend on its place in the batch, as it would in a ring all-reduce.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        *,
        sums_in_rank_order: bool = True,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self._sums_in_rank_order = sums_in_rank_order

    def part(self, count: int) -> range:
        """Return this rank's part of `count` items. If there are fewer items than ranks, several ranks share one."""
        return self.parts(count)[self.rank]

    def own(self, count: int) -> range:
        """Return the items of this rank's part that no later rank has, so that each of `count` items is one rank's."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def parts(self, count: int) -> list[range]:
        """Return the parts of all ranks, whose sizes differ by at most one item."""
        starts = [rank * count // self.size for rank in range(self.size + 1)]
        return [range(start, max(start + 1, stop)) for start, stop in pairwise(starts)]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, with equal bits on every rank."""
        if self.size == 1:
            return x
        if not self._sums_in_rank_order:
            dist.all_reduce(x, group=self.group)
            return x
        total, *others = self._gather(x)
        for other in others:
            total.add_(other)
        return total

    def stack(self, x: Tensor) -> Tensor:
        """Return the `x` of all ranks, which have equal shapes, as one tensor [ranks, ...]."""
        return x.unsqueeze(0) if self.size == 1 else self._gather(x)

    def _gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        # The name since torch 2.13, which warns of the former one.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(gathered.view(-1), x.view(-1), group=self.group)
        return gathered


def elements(heads: range, size: int) -> range:
    """Return the range of elements that belong to these heads, `size` elements each."""
    return range(heads.start * size, heads.stop * size)
