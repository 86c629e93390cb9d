"""Return the hidden states of requests that ask for them, with the output of each step.

Shapes: T tokens of a step, D hidden size, E elements of a token's states, S requests of a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ....protocol.arrays import Int32Array, float32_bytes
from ....protocol.sampling_params import StatesOf
from ....protocol.worker_messages import ModelRunnerOutput, RowVector
from ...batch import StepPlan
from ...device.dtypes import AnyArray, on_host
from ...device.transfers import Download

if TYPE_CHECKING:
    from ..model_loader import Model


class StepStates:
    """The hidden states that one step returns, [T, E] for each (slot, first position). They may be on the device."""

    def __init__(self) -> None:
        self._places: list[tuple[int, int]] = []
        self._states: list[AnyArray] = []

    def append(self, slot: int, first: int, states_TE: AnyArray) -> None:
        """Add states of a slot, which are copied."""
        self._places.append((slot, first))
        is_array = isinstance(states_TE, np.ndarray)
        self._states.append(states_TE.copy() if is_array else states_TE.clone())

    def fetch(self, download: Download) -> None:
        """Start to copy the states to the host."""
        self._states = [download.copy(states_TE) for states_TE in self._states]

    def add_to(self, output: ModelRunnerOutput) -> None:
        """Add the states to the output of the step."""
        for (slot, first), states_TE in zip(self._places, self._states, strict=True):
            output.pooled.append(RowVector(slot, float32_bytes(on_host(states_TE)), first))


class HiddenStates:
    """The slots whose requests return hidden states.

    They are the inputs of the layers that the model keeps or, if `keeps_layers` is false, its normed hidden states.
    """

    def __init__(self, model: Model, *, keeps_layers: bool) -> None:
        self._model, self._keeps_layers = model, keeps_layers
        self._wanted: dict[int, tuple[StatesOf, int]] = {}

    def add_request(self, slot: int, returned: StatesOf, num_prompt_tokens: int) -> None:
        """Return the states of the request in `slot` from now on."""
        self._wanted[slot] = returned, num_prompt_tokens

    def remove_request(self, slot: int) -> None:
        """Return no more states of a slot."""
        self._wanted.pop(slot, None)

    @property
    def is_pending(self) -> bool:
        """True if the request of any slot still returns states."""
        return bool(self._wanted)

    def collect(
        self, plan: StepPlan, hidden_TD: AnyArray, counts_S: Int32Array | None = None
    ) -> StepStates | None:
        """Return the states of a step's tokens; None if no request asks for them.

        Args:
            plan: The step.
            hidden_TD: The normed hidden states.
            counts_S: The number of accepted tokens of each request, if the step verified drafts.
        """
        if not self._wanted:
            return None
        states_TE = hidden_TD
        if self._keeps_layers:
            assert self._model.kept_hidden_TE is not None
            states_TE = self._model.kept_hidden_TE[:, self._model.spec.hidden_size :]
        verified = counts_S is not None
        if counts_S is None:
            counts_S = np.diff(plan.query_start_loc)
        sampling = set(plan.sampling_rows.tolist())
        found = StepStates()
        for row, slot in enumerate(plan.slots_S.tolist()):
            if slot not in self._wanted:
                continue
            returned, num_prompt_tokens = self._wanted[slot]
            first, count = int(plan.num_computed_S[row]), int(counts_S[row])
            start = int(plan.query_start_loc[row])
            if returned is StatesOf.PROMPT:
                count = min(count, num_prompt_tokens - first)
                if first + count >= num_prompt_tokens:
                    self.remove_request(slot)
            elif returned is StatesOf.LAST:
                # A stop string may end the sequence before the last of several accepted drafts.
                skipped = 0 if verified else count - 1 if row in sampling else count
                first, start, count = first + skipped, start + skipped, count - skipped
            if count > 0:
                found.append(slot, first, states_TE[start : start + count])
        return found
