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
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....protocol.checkpoint.recurrent_layers import GatedDeltaNet, NgramConvolution, RecurrentLayer
from ....protocol.checkpoint.state_spaces.state_size import SEGMENT, StateSize
from ...attention.interface import DeviceBatch
from ...batch import AttentionBatch
from ...device.transfers import to_device


class Round(msgspec.Struct, frozen=True):
    """The n-th segments of all requests that have at least n segments.

    `segments` and `requests` are indices. The first `num_full` segments may be complete, so that the state at their end
    replaces the request's state; in a captured graph, `is_full_R` is true for those that are.
    """

    segments: Tensor
    requests: Tensor
    num_full: int
    is_full_R: Tensor | None = None

    def replace_states(self, states_S: Tensor, new_R: Tensor) -> None:
        """Replace the states of requests [S, ...] whose segments are complete by the first `num_full` states."""
        requests = self.requests[: self.num_full]
        if self.is_full_R is not None:
            is_full = self.is_full_R.view(-1, *[1] * (new_R.dim() - 1))
            new_R = torch.where(is_full, new_R, states_S[requests])
        states_S[requests] = new_R


class StateBatch(msgspec.Struct, frozen=True):
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
            index = _input_index(
                positions,
                requests,
                starts_S[requests],
                firsts_S[requests],
                ends_S[requests],
                bases_S[requests],
                num_requests=len(ends_S),
                window=window,
                num_inputs=num_inputs,
            )
            return to_device(index, device)

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
        has_recurrence = layer.state_parts.size(1).num_recurrent > 0
        for number in range(int(num_segments_S.max()) if has_recurrence else 0):
            segments = np.flatnonzero(numbers_N == number)
            segments = segments[np.argsort(~is_full_N[segments], kind="stable")]
            rounds.append(
                Round(
                    to_device(segments, device),
                    to_device(requests_N[segments], device),
                    int(is_full_N[segments].sum()),
                )
            )
        ngrams = None
        if isinstance(layer, GatedDeltaNet) and layer.ngrams is not None:
            ngrams = cls.build(batch, block_size, layer.ngrams, device)
        return cls(
            sources=to_device(sources_S.astype(np.int64), device),
            targets=to_device(targets_S.astype(np.int64), device),
            is_new=to_device(is_new_S, device),
            inputs_of_segments=inputs_at(
                requests_N[:, None], positions_N[:, None] + np.arange(-window, segment)
            ),
            kept_inputs=inputs_at(
                rows_S[:, None], next_bases_S[:, None] + np.arange(-window, segment - 1)
            ),
            tokens=to_device(tokens_T, device),
            rounds=tuple(rounds),
            ngrams=ngrams,
        )

    @classmethod
    def build_captured(
        cls, batch: DeviceBatch, block_size: int, layer: RecurrentLayer | NgramConvolution
    ) -> StateBatch:
        """Return the plan of a step in which every request has one token, computed by operations of a captured graph.

        Padding requests store a state in block 0, which no request owns.
        """
        segment, window = layer.segment, layer.kernel - 1
        device, num_requests = batch.seq_lens.device, len(batch.seq_lens)
        rows_S = torch.arange(num_requests, device=device)
        ends_S = batch.seq_lens.long().clamp(min=1)
        firsts_S = ends_S - 1
        is_new_S = firsts_S == 0
        bases_S = firsts_S // segment * segment

        def blocks_of(positions_S: Tensor) -> Tensor:
            return batch.block_table.gather(1, (positions_S // block_size)[:, None])[:, 0].long()

        def inputs_at(positions_SX: Tensor) -> Tensor:
            columns = (x[:, None] for x in (rows_S, rows_S, firsts_S, ends_S, bases_S))
            index: Tensor = _input_index(
                positions_SX,
                *columns,
                num_requests=num_requests,
                window=window,
                num_inputs=window + segment - 1,
            )
            return index

        places_X = torch.arange(-window, segment, device=device)
        next_bases_S = ends_S // segment * segment
        rounds = [Round(rows_S, rows_S, num_requests, next_bases_S == ends_S)]
        ngrams = None
        if isinstance(layer, GatedDeltaNet) and layer.ngrams is not None:
            ngrams = cls.build_captured(batch, block_size, layer.ngrams)
        return cls(
            sources=blocks_of((firsts_S - 1).clamp(min=0)).masked_fill(is_new_S, 0),
            targets=blocks_of(firsts_S),
            is_new=is_new_S,
            inputs_of_segments=inputs_at(bases_S[:, None] + places_X),
            kept_inputs=inputs_at(next_bases_S[:, None] + places_X[:-1]),
            tokens=rows_S * segment + firsts_S - bases_S,
            rounds=tuple(rounds if layer.state_parts.size(1).num_recurrent else ()),
            ngrams=ngrams,
        )


def _input_index(
    positions: Any,
    requests: Any,
    starts: Any,
    firsts: Any,
    ends: Any,
    bases: Any,
    *,
    num_requests: int,
    window: int,
    num_inputs: int,
) -> Any:
    """Return the index of the inputs at these positions of requests, or of the zeros if there is no token.

    The arrays are of numpy or of torch. A request's tokens in the step begin at the index `starts` and the position
    `firsts`; the inputs in its state begin `window` before the position `bases`.
    """
    in_state = 1 + requests * num_inputs + positions - bases + window
    in_step = 1 + num_requests * num_inputs + starts + positions - firsts
    exists = (positions >= 0) & (positions < ends)
    return (in_step + (positions < firsts) * (in_state - in_step)) * exists


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

    def previous(self, inputs_TF: Tensor, batch: StateBatch) -> Tensor:
        """Return the input of the token before each token, and store inputs like `all_inputs`. Not without a window."""
        index_NC = batch.inputs_of_segments[:, -1 - SEGMENT : -1]
        return self.all_inputs(inputs_TF, batch)[index_NC.flatten()[batch.tokens]]

    def load(self, batch: StateBatch) -> Tensor:
        """Return the recurrent parts of the requests' states [S, ...]."""
        states = self.recurrent.index_select(0, batch.sources)
        return states.masked_fill_(batch.is_new[:, None], 0.0)

    def store(self, states: Tensor, batch: StateBatch) -> None:
        """Store the recurrent parts of the requests' states [S, ...]."""
        self.recurrent.index_copy_(0, batch.targets, states)
