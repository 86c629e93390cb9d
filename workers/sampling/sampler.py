"""The sampler: one call turns a batch of logits into its next tokens.

Shapes: S rows of the batch, V vocabulary, G rows under a grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.arrays import Int32Array, Int64Array, int32_bytes
from ...protocol.messages import I32, ModelRunnerOutput, RowLogprobs
from ...protocol.sampling_params import SamplingParams
from ..transfers import Download, to_device
from .choice import NOT_A_NUMBER, NOTHING_ALLOWED, choose_tokens
from .logprobs import Logprobs, compute_logprobs
from .masks import limit, token_limits
from .metadata import SamplingMetadata
from .state import SamplingState

_NO_TOKENS: Final = np.zeros(0, np.int32)

ChooseTokens = Callable[[torch.Tensor, SamplingMetadata, Int32Array], torch.Tensor]

_NOTHING_ALLOWED_MESSAGE: Final = (
    "no token satisfies all of the request's constraints (allowed_token_ids, bad_words, min_tokens, "
    "structured output)"
)


class SamplerOutput:
    """What `choose_tokens` returned for a batch: int64[S], still on the device.

    `token_ids` holds token 0 for rows that could not be sampled, because of NaNs in their logits or because nothing
    was allowed. The other results are fetched when first asked for.
    """

    def __init__(
        self,
        chosen_S: torch.Tensor,
        metadata: SamplingMetadata,
        logprobs: Logprobs | None = None,
    ) -> None:
        self._chosen_S = chosen_S
        self._metadata = metadata
        self._logprobs = logprobs

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
        return int32_bytes(self._metadata.slots_S[self._on_host == NOT_A_NUMBER])

    @property
    def failed_slots(self) -> list[tuple[int, str]]:
        """Slots whose constraints left no token, with the reason."""
        slots = self._metadata.slots_S[self._on_host == NOTHING_ALLOWED]
        return [(slot, _NOTHING_ALLOWED_MESSAGE) for slot in slots.tolist()]

    @cached_property
    def logprobs(self) -> list[RowLogprobs]:
        """One position of each row that asked for log-probabilities."""
        rows = self._metadata.logprobs
        if self._logprobs is None or rows is None:
            return []
        return self._logprobs.rows(rows.slots, rows.counts)

    @cached_property
    def _on_host(self) -> Int64Array:
        on_host: Int64Array = self._chosen_S.cpu().numpy()
        return on_host


class Sampler:
    """Samples for the requests in its slots, and remembers what it sampled.

    Raises nothing for what a request asks for: parameters are verified before they get here, and a row that cannot be
    sampled is reported alone. `choose` is `choose_tokens`, or does the same faster.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        choose: ChooseTokens = choose_tokens,
    ) -> None:
        self._choose = choose
        self._vocab_size = vocab_size
        self._device = device
        self._state = SamplingState(num_slots, vocab_size, device)
        self._metadata = SamplingMetadata.of(self._state, np.zeros(0, np.int64))
        self._row_of_slot = np.full(num_slots, -1, np.int64)

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

    def remove(self, slot: int) -> None:
        """The slot is free again."""
        self._state.remove(slot)

    def describe(self, slots_S: Int32Array) -> SamplingMetadata:
        """What the rows of a batch ask for. The same until a slot of it changes."""
        if not self._metadata.describes(slots_S):
            self._metadata = SamplingMetadata.of(self._state, slots_S.astype(np.int64))
        return self._metadata

    def sample(
        self,
        logits_SV: torch.Tensor,
        slots_S: Int32Array,
        positions_S: Int32Array,
        grammar: tuple[Int32Array, Int32Array] | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row.

        `logits_SV` float32 on the device is overwritten. `slots_S` are distinct. `positions_S` is how many tokens
        each row has so far, which is the index of the one to be sampled. `grammar` holds slots int32[G] and their
        bitmasks int32[G, ceil(V / 32)].
        """
        metadata = self.describe(slots_S)
        logits_SV = logits_SV.contiguous()
        changes_logits = metadata.changes_logits or grammar is not None
        wanted = metadata.logprobs
        raw_logits_RV = None if wanted is None else wanted.raw_logits(logits_SV, changes_logits)
        if changes_logits:
            self._change_logits(logits_SV, metadata, positions_S, grammar)
        chosen_S = self._choose(logits_SV, metadata, positions_S)
        sampled = SamplerOutput(chosen_S, metadata)
        if metadata.penalties is not None:
            self._state.seen_tokens.learn(metadata.penalties, sampled.token_ids)
        if metadata.bad_words is not None:
            self._state.bad_words.learn(metadata.bad_words, sampled.token_ids)
        if wanted is None or raw_logits_RV is None:
            return sampled
        token_ids_R = sampled.token_ids if wanted.rows is None else sampled.token_ids[wanted.rows]
        logprobs = compute_logprobs(raw_logits_RV, token_ids_R, max(wanted.counts))
        return SamplerOutput(chosen_S, metadata, logprobs)

    def _change_logits(
        self,
        logits_SV: torch.Tensor,
        metadata: SamplingMetadata,
        positions_S: Int32Array,
        grammar: tuple[Int32Array, Int32Array] | None,
    ) -> None:
        """Apply all constraints, biases and penalties in place."""
        logits = logits_SV.view(-1)
        if metadata.allowed is not None:
            limit(logits_SV, metadata.allowed.rows, metadata.allowed.limits)
        if metadata.bad_words is not None:
            self._state.bad_words.mask(logits_SV, metadata.bad_words)
        ends = metadata.end_tokens
        if ends is not None:
            index = ends.index_E[positions_S[ends.rows_E] < ends.min_lengths_E]
            logits.index_fill_(0, self._to_device(index), float("-inf"))
        if metadata.logit_bias is not None:
            logits.index_add_(0, metadata.logit_bias.index_E, metadata.logit_bias.values_E)
        if metadata.penalties is not None:
            self._state.seen_tokens.penalize(logits_SV, metadata.penalties)
        if grammar is not None:
            rows_G, bitmask_GK = self._rows_of(metadata.slots_S, *grammar)
            limits_GV = token_limits(bitmask_GK, self._vocab_size, self._device)
            limit(logits_SV, self._to_device(rows_G), limits_GV)

    def _rows_of(
        self, slots_S: Int64Array, slots_G: Int32Array, bitmask_GK: Int32Array
    ) -> tuple[Int64Array, Int32Array]:
        """The batch rows of the slots that are in the batch, in its order, and their bitmasks."""
        self._row_of_slot[slots_S] = np.arange(len(slots_S))
        rows_G = self._row_of_slot[slots_G]
        self._row_of_slot[slots_S] = -1
        order = np.argsort(rows_G)
        order = order[rows_G[order] >= 0]
        return rows_G[order], bitmask_GK[order]

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)
