"""Choose how many tokens to draft per request, from its acceptance so far and the measured cost of wider steps.

The measurements arrive in the outputs of the workers, which are recorded, so a replay makes the same choices.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from ....protocol.arrays import Int32Array, Int64Array, int32_bytes
from ....protocol.config import SpeculativeConfig
from ...state.slots import SlotArray, Slots

FloatArray = npt.NDArray[np.float64]

_BINS_PER_DOUBLING: Final = 4
_NUM_BINS: Final = 20 * _BINS_PER_DOUBLING
_PRIOR_ROW_COST: Final = 0.1
"""Assumed cost of one more row, as a fraction of the cost of a step with one row, until it has been measured."""

_NEW_WEIGHT: Final = 0.1
"""Weight of a new measurement in the moving average of a step's cost, once there are many."""

_DECAY: Final = 0.9
"""Factor by which earlier drafts of a request lose weight at each verification."""

_PRIOR_ACCEPTANCE: Final = (0.5, 0.7, 0.85, 0.95)
"""Assumed acceptance rate of drafts at each level of confidence."""

_PRIOR_ACCEPTANCE_OF_MODEL: Final = (0.75,)
_PRIOR_TRIES: Final = 4.0
"""Weight of the prior acceptance rate, as a number of drafts, in the estimate for a request."""

_LEAST_GAIN: Final = 1.08
"""Factor by which drafts must be expected to raise tokens per second before they are used; covers estimation error."""

_PROBE_STEPS: Final = 256
"""Steps between two trial drafts of requests for which drafts do not pay; twice as many with a draft model."""

_ROWS_PER_PROBE: Final = 16
_STEPS_PER_DECISION: Final = 8
_LEAST_MEASUREMENTS: Final = 3
_FORGET_STEPS: Final = 2048
"""Number of steps with drafts after which the cost of a step without drafts is measured again."""


class StepCosts:
    """The duration of a decode step in seconds as a function of its number of rows, learned from the steps that ran.

    Between and beyond the measured sizes, the cost is the prior (linear in the rows), scaled like the nearest measured
    ones.
    """

    def __init__(self) -> None:
        # Lists, because single elements of arrays are slow to read and write, and every step writes some.
        self._seconds = [0.0] * _NUM_BINS
        self._rows = [0.0] * _NUM_BINS
        self._counts = [0] * _NUM_BINS
        self._measured_at = [0] * _NUM_BINS
        self._num_steps = 0

    def record(self, num_rows: int, seconds: float) -> None:
        """Record the duration of a step.

        After four measurements, a duration counts as at most three times the current average.
        """
        found = _find_bin(num_rows)
        self._num_steps += 1
        self._measured_at[found] = self._num_steps
        count = self._counts[found]
        if count >= 4:
            seconds = min(seconds, 3 * self._seconds[found])
        weight = max(1 / (count + 1), _NEW_WEIGHT)
        self._seconds[found] += weight * (seconds - self._seconds[found])
        self._rows[found] += weight * (num_rows - self._rows[found])
        self._counts[found] = count + 1

    def is_known(self, num_rows: int) -> bool:
        """Return whether steps with about `num_rows` rows were measured often enough and recently."""
        found = _find_bin(num_rows)
        is_recent = self._num_steps - self._measured_at[found] < _FORGET_STEPS
        return is_recent and self._counts[found] >= _LEAST_MEASUREMENTS

    def estimate(self, num_rows: FloatArray) -> FloatArray:
        """Return the estimated seconds of a step for each of these increasing numbers of rows."""
        known = np.array(self._counts).nonzero()[0]
        if not len(known):
            return _prior(num_rows)
        known_rows = np.array(self._rows)[known]
        # More rows never cost less, so a decreasing measurement is noise.
        known_costs = np.maximum.accumulate(np.array(self._seconds)[known])
        ratios = np.interp(num_rows, known_rows, known_costs / _prior(known_rows))
        costs: FloatArray = np.maximum.accumulate(ratios * _prior(num_rows))
        return costs


def _find_bin(num_rows: int) -> int:
    return min(int(_BINS_PER_DOUBLING * math.log2(max(num_rows, 1))), _NUM_BINS - 1)


def _prior(num_rows: FloatArray) -> FloatArray:
    return 1 + _PRIOR_ROW_COST * (num_rows - 1)


