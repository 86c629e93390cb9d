"""The sampler interface: one call turns a batch of logits into its next tokens.

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
from ...protocol.messages import I32
from ...protocol.sampling_params import SamplingParams
from ...protocol.worker_messages import ModelRunnerOutput, RowLogprobs
from ..device.dtypes import AnyArray, HostDevice, on_host
from ..device.transfers import Download
from .choice import NOT_A_NUMBER, NOTHING_ALLOWED
from .logprobs import Logprobs
from .metadata import SamplingMetadata
from .state import SamplingState

_NO_TOKENS: Final = np.zeros(0, np.int32)


class Grammar(NamedTuple):
    """Bitmasks, int32 [N, ceil(V / 32)], for G slots with a grammar: the tokens allowed next, and after each draft."""

    slots_G: Int32Array
    first_rows_G: Int64Array
    bitmask_NK: Int32Array


NOTHING_ALLOWED_MESSAGE: Final = (
    "no token satisfies all of the request's constraints (allowed_token_ids, bad_words, min_tokens, "
    "structured output)"
)


class SamplerOutput:
    """The result of sampling a batch. The tokens, int64 [S], may still be on the device.

    `token_ids` has token 0 for rows that could not be sampled, because their logits had NaNs or no token was allowed.
    The other results are copied to the host on first use. If `num_sampled_S` is given, each row has that many tokens.
    """

    def __init__(
        self,
        chosen_S: AnyArray,
        metadata: SamplingMetadata,
        logprobs: Logprobs | None = None,
        num_sampled_S: Int32Array | None = None,
    ) -> None:
        self._chosen_S = chosen_S
        self._metadata = metadata
        self._logprobs = logprobs
        self._num_sampled_S = num_sampled_S

    @property
    def raw_token_ids(self) -> AnyArray:
        """Tokens, or marks for rows that could not be sampled, int64 [S]."""
        return self._chosen_S

    @property
    def raw_logprobs(self) -> Logprobs | None:
        """Log-probabilities of the rows that requested them."""
        return self._logprobs

    @cached_property
    def token_ids(self) -> AnyArray:
        """Tokens, int64 [S], on the device or as a numpy array."""
        return self._chosen_S.clip(0)

    def fetch(self, download: Download) -> None:
        """Start to copy the results to the host. The properties must not be read before the download has arrived."""
        self._chosen_S = download.copy(self._chosen_S)
        if self._logprobs is not None:
            self._logprobs = self._logprobs.fetch(download)

    def message(self, step: int, prompt_logprobs: Sequence[RowLogprobs] = ()) -> ModelRunnerOutput:
        """Return the output of a step with these tokens."""
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
        """Sampled tokens, int32 [S]."""
        return int32_bytes(self._on_host.clip(0))

    @property
    def nan_slots(self) -> I32:
        """Slots with NaN or infinite logits, int32."""
        return int32_bytes(self._slots_with(NOT_A_NUMBER))

    @property
    def failed_slots(self) -> list[tuple[int, str]]:
        """Pairs (slot, reason) for slots whose constraints allowed no token."""
        slots = self._slots_with(NOTHING_ALLOWED).tolist()
        return [(slot, NOTHING_ALLOWED_MESSAGE) for slot in slots]

    def _slots_with(self, mark: int) -> Int64Array:
        """Return the slots that have this mark instead of a token."""
        slots_S = self._metadata.slots_S
        if self._num_sampled_S is not None:
            slots_S = np.repeat(slots_S, self._num_sampled_S)
        return np.array(sorted(set(slots_S[self._on_host == mark].tolist())), np.int64)

    @cached_property
    def logprobs(self) -> list[RowLogprobs]:
        """Log-probabilities of each row that requested them."""
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
        return on_host(self._chosen_S)


class Sampler(ABC):
    """Samples tokens for the requests in its slots.

    Parameters have been validated before, so sampling raises no error for them. A row that cannot be sampled is
    reported, and does not affect other rows.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | HostDevice) -> None:
        self._state = SamplingState(num_slots, vocab_size, device)
        self._metadata = SamplingMetadata.from_state(self._state, np.zeros(0, np.int64))

    def add_request(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Int32Array,
        eos_token_ids: tuple[int, ...],
        output_token_ids: Int32Array = _NO_TOKENS,
    ) -> None:
        """Add a request to a slot. `output_token_ids` were sampled before it was preempted."""
        self._state.add_request(slot, params, prompt_token_ids, eos_token_ids, output_token_ids)
        if self._state.changes_logits[slot]:
            self._prepare(slot, prompt_token_ids, output_token_ids)

    @abstractmethod
    def _prepare(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        """Prepare a slot whose request needs changes of its logits."""

    def remove_request(self, slot: int) -> None:
        """Free a slot."""
        self._state.remove_request(slot)

    def describe(self, slots_S: Int32Array) -> SamplingMetadata:
        """Return the sampling features of a batch's rows: the same object until one of its slots changes."""
        if not self._metadata.describes(slots_S):
            self._metadata = SamplingMetadata.from_state(self._state, slots_S.astype(np.int64))
        return self._metadata

    @abstractmethod
    def sample(
        self,
        logits_SV: AnyArray,
        slots_S: Int32Array,
        positions_S: Int32Array,
        grammar: Grammar | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row.

        Args:
            logits_SV: float32 on the device; overwritten.
            slots_S: Slots. They are distinct, unless there is no grammar and no slot changes its logits.
            positions_S: The number of tokens that each row has so far, which is the index of the token to be sampled.
            grammar: The allowed tokens of some of the slots.
        """
