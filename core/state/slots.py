"""The state of running requests that changes in every step, as arrays indexed by slot.

A slot is the row of a running request, here and in the persistent batch of every worker. Tokens are counted twice.
`num_expected_tokens` counts the tokens that the workers will have when every step sent so far has run.
`num_output_tokens` counts the output tokens that they have reported. The difference between the first and the prompt
plus the second is in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ...protocol.arrays import BoolArray, Int32Array, Int64Array, int32_view
from .request import Request

SlotArray: TypeAlias = npt.NDArray[np.intp]
Float64Array: TypeAlias = npt.NDArray[np.float64]

_INITIAL_OUTPUT_CAPACITY = 256

_FEW_STOPS: Final = 8
"""Number of distinct stop tokens up to which each is searched for separately."""

_MAX_DEFERRED: Final = 64
"""Maximum number of steps whose output tokens are collected before they are appended."""


_FEW_VALUES: Final = 16
"""Number of values up to which `np.array` is faster than packing them."""


def as_array(values: Sequence[int]) -> Int64Array:
    """Return an int64 array. `np.array` alone would inspect the type of every item."""
    if len(values) <= _FEW_VALUES:
        return np.array(values, np.int64)
    return np.frombuffer(pack(f"{len(values)}q", *values), np.int64)


class Slots:
    """The arrays of all slots.

    `max_computed_tokens` limits `num_computed_tokens`, because the last token of a request is never computed. The
    properties `num_computed_tokens`, `num_expected_tokens` and `num_output_tokens` apply deferred changes before they
    return an array.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.is_running: BoolArray = np.zeros(max_num_seqs, np.bool_)
        self.generation: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.client_index: Int32Array = np.zeros(max_num_seqs, np.int32)
        self.request_index: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._num_computed_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_expected_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.max_computed_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self._num_output_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.max_output_tokens: Int64Array = np.zeros(max_num_seqs, np.int64)
        self.num_vacated = 0
        """Increases with every freed slot, so equal values mean that every slot has kept its request."""
        self._deferred_slots: SlotArray = np.zeros(0, np.intp)
        self._num_deferred_steps = 0
        self._deferred_tokens: list[bytes] = []
        """Output tokens, one array per step, that `flush` must append to `_deferred_slots`."""
        self._num_until_limit = 0
        """Number of tokens that every request can still get before a length or memory limit; 0 if not computed yet."""
        self._output_capacity = _INITIAL_OUTPUT_CAPACITY
        self._output_token_ids: Int32Array = np.zeros(
            max_num_seqs * self._output_capacity, np.int32
        )
        self._num_stopped_by: Int32Array = np.zeros(vocab_size, np.int32)
        self._stops: set[int] = set()
        self._num_with_stops: dict[tuple[int, ...], int] = {}
        """Number of running requests by their stop tokens, which most of them have in common."""
        self._free = list(range(max_num_seqs - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of slots without a request."""
        return len(self._free)

    @property
    def num_computed_tokens(self) -> Int64Array:
        """Number of tokens per slot whose keys and values are computed once the steps sent so far have run."""
        self.flush()
        return self._num_computed_tokens

    @property
    def num_expected_tokens(self) -> Int64Array:
        """Number of tokens per slot, prompt and output, once the steps sent so far have run."""
        self.flush()
        return self._num_expected_tokens

    @property
    def num_output_tokens(self) -> Int64Array:
        """Number of output tokens per slot that the workers have reported."""
        self.flush()
        return self._num_output_tokens

    def flush(self) -> None:
        """Apply deferred changes.

        They are collected while the same slots compute and sample one token in many steps.
        """
        slots = self._deferred_slots
        if self._num_deferred_steps:
            self._num_computed_tokens[slots] += self._num_deferred_steps
            self._num_expected_tokens[slots] += self._num_deferred_steps
            self._num_deferred_steps = 0
        if self._deferred_tokens:
            length = len(self._deferred_tokens)
            appended = int32_view(b"".join(self._deferred_tokens)).reshape(length, -1).T
            self._deferred_tokens = []
            num_output = self._num_output_tokens[slots]
            starts = slots * self._output_capacity + num_output
            self._output_token_ids[starts[:, None] + np.arange(length)] = appended
            self._num_output_tokens[slots] = num_output + length

    def advance_deferred(self, slots: SlotArray) -> None:
        """Record that each of `slots` computes one token and samples one. The arrays are updated later, by `flush`."""
        if slots is not self._deferred_slots:
            self.flush()
            self._deferred_slots = slots
        self._num_deferred_steps += 1

    def allocate_slots(
        self,
        requests: Sequence[Request],
        num_computed_tokens: Int64Array,
        num_expected_tokens: Int64Array,
        num_prompt_tokens: Int64Array,
        max_output_tokens: Int64Array,
    ) -> SlotArray:
        """Give each request a slot. `max_output_tokens` includes the output tokens that it already has."""
        self.flush()
        count = len(requests)
        taken = self._free[: -count - 1 : -1]
        del self._free[len(self._free) - count :]
        slots = as_array(taken)
        self.is_running[slots] = True
        self.client_index[slots] = as_array([request.client_index for request in requests])
        self.request_index[slots] = as_array([request.request_index for request in requests])
        self._num_computed_tokens[slots] = num_computed_tokens
        self._num_expected_tokens[slots] = num_expected_tokens
        self.max_computed_tokens[slots] = num_prompt_tokens + max_output_tokens - 1
        self._num_output_tokens[slots] = 0
        self.max_output_tokens[slots] = max_output_tokens
        self._num_until_limit = 0
        for request, slot in zip(requests, taken, strict=True):
            request.slot = slot
            request.is_untouched = False
            request.num_admissions += 1
            self.requests[slot] = request
            if request.output_token_ids:
                self._restore_output(request)
        self._count_stops(requests, 1)
        return slots

    def vacate_slots(self, requests: Sequence[Request]) -> None:
        """Free the slots of requests. Rows of steps in flight in these slots become stale."""
        self.flush()
        vacated = [request.slot for request in requests]
        slots = as_array(vacated)
        self.is_running[slots] = False
        first = self.num_vacated + 1
        self.num_vacated += len(vacated)
        self.generation[slots] = np.arange(first, first + len(vacated))
        for request, slot in zip(requests, vacated, strict=True):
            request.slot = -1
            self.requests[slot] = None
        self._free += vacated
        self._count_stops(requests, -1)

    def _restore_output(self, request: Request) -> None:
        """Move the output tokens of a resumed request back into the arrays."""
        output = int32_view(request.output_token_ids)
        self._reserve_output(len(output))
        start = request.slot * self._output_capacity
        self._output_token_ids[start : start + len(output)] = output
        self._num_output_tokens[request.slot] = len(output)
        request.output_token_ids = b""

    def _count_stops(self, requests: Sequence[Request], change: int) -> None:
        counts = self._num_with_stops
        for request in requests:
            stop_token_ids = request.stop_token_ids
            before = counts.get(stop_token_ids, 0)
            counts[stop_token_ids] = before + change
            if not before or not before + change:
                self._change_stops(stop_token_ids, change)

    def _change_stops(self, stop_token_ids: tuple[int, ...], change: int) -> None:
        """Apply that the first request with these stop tokens gets a slot, or that the last one leaves."""
        if change < 0:
            del self._num_with_stops[stop_token_ids]
        for token_id in stop_token_ids:
            self._num_stopped_by[token_id] += change
            if self._num_stopped_by[token_id]:
                self._stops.add(token_id)
            else:
                self._stops.remove(token_id)

    def limit_output(self, slot: int, max_output_tokens: int) -> None:
        """Change the maximum number of output tokens of a slot. It has fewer."""
        self.flush()
        self.max_computed_tokens[slot] += max_output_tokens - self.max_output_tokens[slot]
        self.max_output_tokens[slot] = max_output_tokens
        self._num_until_limit = 0

    def num_prompt_tokens(self, slots: SlotArray) -> Int64Array:
        """Return the number of prompt tokens of each of `slots`."""
        return self.max_computed_tokens[slots] + 1 - self.max_output_tokens[slots]

    def num_known_tokens(self, slots: SlotArray) -> Int64Array:
        """Return, for each of `slots`, the number of its prompt tokens plus reported output tokens."""
        known: Int64Array = self.num_prompt_tokens(slots) + self.num_output_tokens[slots]
        return known

    def num_certain_tokens(self, slot: int) -> int:
        """Return the number of known tokens of the request in `slot` that have been computed."""
        known = self.num_known_tokens(np.array([slot]))
        return int(np.minimum(self.num_computed_tokens[slot], known)[0])

    def output_token_ids(self, slot: int) -> Int32Array:
        """Return a view of the output tokens of the request in `slot`."""
        start = slot * self._output_capacity
        return self._output_token_ids[start : start + int(self.num_output_tokens[slot])]

    def append_deferred(self, slots: SlotArray, frame: bytes) -> bool:
        """Append one int32 token of `frame` to each of `slots`, unless a request may have finished.

        Return whether the tokens were appended. If not, use `append_output`.
        """
        if slots is not self._deferred_slots:
            return False
        if not self._num_until_limit:
            most = np.minimum(self.max_output_tokens, self._output_capacity)
            until_limit = (most - self.num_output_tokens)[self.is_running]
            self._num_until_limit = int(until_limit.min()) - 1
        if self._num_until_limit <= 0 or len(self._stops) > _FEW_STOPS:
            return False
        for token_id in self._stops:
            # The bytes of two adjacent tokens may match too. That only means that the slower path is taken.
            if token_id.to_bytes(4, "little") in frame:
                return False
        self._num_until_limit -= 1
        self._deferred_tokens.append(frame)
        if len(self._deferred_tokens) == _MAX_DEFERRED:
            self.flush()
        return True

    def append_output(self, slots: SlotArray, token_ids: Int32Array) -> SlotArray:
        """Append one token to each of `slots`.

        Return the positions in `slots` of requests that may have finished, because they are at their length limit or
        their token is a stop token of some running request.
        """
        num_output = self.num_output_tokens[slots]
        self._reserve_output(int(num_output.max()) + 1)
        self._output_token_ids[slots * self._output_capacity + num_output] = token_ids
        num_output += 1
        self._num_output_tokens[slots] = num_output
        self._num_until_limit = 0
        may_end = num_output >= self.max_output_tokens[slots]
        may_end |= self.may_stop(token_ids)
        return may_end.nonzero()[0]

    def append_outputs(
        self, slots: SlotArray, counts: Int64Array, token_ids: Int32Array
    ) -> SlotArray:
        """Append `counts[i]` tokens to `slots[i]`.

        Return the positions that may have finished, as `append_output` does.
        """
        before = self.num_output_tokens[slots]
        num_output = before + counts
        self._reserve_output(int(num_output.max()) + 1)
        starts = slots * self._output_capacity + before - (np.cumsum(counts) - counts)
        self._output_token_ids[np.repeat(starts, counts) + np.arange(len(token_ids))] = token_ids
        self._num_output_tokens[slots] = num_output
        self._num_until_limit = 0
        may_end = num_output >= self.max_output_tokens[slots]
        may_end |= self.may_stop(token_ids[np.cumsum(counts) - 1])
        return may_end.nonzero()[0]

    def may_stop(self, token_ids: Int32Array) -> BoolArray:
        """Return which of these tokens are stop tokens of some running request, as a boolean per token."""
        may_stop: BoolArray = self._num_stopped_by.take(token_ids, mode="clip") > 0
        return may_stop

    def _reserve_output(self, length: int) -> None:
        capacity = self._output_capacity
        if length <= capacity:
            return
        while capacity < length:
            capacity *= 2
        grown = np.zeros((len(self.requests), capacity), np.int32)
        grown[:, : self._output_capacity] = self._output_token_ids.reshape(len(self.requests), -1)
        self._output_token_ids = grown.reshape(-1)
        self._output_capacity = capacity
