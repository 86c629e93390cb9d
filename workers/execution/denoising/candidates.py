"""Sample a candidate for each position of the blocks of a pass.

Shapes: K positions for which candidates are sampled, V vocabulary, W tokens with log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ....protocol.arrays import BoolArray, Float32Array, Int32Array, Int64Array
from ....protocol.sampling_params import SamplingParams
from ...device.dtypes import AnyArray, on_host
from ...sampling import Sampler, SamplerOutput
from ...sampling.choice import NOT_A_NUMBER, NOTHING_ALLOWED

LogitsOf: TypeAlias = Callable[[NDArray[Any]], AnyArray]

LEAST_LOGPROB: Final = np.float32(-1e30)
"""Replaces the log-probability of a candidate that has none. It exceeds that of a position without a candidate."""


class Places(NamedTuple):
    """The positions for which candidates are sampled, as parallel arrays of length K.

    `rows` are those of the step's tokens, and `penalized` the token whose logit is reduced, or -1.
    """

    rows: Int64Array
    slots: Int32Array
    positions: Int32Array
    penalized: Int32Array

    def select(self, rows: NDArray[np.intp] | BoolArray) -> Places:
        """Return some of the places."""
        return Places(self.rows[rows], self.slots[rows], self.positions[rows], self.penalized[rows])


class Candidates(NamedTuple):
    """A candidate of each position. The first of the K columns of `listed` and `logprobs` is the candidate itself."""

    token_ids: Int64Array  # [K]; negative for a row that could not be sampled
    listed: Int32Array  # [K, W]
    logprobs: Float32Array  # [K, W]
    ranks: Int32Array  # [K]

    def find_slots(self, slots: Int32Array, mark: int) -> list[int]:
        """Return the slots with this mark instead of a token."""
        return sorted(set(slots[self.token_ids == mark].tolist()))

    def find_damaged(self, slots: Int32Array) -> list[int]:
        """Return the slots with a NaN among their logits."""
        return self.find_slots(slots, NOT_A_NUMBER)

    def find_failed(self, slots: Int32Array) -> list[int]:
        """Return the slots in which a position allows no token."""
        return self.find_slots(slots, NOTHING_ALLOWED)


def with_logprobs(params: SamplingParams) -> SamplingParams:
    """Return parameters that report the log-probability of each token, from which its confidence follows."""
    return params if params.logprobs is not None else msgspec.structs.replace(params, logprobs=0)


class CandidateSampler:
    """Samples with the requests' parameters, but never the mask token.

    At most `max_rows` rows of logits are computed at once.
    """

    def __init__(
        self, sampler: Sampler, mask_token_id: int, max_rows: int, penalty: float = 0.0
    ) -> None:
        self._sampler = sampler
        self._mask = mask_token_id
        self._max_rows = max_rows
        self._penalty = penalty

    def sample(self, places: Places, logits_of: LogitsOf) -> Candidates:
        """Sample a candidate for each place. `logits_of` returns the logits of rows, which may be overwritten."""
        parts: list[Candidates] = []
        order: list[NDArray[np.intp]] = []
        for chosen in self._divide(places):
            part = places.select(chosen)
            found = self._sample(part, logits_of, without_mask=False)
            is_mask = found.token_ids == self._mask
            if is_mask.any():
                again = part.select(is_mask)
                other = self._sample(again, logits_of, without_mask=True)
                # The probability among all tokens, of which the mask has this share.
                share = np.exp(found.logprobs[is_mask, 0].astype(np.float64))
                others = np.log1p(-np.minimum(share, 1.0 - 1e-12)).astype(np.float32)
                found.token_ids[is_mask], found.ranks[is_mask] = other.token_ids, other.ranks
                found.listed[is_mask] = other.listed
                found.logprobs[is_mask] = other.logprobs + others[:, None]
            parts.append(found)
            order.append(chosen)
        width = max((part.listed.shape[1] for part in parts), default=1)
        back = np.argsort(np.concatenate(order)) if order else np.zeros(0, np.intp)
        return Candidates(
            _joined([part.token_ids for part in parts], np.int64)[back],
            _joined([_widened(part.listed, width) for part in parts], np.int32)[back],
            _joined([_widened(part.logprobs, width) for part in parts], np.float32)[back],
            _joined([part.ranks for part in parts], np.int32)[back],
        )

    def _divide(self, places: Places) -> Iterator[NDArray[np.intp]]:
        """Yield the indices of places that are sampled together.

        Slots that change their logits may appear only once in a batch.
        """
        is_bound: BoolArray = self._sampler.describe(places.slots).state.changes_logits[
            places.slots
        ]
        free = np.flatnonzero(~is_bound)
        for start in range(0, len(free), self._max_rows):
            yield free[start : start + self._max_rows]
        bound = np.flatnonzero(is_bound)
        while len(bound):
            _, first = np.unique(places.slots[bound], return_index=True)
            first = first[: self._max_rows]
            yield bound[first]
            bound = np.delete(bound, first)

    def _sample(self, places: Places, logits_of: LogitsOf, *, without_mask: bool) -> Candidates:
        logits_KV = logits_of(places.rows)
        if self._penalty:
            rows = np.flatnonzero(places.penalized >= 0)
            logits_KV[rows, places.penalized[rows].astype(np.int64)] -= self._penalty
        if without_mask:
            logits_KV[:, self._mask] = -np.inf
        return _candidates(self._sampler.sample(logits_KV, places.slots, places.positions))


def _candidates(sampled: SamplerOutput) -> Candidates:
    found = sampled.raw_logprobs
    assert found is not None
    logprobs = on_host(found.logprobs).astype(np.float32)
    return Candidates(
        on_host(sampled.raw_token_ids).astype(np.int64),
        on_host(found.token_ids).astype(np.int32),
        np.where(logprobs > LEAST_LOGPROB, logprobs, LEAST_LOGPROB),
        on_host(found.ranks).astype(np.int32),
    )


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _widened(array: NDArray[Any], width: int) -> NDArray[Any]:
    return np.pad(array, ((0, 0), (0, width - array.shape[1])))
