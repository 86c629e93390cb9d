"""A sampler: one call turns a batch of logits into its next tokens.

Shapes: S rows of the batch, V vocabulary, G rows under a grammar.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
import torch

from ...protocol.arrays import Int32Array, Int64Array, int32_bytes
from ...protocol.messages import I32, ModelRunnerOutput, RowLogprobs
from ...protocol.sampling_params import SamplingParams
from ..transfers import Download
from .choice import NOT_A_NUMBER, NOTHING_ALLOWED
from .logprobs import Logprobs
from .metadata import SamplingMetadata
from .state import SamplingState

_NO_TOKENS: Final = np.zeros(0, np.int32)


class Grammar(NamedTuple):
    """The bitmasks int32[N, ceil(V / 32)] of what G slots may sample: next, and in the rows after it for each draft."""

    slots_G: Int32Array
    first_rows_G: Int64Array
    bitmask_NK: Int32Array


_NOTHING_ALLOWED_MESSAGE: Final = (
    "no token satisfies all of the request's constraints (allowed_token_ids, bad_words, min_tokens, "
    "structured output)"
)


class SamplerOutput:
    """What `choose_tokens` returned for a batch: int64[S], still on the device.

    `token_ids` holds token 0 for rows that could not be sampled, because of NaNs in their logits or because nothing
    was allowed. The other results are fetched when first asked for. With `num_sampled_S` a row has that many tokens.
    """

    def __init__(
        self,
        chosen_S: torch.Tensor,
        metadata: SamplingMetadata,
        logprobs: Logprobs | None = None,
        num_sampled_S: Int32Array | None = None,
    ) -> None:
        self._chosen_S = chosen_S
        self._metadata = metadata
        self._logprobs = logprobs
        self._num_sampled_S = num_sampled_S

    @cached_property
    def token_ids(self) -> torch.Tensor:
        """int64[S] on the device."""
        return self._chosen_S.clamp(min=0)

    def fetch(self, download: Download) -> None:
        """Let what the properties tell come to the host; until it has arrived they must not be asked for."""
        self._chosen_S = download.copy(self._chosen_S)
        if self._logprobs is not None:
            self._logprobs = self._logprobs.fetch(download)

    def message(self, step: int, prompt_logprobs: Sequence[RowLogprobs] = ()) -> ModelRunnerOutput:
        """The output of a step, of which this is what it sampled."""
        return ModelRunnerOutput(
            step,
            sampled_token_ids=self.sampled_token_ids,
            logprobs=self.logprobs,
            prompt_logprobs=[*prompt_logprobs],
            nan_slots=self.nan_slots,
            failed_slots=self.failed_slots,
        )

    @property
    def sampled_token_ids(self) -> I32:
        """int32[S]"""
        return int32_bytes(self._on_host.clip(0))

    @property
    def nan_slots(self) -> I32:
        """Slots with NaN or infinite logits, int32."""
        return int32_bytes(self._slots_with(NOT_A_NUMBER))

    @property
    def failed_slots(self) -> list[tuple[int, str]]:
        """Slots whose constraints left no token, with the reason."""
        slots = self._slots_with(NOTHING_ALLOWED).tolist()
        return [(slot, _NOTHING_ALLOWED_MESSAGE) for slot in slots]

    def _slots_with(self, mark: int) -> Int64Array:
        """The slots that have this mark in place of a token."""
        slots_S = self._metadata.slots_S
        if self._num_sampled_S is not None:
            slots_S = np.repeat(slots_S, self._num_sampled_S)
        slots: Int64Array = np.unique(slots_S[self._on_host == mark])
        return slots

    @cached_property
    def logprobs(self) -> list[RowLogprobs]:
        """Of each row that asked for log-probabilities."""
        rows = self._metadata.logprobs
        if self._logprobs is None or rows is None:
            return []
        lengths = None
        if self._num_sampled_S is not None:
            wants_S = self._metadata.state.wants_logprobs[self._metadata.slots_S]
            lengths = self._num_sampled_S[wants_S].tolist()
        return self._logprobs.rows(rows.slots, rows.counts, lengths)

    @cached_property
    def _on_host(self) -> Int64Array:
        on_host: Int64Array = self._chosen_S.cpu().numpy()
        return on_host


class Sampler(ABC):
    """Samples for the requests in its slots.

    Raises nothing for what a request asks for: parameters are verified before they get here, and a row that cannot be
    sampled is reported alone.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._state = SamplingState(num_slots, vocab_size, device)
        self._metadata = SamplingMetadata.of(self._state, np.zeros(0, np.int64))

    def add(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Int32Array,
        eos_token_ids: tuple[int, ...],
        output_token_ids: Int32Array = _NO_TOKENS,
    ) -> None:
        """A request takes the slot. `output_token_ids` are those sampled before it was preempted."""
        self._state.add(slot, params, prompt_token_ids, eos_token_ids, output_token_ids)
        if self._state.changes_logits[slot]:
            self._prepare(slot, prompt_token_ids, output_token_ids)

    @abstractmethod
    def _prepare(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        """The slot's request wants its logits changed."""

    def remove(self, slot: int) -> None:
        """The slot is free again."""
        self._state.remove(slot)

    def describe(self, slots_S: Int32Array) -> SamplingMetadata:
        """What the rows of a batch ask for. The same until a slot of it changes."""
        if not self._metadata.describes(slots_S):
            self._metadata = SamplingMetadata.of(self._state, slots_S.astype(np.int64))
        return self._metadata

    @abstractmethod
    def sample(
        self,
        logits_SV: torch.Tensor,
        slots_S: Int32Array,
        positions_S: Int32Array,
        grammar: Grammar | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row.

        `logits_SV` float32 on the device is overwritten. `slots_S` are distinct. `positions_S` is how many tokens
        each row has so far, which is the index of the one to be sampled.
        """
