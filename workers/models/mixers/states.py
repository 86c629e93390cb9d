"""The states of recurrent layers in the KV cache, and the segments in which a step computes its tokens.

A block of a state group holds the state after the last computed of its tokens. A step reads each request's state from
the block of the token before its first one, and writes it to the block of its last one.

If the last tokens of the previous step were rejected drafts, a step begins before the end of its state, in the same
segment. It then reads only the stored inputs before its first token.

Shapes: T tokens of a step, S requests, N segments of all requests, C tokens of a segment, W inputs before a segment
that the convolution reads, F channels of an input.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import (
    GatedDeltaNet,
    NgramConvolution,
    RecurrentLayer,
    StateSize,
)
from ...batch import AttentionBatch


@dataclass(frozen=True, slots=True)
class Round:
    """The n-th segments of all requests that have at least n segments.

    `segments` and `requests` are indices. The first `num_full` segments are complete, so the state at their end
    replaces the request's state.
    """

    segments: Tensor
    requests: Tensor
    num_full: int


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The requests of a step for one group of recurrent layers.

    States are read from the blocks `sources` and written to the blocks `targets`. `is_new` marks requests whose state
    is zero. Inputs are indexed in the concatenation of a row of zeros, the inputs in the requests' states, and the
    inputs of the step's tokens. `inputs_of_segments` are the inputs of each segment, and `kept_inputs` the inputs of
    the new states. `ngrams` is the plan for the convolutions over embeddings of n-grams, if the layers have any.
    """

    sources: Tensor  # [S]
    targets: Tensor  # [S]
    is_new: Tensor  # [S]
    inputs_of_segments: Tensor  # [N, W + C]
    kept_inputs: Tensor  # [S, W + C - 1]
    tokens: Tensor  # [T], of the tokens of all segments
    rounds: tuple[Round, ...]
    ngrams: StateBatch | None = None

    @classmethod
    def build(
        cls,
        batch: AttentionBatch,
        block_size: int,
        layer: RecurrentLayer | NgramConvolution,
        device: torch.device,
    ) -> StateBatch:
        """Return the plan of a step."""
        segment, window = layer.segment, layer.kernel - 1
        starts_S, num_inputs = batch.query_start_loc[:-1].astype(np.int64), window + segment - 1
        lengths_S = np.diff(batch.query_start_loc).astype(np.int64)
        ends_S = batch.seq_lens.astype(np.int64)
        firsts_S = ends_S - lengths_S
        rows_S = np.arange(len(ends_S))
        last_read_S = np.maximum(firsts_S - 1, 0)
        is_new_S = firsts_S == 0
        sources_S = np.where(is_new_S, 0, batch.block_table[rows_S, last_read_S // block_size])
        targets_S = batch.block_table[rows_S, (ends_S - 1) // block_size]
        # The first token of the first segment, and of the segment with which the next step begins.
        bases_S = firsts_S // segment * segment
        next_bases_S = ends_S // segment * segment
        num_segments_S = -(-(ends_S - bases_S) // segment)

        def inputs_at(requests: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
            """Return the index of the inputs at these positions, or the index of the zeros if there is no token."""
            base, first = bases_S[requests], firsts_S[requests]
            in_state = 1 + requests * num_inputs + positions - base + window
            in_step = 1 + len(ends_S) * num_inputs + starts_S[requests] + positions - first
            index = np.where(positions < first, in_state, in_step)
            exists = (positions >= 0) & (positions < ends_S[requests])
            return _to_device(np.where(exists, index, 0), device)

        first_segments_S = np.cumsum(num_segments_S) - num_segments_S
        requests_N = np.repeat(rows_S, num_segments_S)
        numbers_N = np.arange(len(requests_N)) - first_segments_S[requests_N]
        positions_N = bases_S[requests_N] + numbers_N * segment
        requests_T = np.repeat(rows_S, lengths_S)
        positions_T = np.arange(len(requests_T)) - starts_S[requests_T] + firsts_S[requests_T]
        tokens_T = first_segments_S[requests_T] * segment + positions_T - bases_S[requests_T]
        is_full_N = positions_N + segment <= ends_S[requests_N]
        rounds = []
        # Without a recurrent part, all segments are independent.
        has_recurrence = layer.state_size(1).num_recurrent > 0
        for number in range(int(num_segments_S.max()) if has_recurrence else 0):
            segments = np.flatnonzero(numbers_N == number)
            segments = segments[np.argsort(~is_full_N[segments], kind="stable")]
            rounds.append(
                Round(
                    _to_device(segments, device),
                    _to_device(requests_N[segments], device),
                    int(is_full_N[segments].sum()),
                )
            )
        ngrams = None
        if isinstance(layer, GatedDeltaNet) and layer.ngrams is not None:
            ngrams = cls.build(batch, block_size, layer.ngrams, device)
        return cls(
            sources=_to_device(sources_S.astype(np.int64), device),
            targets=_to_device(targets_S.astype(np.int64), device),
            is_new=_to_device(is_new_S, device),
            inputs_of_segments=inputs_at(
                requests_N[:, None], positions_N[:, None] + np.arange(-window, segment)
            ),
            kept_inputs=inputs_at(
                rows_S[:, None], next_bases_S[:, None] + np.arange(-window, segment - 1)
            ),
            tokens=_to_device(tokens_T, device),
            rounds=tuple(rounds),
            ngrams=ngrams,
        )


def _to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


class StateCache:
    """Views of the states of one layer in the blocks of a group."""

    def __init__(self, memory: Tensor, size: StateSize, dtype: torch.dtype) -> None:
        num_recurrent = size.num_recurrent * 4
        num_bytes = size.num_own_bytes(dtype.itemsize)
        self.recurrent = memory[:, :num_recurrent].view(torch.float32)
        self.inputs = (
            memory[:, num_recurrent:num_bytes]
            .view(dtype)
            .unflatten(1, (size.num_inputs, size.channels))
        )

    def split(self, channel: int) -> tuple[StateCache, StateCache]:
        """Return views whose inputs are those before the channel and those from it on."""
        first, second = copy(self), copy(self)
        first.inputs, second.inputs = self.inputs[..., :channel], self.inputs[..., channel:]
        return first, second

    def all_inputs(self, inputs_TF: Tensor, batch: StateBatch) -> Tensor:
        """Return the inputs that `batch` indexes, and store the inputs that the next step needs."""
        inputs_TF = inputs_TF.to(self.inputs.dtype)
        kept_XF = self.inputs.index_select(0, batch.sources).flatten(0, 1)
        pool_XF = torch.cat((torch.zeros_like(inputs_TF[:1]), kept_XF, inputs_TF))
        self.inputs.index_copy_(0, batch.targets, pool_XF[batch.kept_inputs])
        return pool_XF

    def load(self, batch: StateBatch) -> Tensor:
        """Return the recurrent parts of the requests' states [S, ...]."""
        states = self.recurrent.index_select(0, batch.sources)
        return states.masked_fill_(batch.is_new[:, None], 0.0)

    def store(self, states: Tensor, batch: StateBatch) -> None:
        """Store the recurrent parts of the requests' states [S, ...]."""
        self.recurrent.index_copy_(0, batch.targets, states)
