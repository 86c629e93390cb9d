"""The sampler: one call turns a batch of logits into its next tokens.

Shapes: S rows of the batch, V vocabulary, G rows under a grammar.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.arrays import Int32Array, Int64Array, int32_bytes
from ...protocol.messages import I32, RowLogprobs
from ...protocol.sampling_params import SamplingParams
from .distribution import BlockedLogits, argmax
from .filters import sample_top_k, sample_top_p, sample_unfiltered
from .logprobs import Logprobs, compute_logprobs
from .masks import limit, token_limits
from .metadata import LogprobRows, Method, RowGroup, SamplingMetadata
from .random import Stream, uniforms
from .state import SamplingState

_NO_TOKENS: Final = np.zeros(0, np.int32)

NOTHING_ALLOWED: Final = (
    "no token satisfies all of the request's constraints (allowed_token_ids, bad_words, min_tokens, "
    "structured output)"
)


class SamplerOutput:
    """Sampled tokens, still on the device: `token_ids` int64[S].

    The other results are fetched when first asked for. Rows that could not be sampled, because of NaNs in their
    logits or because nothing was allowed, have token 0.
    """

    def __init__(
        self,
        token_ids: torch.Tensor,
        slots_S: Int64Array,
        is_nan_S: torch.Tensor,
        is_stuck_S: torch.Tensor,
        logprobs: Logprobs | None,
        logprob_rows: LogprobRows | None,
    ) -> None:
        self.token_ids = token_ids
        self._slots_S = slots_S
        self._is_nan_S = is_nan_S
        self._is_stuck_S = is_stuck_S
        self._logprobs = logprobs
        self._logprob_rows = logprob_rows

    @property
    def sampled_token_ids(self) -> I32:
        """int32[S]"""
        return int32_bytes(self._on_host[0])

    @property
    def nan_slots(self) -> I32:
        """Slots with NaN or infinite logits, int32."""
        return int32_bytes(self._slots_S[self._on_host[1] != 0])

    @property
    def failed_slots(self) -> list[tuple[int, str]]:
        """Slots whose constraints left no token, with the reason."""
        slots = self._slots_S[self._on_host[2] != 0]
        return [(slot, NOTHING_ALLOWED) for slot in slots.tolist()]

    @cached_property
    def logprobs(self) -> list[RowLogprobs]:
        """One position of each row that asked for log-probabilities."""
        if self._logprobs is None or self._logprob_rows is None:
            return []
        return self._logprobs.rows(self._logprob_rows.slots, self._logprob_rows.counts)

    @cached_property
    def _on_host(self) -> Int64Array:
        flags = (self._is_nan_S.to(torch.int64), self._is_stuck_S.to(torch.int64))
        return torch.stack([self.token_ids, *flags]).cpu().numpy()


class Sampler:
    """Samples for the requests in its slots, and remembers what it sampled.

    Raises nothing for what a request asks for: parameters are verified before they get here, and a row that cannot be
    sampled is reported alone.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
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

    def is_greedy(self, slots_S: Int32Array) -> bool:
        """Whether every row takes its most likely token and nothing else is asked for: logits can be spared."""
        metadata = self._describe(slots_S)
        return (
            metadata.seeds_S is None and metadata.logprobs is None and not metadata.changes_logits
        )

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
        metadata = self._describe(slots_S)
        logits_SV = logits_SV.contiguous()
        changes_logits = metadata.changes_logits or grammar is not None
        wanted = metadata.logprobs
        raw_logits_RV = None if wanted is None else wanted.raw_logits(logits_SV, changes_logits)
        if changes_logits:
            raw_peak_S = logits_SV.amax(1)
            self._change_logits(logits_SV, metadata, positions_S, grammar)
            x = BlockedLogits.of(logits_SV)
        else:
            x = BlockedLogits.of(logits_SV)
            raw_peak_S = x.peak_R
        is_nan_S = raw_peak_S.isnan() | raw_peak_S.isposinf()
        is_stuck_S = x.peak_R.isneginf()
        token_ids = self._choose(x, metadata, positions_S)
        token_ids.masked_fill_(is_nan_S | is_stuck_S, 0)
        if metadata.penalties is not None:
            self._state.seen_tokens.learn(metadata.penalties, token_ids)
        if metadata.bad_words is not None:
            self._state.bad_words.learn(metadata.bad_words, token_ids)
        logprobs = None
        if wanted is not None and raw_logits_RV is not None:
            chosen_R = token_ids if wanted.rows is None else token_ids[wanted.rows]
            logprobs = compute_logprobs(raw_logits_RV, chosen_R, max(wanted.counts))
        return SamplerOutput(token_ids, metadata.slots_S, is_nan_S, is_stuck_S, logprobs, wanted)

    def _describe(self, slots_S: Int32Array) -> SamplingMetadata:
        if not self._metadata.describes(self._state.version, slots_S):
            self._metadata = SamplingMetadata.of(self._state, slots_S.astype(np.int64))
        return self._metadata

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

    def _choose(
        self, x: BlockedLogits, metadata: SamplingMetadata, positions_S: Int32Array
    ) -> torch.Tensor:
        uniform_S = None
        if metadata.seeds_S is not None:
            noise = uniforms(metadata.seeds_S, positions_S.astype(np.int64), Stream.TOKEN)
            uniform_S = self._to_device(noise)
        if len(metadata.groups) == 1:
            return _choose_group(x, metadata.groups[0], uniform_S)
        token_ids = torch.zeros(len(metadata.slots_S), dtype=torch.int64, device=self._device)
        for group in metadata.groups:
            token_ids[group.rows] = _choose_group(x.rows(group.rows), group, uniform_S)
        return token_ids

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)


def _choose_group(
    x: BlockedLogits, group: RowGroup, uniform_S: torch.Tensor | None
) -> torch.Tensor:
    if group.method is Method.GREEDY or uniform_S is None:
        return argmax(x)
    uniform_R = uniform_S if group.rows is None else uniform_S[group.rows]
    if group.method is Method.TOP_K:
        return sample_top_k(x, group.filters, group.depth, uniform_R)
    if group.method is Method.TOP_P:
        return sample_top_p(x, group.filters, group.depth, uniform_R)
    return sample_unfiltered(x, group.filters, uniform_R)
