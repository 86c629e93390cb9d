"""The sampling parameters of one batch's rows, gathered from their slots.

They are gathered when the batch or one of its slots changes, and reused in all other steps.

Shapes: S rows of the batch, R rows of a group, V vocabulary.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...protocol.arrays import Int32Array, Int64Array
from ..device.dtypes import torch_device
from ..device.transfers import to_device
from .distribution import BLOCK_WIDTH
from .filters import Filters
from .state import SamplingState

_NUCLEUS_DEPTH = 64
"""Number of most likely tokens in which a nucleus is searched first; wider nuclei take a slower path."""


class Method(Enum):
    """The method by which a row's token is chosen."""

    GREEDY = auto()
    UNFILTERED = auto()
    TOP_K = auto()
    TOP_P = auto()


class RowGroup(msgspec.Struct):
    """Rows whose tokens are chosen by the same method. `rows` is None if the group is the whole batch."""

    method: Method
    rows: torch.Tensor | None
    filters: Filters
    depth: int


class RowParameters(msgspec.Struct):
    """The parameters of each row, on the device, for a kernel that samples all rows; see `SamplingState`."""

    is_greedy_S: torch.Tensor
    inverse_temperature_S: torch.Tensor
    top_k_S: torch.Tensor
    top_p_S: torch.Tensor
    min_p_margin_S: torch.Tensor
    seed_S: torch.Tensor

    @classmethod
    def from_state(cls, state: SamplingState, slots_S: Int64Array) -> RowParameters:
        """Gather the parameters of a batch of slots."""
        columns = (
            state.is_greedy,
            state.inverse_temperature,
            state.top_k,
            state.top_p,
            state.min_p_margin,
            state.seed,
        )
        return cls(*(_to_device(column[slots_S], state) for column in columns))


class LogprobRows(msgspec.Struct, dict=True):
    """The rows for which log-probabilities are reported, with their slots.

    `host_rows` is None if they are the whole batch. A row has `counts` alternatives: the `num_top` most likely tokens,
    and then the tokens that its request lists.
    """

    state: SamplingState
    host_rows: Int64Array | None
    slots: list[int]
    num_top: list[int]
    counts: list[int]

    @cached_property
    def rows(self) -> torch.Tensor | None:
        """The rows on the device of the logits."""
        return None if self.host_rows is None else _to_device(self.host_rows, self.state)

    @cached_property
    def listed_RK(self) -> torch.Tensor | None:
        """The listed tokens in their columns, int64 [R, K] on the device; -1 elsewhere. None if no row lists any."""
        if self.counts == self.num_top:
            return None
        listed_RK = np.full((len(self.slots), max(self.counts)), -1, np.int64)
        for row, slot in enumerate(self.slots):
            listed_RK[row, self.num_top[row] : self.counts[row]] = self.state.listed_tokens.get(
                slot, ()
            )
        return _to_device(listed_RK, self.state)

    @cached_property
    def processed(self) -> tuple[torch.Tensor, RowParameters] | None:
        """A mask of the rows that report filtered probabilities, bool [R], and the filters; None if no row does."""
        slots = np.array(self.slots, np.int64)
        is_processed = self.state.wants_processed[slots]
        if not is_processed.any():
            return None
        return _to_device(is_processed, self.state), RowParameters.from_state(self.state, slots)

    def raw_logits(self, logits_SV: torch.Tensor, will_change: bool) -> torch.Tensor:
        """Return the rows' logits before their changes, copied if `logits_SV` will be changed in place."""
        if self.rows is not None:
            return logits_SV[self.rows]
        return logits_SV.clone() if will_change else logits_SV


class SamplingMetadata(msgspec.Struct, dict=True):
    """The sampling features of a batch; None means that no row uses the feature."""

    state: SamplingState
    version: int
    slots_S: Int64Array
    is_greedy: bool
    changes_logits: bool
    logprobs: LogprobRows | None

    @classmethod
    def from_state(cls, state: SamplingState, slots_S: Int64Array) -> SamplingMetadata:
        """Gather the features of a batch of slots."""
        return cls(
            state=state,
            version=state.version,
            slots_S=slots_S,
            is_greedy=bool(state.is_greedy[slots_S].all()),
            changes_logits=bool(state.changes_logits[slots_S].any()),
            logprobs=_logprobs(state, slots_S),
        )

    @cached_property
    def groups(self) -> list[RowGroup]:
        """The rows, grouped by sampling method."""
        return _row_groups(self.state, self.slots_S)

    @cached_property
    def parameters(self) -> RowParameters:
        """The parameters of each row, on the device."""
        return RowParameters.from_state(self.state, self.slots_S)

    @property
    def takes_most_likely(self) -> bool:
        """True if every row takes its most likely token and uses no other feature."""
        return self.is_greedy and not self.changes_logits and self.logprobs is None

    @property
    def is_current(self) -> bool:
        """True if no slot has changed since the features were gathered."""
        return self.version == self.state.version

    def describes(self, slots_S: Int32Array) -> bool:
        """Return whether the features are current and belong to these slots."""
        return self.is_current and np.array_equal(self.slots_S, slots_S)


def _row_groups(state: SamplingState, slots_S: Int64Array) -> list[RowGroup]:
    is_greedy = state.is_greedy[slots_S]
    has_top_k = state.top_k[slots_S] < state.vocab_size
    has_top_p = state.top_p[slots_S] < 1
    groups = []
    for method, is_member in (
        (Method.GREEDY, is_greedy),
        (Method.UNFILTERED, ~is_greedy & ~has_top_k & ~has_top_p),
        (Method.TOP_K, ~is_greedy & has_top_k),
        (Method.TOP_P, ~is_greedy & ~has_top_k & has_top_p),
    ):
        rows = np.flatnonzero(is_member)
        if not len(rows):
            continue
        slots = slots_S[rows]
        margins = state.min_p_margin[slots]
        filters = Filters(
            _to_device(state.inverse_temperature[slots], state),
            _to_device(state.top_k[slots], state),
            _to_device(state.top_p[slots], state),
            _to_device(margins, state) if np.isfinite(margins).any() else None,
        )
        depth = int(state.top_k[slots].max()) if method is Method.TOP_K else _NUCLEUS_DEPTH
        depth = min(depth, -(-state.vocab_size // BLOCK_WIDTH) * BLOCK_WIDTH)
        is_whole = len(rows) == len(slots_S)
        groups.append(
            RowGroup(method, None if is_whole else _to_device(rows, state), filters, depth)
        )
    return groups


def _logprobs(state: SamplingState, slots_S: Int64Array) -> LogprobRows | None:
    rows = np.flatnonzero(state.wants_logprobs[slots_S])
    if not len(rows):
        return None
    slots = slots_S[rows]
    is_whole = len(rows) == len(slots_S)
    return LogprobRows(
        state,
        None if is_whole else rows,
        slots.tolist(),
        state.num_logprobs[slots].tolist(),
        (state.num_logprobs[slots] + state.num_listed[slots]).tolist(),
    )


def _to_device(array: npt.NDArray[np.generic], state: SamplingState) -> torch.Tensor:
    return to_device(array, torch_device(state.device))