class DraftLimits:
    """The maximum number of drafts per slot and level of confidence. The worker reports the level of its drafts.

    The value of a draft is the probability that it and all drafts before it are accepted. The most probable drafts of
    all requests are chosen, as long as they raise the expected tokens per second. The limits of a level assume that all
    requests have drafts of that level. Requests that get none try one draft from time to time, because only a verified
    draft shows whether its acceptance has improved.
    """

    def __init__(self, config: SpeculativeConfig, slots: Slots) -> None:
        max_num_seqs = len(slots.requests)
        self._slots = slots
        self._max_drafts = config.num_speculative_tokens
        self._is_adaptive = config.adaptive
        self._drafts_per_pass = self._max_drafts if config.method.proposes_at_once else 1
        num_levels = config.num_levels
        self._probe_steps = _PROBE_STEPS * (1 + config.method.runs_model)
        self._costs = StepCosts()
        self._draft_seconds = 0.0
        """Average seconds of one pass of the draft model, which drafts one token, or all, for every row."""
        self._next_decision = 0
        self._generation: Int64Array = np.full(max_num_seqs, -1, np.int64)
        self._levels: Int32Array = np.zeros(max_num_seqs, np.int32)
        self._tried: FloatArray = np.zeros((max_num_seqs, num_levels))
        self._accepted: FloatArray = np.zeros((max_num_seqs, num_levels))
        prior = _PRIOR_ACCEPTANCE_OF_MODEL if config.method.runs_model else _PRIOR_ACCEPTANCE
        self._tried_in_all: FloatArray = np.full(num_levels, _PRIOR_TRIES)
        self._accepted_in_all: FloatArray = _PRIOR_TRIES * np.array(prior)
        self.limits: Int32Array = np.full((max_num_seqs, num_levels), self._max_drafts, np.int32)
        self._sent: Int32Array = self.limits.copy()
        self._num_steps = 0
        self._decided_for: Int64Array = np.zeros((2, 0), np.int64)
        self._seen_slots: SlotArray = np.zeros(0, np.intp)
        self._seen_vacated = 0
        """The slots of the last call, and `Slots.num_vacated` then: the same slots have the same requests."""
        self.has_unsent = False
        """True if a limit has changed since the last `take_changes`."""

    def record_step(
        self, num_rows: int, seconds: float, draft_seconds: float, draft_passes: int
    ) -> None:
        """Record the durations of a step in which every request decoded, and of its draft passes."""
        self._num_steps += 1
        if seconds > 0:
            self._costs.record(num_rows, seconds)
        if draft_passes > 0:
            cost = draft_seconds / draft_passes
            weight = _NEW_WEIGHT if self._draft_seconds else 1.0
            self._draft_seconds += weight * (cost - self._draft_seconds)

    def largest(self, slots: SlotArray) -> Int32Array:
        """Return the largest limit of each slot."""
        largest: Int32Array = self.limits[slots].max(1)
        return largest

    def set_levels(self, slots: SlotArray, levels: Int32Array) -> None:
        """Set the level of the latest drafts of each slot."""
        self._levels[slots] = np.minimum(levels, self.limits.shape[1] - 1)

    def record_drafts(self, slots: SlotArray, accepted: Int64Array, verified: Int64Array) -> None:
        """Record how many of the verified drafts of each slot, the latest ones, were accepted."""
        self._reset(slots)
        is_tried = verified > 0
        slots, accepted, verified = slots[is_tried], accepted[is_tried], verified[is_tried]
        # Drafts after the first wrong one were not tried: their acceptance was never tested.
        tried = accepted + (accepted < verified)
        levels = self._levels[slots]
        self._tried[slots, levels] = _DECAY * self._tried[slots, levels] + tried
        self._accepted[slots, levels] = _DECAY * self._accepted[slots, levels] + accepted
        num_levels = self.limits.shape[1]
        decay = 0.995 ** np.bincount(levels, minlength=num_levels)
        new_tried, new_accepted = (np.bincount(levels, x, num_levels) for x in (tried, accepted))
        self._tried_in_all = decay * self._tried_in_all + new_tried
        self._accepted_in_all = decay * self._accepted_in_all + new_accepted

    def _reset(self, slots: SlotArray) -> None:
        """Reset the slots that now belong to another request."""
        new = slots[self._generation[slots] != self._slots.generation[slots]]
        if len(new):
            self._generation[new] = self._slots.generation[new]
            self._tried[new] = self._accepted[new] = 0.0
            self.limits[new] = self._sent[new] = self._max_drafts

    def decide(self, slots: SlotArray) -> None:
        """Set the limits of the decoding slots. They are kept for a few steps if the requests have not changed."""
        if not len(slots) or not self._is_adaptive:
            return
        is_due = self._num_steps >= self._next_decision
        num_vacated = self._slots.num_vacated
        if not is_due and slots is self._seen_slots and num_vacated == self._seen_vacated:
            return
        self._seen_slots, self._seen_vacated = slots, num_vacated
        # The generation detects slots that were given to another request.
        requests = np.stack((slots, self._slots.generation[slots]))
        if not is_due and np.array_equal(requests, self._decided_for):
            return
        self._reset(slots)
        self._next_decision = self._num_steps + _STEPS_PER_DECISION
        self._decided_for = requests
        common = self._accepted_in_all / np.maximum(self._tried_in_all, 1e-9)
        accepted = self._accepted[slots] + _PRIOR_TRIES * common
        acceptance = accepted / (self._tried[slots] + _PRIOR_TRIES)
        limits: Int64Array = np.zeros(acceptance.shape, np.int64)
        # If the cost of a step without drafts is not known, draft nothing for some steps, which measures it.
        if self._costs.is_known(len(slots)):
            limits = self._most_worthwhile(acceptance)
        if self._num_steps % self._probe_steps < _STEPS_PER_DECISION:
            self._probe(limits)
        self.limits[slots] = limits
        self.has_unsent |= bool((limits != self._sent[slots]).any())

    def _most_worthwhile(self, acceptance: FloatArray) -> Int64Array:
        """Return how many drafts of each request maximize the tokens per second at each level, [requests, levels].

        `acceptance` are the acceptance rates, [requests, levels].
        """
        num_requests, num_levels = acceptance.shape
        positions = np.arange(1, self._max_drafts + 1)
        powers = np.minimum(acceptance.T, 0.99)[:, :, None] ** positions
        chances = powers.reshape(num_levels, num_requests * self._max_drafts)
        order = np.argsort(-chances, axis=1, kind="stable")
        num_tokens = np.full((num_levels, chances.shape[1] + 1), num_requests, np.float64)
        num_tokens[:, 1:] += np.take_along_axis(chances, order, 1).cumsum(1)
        costs = self._costs.estimate(
            num_requests + np.arange(num_tokens.shape[1], dtype=np.float64)
        )
        if self._draft_seconds:
            costs = np.repeat(costs[None], num_levels, 0)
            passes = np.maximum.accumulate(order % self._max_drafts + 1, axis=1)
            costs[:, 1:] += self._draft_seconds * -(-passes // self._drafts_per_pass)
        speeds = num_tokens / costs
        best = speeds.argmax(1)
        best[speeds.max(1) < _LEAST_GAIN * speeds[:, 0]] = 0
        limits: Int64Array = np.empty(acceptance.shape, np.int64)
        for level, count in enumerate(best):
            chosen = order[level, :count] // self._max_drafts
            limits[:, level] = np.bincount(chosen, minlength=num_requests)
        return limits

    def _probe(self, limits: Int64Array) -> None:
        """Allow one draft to some of the requests that have none at some level, to all of them in turn."""
        without = (limits.min(1) == 0).nonzero()[0]
        if len(without):
            count = max(1, len(limits) // _ROWS_PER_PROBE)
            turn = self._num_steps // self._probe_steps * count
            trying = without[(turn + np.arange(count)) % len(without)]
            limits[trying] = np.maximum(limits[trying], 1)

    def take_changes(self, slots: SlotArray) -> bytes:
        """Decide, and return int32 rows (slot, limit of each level) of the slots whose limits have changed."""
        self.decide(slots)
        if not self.has_unsent:
            return b""
        self.has_unsent = False
        changed = slots[(self.limits[slots] != self._sent[slots]).any(1)]
        self._sent[changed] = self.limits[changed]
        return int32_bytes(np.column_stack((changed, self.limits[changed])))
