"""The cache of compressed attention, and the tokens of a step whose places in it layers compute.

A block of a cache has a row for each token or, in a cache of entries, for each entry that may end in it. Rows have as
many elements as the layer needs.

Shapes: T tokens of a step, S its requests, B blocks of a sequence, N any number of tokens, C entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..batch import AttentionBatch
from ..device.transfers import to_device
from ..layers.window import Window
from .interface import AttentionSpec, DeviceAttention

_Plan = TypeVar("_Plan")

_COUNTS = 64
"""Tokens are computed together if they see the same number of entries, rounded up to a multiple of this."""


class TokensWithEntries(msgspec.Struct, frozen=True):
    """Tokens that are computed together, each with `num_entries` places for entries, of which it may see fewer."""

    tokens_N: Tensor
    num_entries: int


class SequenceBatch(msgspec.Struct):
    """The tokens of a step, and the block table of their requests in one KV-cache group.

    If there are `visible_T2`, tokens see these ranges of at most `num_visible` tokens in place of a window.
    """

    block_size: int
    query_start_loc: NDArray[np.int32]
    host_positions_T: NDArray[np.int64]
    positions_T: Tensor
    requests_T: Tensor
    blocks_SB: Tensor
    visible_T2: Tensor | None = None
    num_visible: int = 0
    _plans: dict[tuple[str, int, int], Any] = msgspec.field(default_factory=dict)

    @classmethod
    def build(cls, batch: AttentionBatch, block_size: int, device: torch.device) -> SequenceBatch:
        """Return the batch on a device."""
        lengths_S = np.diff(batch.query_start_loc).astype(np.int64)
        requests_T = np.repeat(np.arange(len(lengths_S)), lengths_S)
        first_S = batch.seq_lens - lengths_S - batch.query_start_loc[:-1]
        positions_T = np.arange(len(requests_T)) + first_S[requests_T]
        num_blocks = -(-int(batch.seq_lens.max()) // block_size)
        blocks_SB = batch.block_table[:, :num_blocks].astype(np.int64)
        visible_T2, num_visible = None, 0
        if batch.visible is not None:
            visible_T2 = to_device(batch.visible.astype(np.int64), device)
            num_visible = int((batch.visible[:, 1] - batch.visible[:, 0]).max())
        return cls(
            block_size,
            batch.query_start_loc,
            positions_T,
            to_device(positions_T, device),
            to_device(requests_T, device),
            to_device(blocks_SB, device),
            visible_T2,
            num_visible,
        )

    def places(self, tokens_N: Tensor, positions: Tensor, rate: int = 1) -> tuple[Tensor, Tensor]:
        """Return the blocks and rows of positions [N, ...] in the sequences of these tokens.

        With a `rate`, return those of entries that end at these positions.
        """
        requests = self.requests_T[tokens_N].view(-1, *[1] * (positions.dim() - 1))
        blocks = self.blocks_SB[requests, positions // self.block_size]
        return blocks, positions % self.block_size // rate

    def ends_of_entries(self, rate: int) -> Tensor:
        """Return the last token of each entry."""
        return self._plan(
            ("ends", rate, 0),
            lambda: self._on_device(np.flatnonzero((self.host_positions_T + 1) % rate == 0)),
        )

    def groups(self, rate: int, most: int) -> list[TokensWithEntries]:
        """Divide the tokens into those that attend to the same number of entries, at most `most`.

        The numbers are rounded up to a multiple of 64, as far as the limit allows. A token's sums therefore have as
        many terms whatever else is in the step. Without entries, the rate is 0.
        """
        return self._plan(("groups", rate, most), lambda: self._grouped(rate, most))

    def _grouped(self, rate: int, most: int) -> list[TokensWithEntries]:
        counts_T = self.num_entries(rate) if rate else np.zeros_like(self.host_positions_T)
        rounded_T = np.minimum(-(-counts_T // _COUNTS) * _COUNTS, most)
        return [
            TokensWithEntries(self._on_device(np.flatnonzero(rounded_T == count)), int(count))
            for count in np.unique(rounded_T)
        ]

    def num_entries(self, rate: int) -> NDArray[np.int64]:
        """Return the number of entries that each token may attend to."""
        return (self.host_positions_T + 1) // rate

    def _on_device(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.positions_T.device)

    def _plan(self, key: tuple[str, int, int], make: Callable[[], _Plan]) -> _Plan:
        """Return what an earlier layer of the group has computed, or compute it."""
        if key not in self._plans:
            self._plans[key] = make()
        plan: _Plan = self._plans[key]
        return plan


class Choice:
    """The entries to which the tokens of a step attend.

    Attributes:
        chosen_TC: The numbers of the entries that the last indexer chose, int64; see `choose_entries`.
        candidates_TN: The numbers of the blocks of entries among which later layers choose, int64.
    """

    chosen_TC: Tensor
    candidates_TN: Tensor


class CompressedCache(DeviceAttention):
    """The cache of models with compressed attention. Their layers compute the attention themselves.

    `choice` is what the last indexer of a step chose.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__(spec)
        self.choice = Choice()

    def kv_cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """Return [num_blocks, elements]; several layers may share a tensor."""
        return num_blocks, self.spec.tensor_elements * self.block_size

    def build(self, batch: AttentionBatch, windows: Collection[Window | None]) -> SequenceBatch:
        """Return the tokens of the step."""
        return SequenceBatch.build(batch, self.block_size, self.device)

    def rows(self, kv_cache: Tensor, row_elements: int, block_elements: int) -> Tensor:
        """Return a view of a layer's rows [num_blocks, rows, elements], given its cache from its first element on.

        Args:
            kv_cache: The tensor, from the layer's first element on.
            row_elements: The number of elements of a row.
            block_elements: The number of elements of the layer's part of a block.
        """
        stride = self.spec.tensor_elements * self.block_size
        return kv_cache.view(-1).as_strided(
            (-(-kv_cache.numel() // stride), block_elements // row_elements, row_elements),
            (stride, row_elements, 1),
        )


def store(rows: Tensor, places: tuple[Tensor, Tensor], x_NE: Tensor) -> Tensor:
    """Store rows of a cache. Return which have numbers that are not finite, bool [N]; these are stored as 0.

    Masked rows still contribute 0 * value, and 0 * NaN is NaN, so a cache must be finite.
    """
    is_finite_NE = x_NE.isfinite()
    stored_NE = x_NE.to(rows.dtype)
    stored_NE = stored_NE.masked_fill(~(is_finite_NE & stored_NE.isfinite()), 0.0)
    rows.index_put_(places, stored_NE)
    return ~is_finite_NE.all(1)
