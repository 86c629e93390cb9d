"""Tensor parallelism: the ranks of a group share every layer, and exchange its sums.

Megatron's way (Shoeybi et al., 2019): the first matrix of a block is cut by its outputs, the second by its
inputs, so that one sum of all ranks' results ends the block.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor


class TensorParallel:
    """One rank's place in its group; by default the only one.

    `sums_in_rank_order` says that a token's sum shall not depend on its place in the batch, as it would in a ring.
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
        self._group = group
        self._sums_in_rank_order = sums_in_rank_order

    def part(self, count: int) -> range:
        """This rank's share of `count` things; if they are fewer than the ranks, several ranks have the same one."""
        return self.parts(count)[self.rank]

    def parts(self, count: int) -> list[range]:
        """The shares of all ranks; they differ by one at most."""
        starts = [rank * count // self.size for rank in range(self.size + 1)]
        return [range(start, max(start + 1, stop)) for start, stop in pairwise(starts)]

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' `x`, bit for bit the same on each."""
        if self.size == 1:
            return x
        if not self._sums_in_rank_order:
            dist.all_reduce(x, group=self._group)
            return x
        total, *others = self._gather(x)
        for other in others:
            total.add_(other)
        return total

    def stack(self, x: Tensor) -> Tensor:
        """Return all ranks' `x`, which have one shape, as [ranks, ...]."""
        return x.unsqueeze(0) if self.size == 1 else self._gather(x)

    def _gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        gathered = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(gathered), x, group=self._group)
        return gathered
