"""The torch sampler.

Shapes: S rows of the batch, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
import torch

from ...protocol.arrays import Int32Array, Int64Array
from ..device.transfers import to_device
from .bad_words import BadWords
from .chain import Kind, apply_samplers
from .choice import choose_tokens, mark_not_numbers
from .logit_changes import LogitChanges
from .logprobs import compute_logprobs, compute_processed
from .masks import allows_only, limit, token_limits
from .metadata import SamplingMetadata
from .penalties import SeenTokens
from .random import Stream, uniforms
from .repetitions import Repetitions
from .sampler import Grammar, Sampler, SamplerOutput
from .transcripts import Transcripts

ChooseTokens = Callable[[torch.Tensor, SamplingMetadata, Int32Array], torch.Tensor]


class TorchSampler(Sampler):
    """Samples with torch, and stores the sampled tokens on the device.

    `choose` must compute the same as `choose_tokens`.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        choose: ChooseTokens = choose_tokens,
    ) -> None:
        super().__init__(num_slots, vocab_size, device)
        self._choose = choose
        self._vocab_size = vocab_size
        self._device = device
        self._row_of_slot = np.full(num_slots, -1, np.int64)
        self._seen_tokens = SeenTokens(num_slots, device)
        self._bad_words = BadWords(num_slots, device)
        self._transcripts = Transcripts(num_slots, vocab_size, device)
        self._repetitions = Repetitions(num_slots, vocab_size, device)
        self._changes: tuple[SamplingMetadata, LogitChanges] | None = None

    def _prepare(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        if self._state.has_penalties[slot]:
            self._seen_tokens.add_slot(slot, prompt_token_ids, output_token_ids)
        if slot in self._state.bad_words:
            self._bad_words.add_slot(slot, self._state.bad_words[slot], output_token_ids)
        if slot in self._state.transcripts:
            self._transcripts.add_slot(slot, self._state.transcripts[slot], output_token_ids)
        if slot in self._state.dry:
            self._repetitions.add_slot(slot, prompt_token_ids, output_token_ids)

    def sample(
        self,
        logits_SV: torch.Tensor,
        slots_S: Int32Array,
        positions_S: Int32Array,
        grammar: Grammar | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row."""
        metadata = self.describe(slots_S)
        logits_SV = logits_SV.contiguous()
        will_change = metadata.changes_logits or grammar is not None
        wanted = metadata.logprobs
        # Check before masking, which could hide a NaN.
        raw_peak_S = logits_SV.amax(1) if will_change else None
        ending: set[int] = set()
        if grammar is not None:
            rows_G, bitmask_GK = self._rows_of(metadata.slots_S, grammar)
            limits_GV = token_limits(bitmask_GK, self._vocab_size, self._device)
            limit(logits_SV, self._to_device(rows_G), limits_GV)
            is_early_G = positions_S[rows_G] < self._state.min_length[metadata.slots_S[rows_G]]
            ending = self._find_ending(metadata.slots_S, rows_G[is_early_G], bitmask_GK[is_early_G])
        raw_logits_RV = (
            None if wanted is None else wanted.raw_logits(logits_SV, metadata.changes_logits)
        )
        changes = self._change(logits_SV, metadata, positions_S, ending)
        self._apply_samplers(logits_SV, changes, metadata, positions_S)
        chosen_S = self._choose(logits_SV, metadata, positions_S)
        if raw_peak_S is not None:
            mark_not_numbers(chosen_S, raw_peak_S)
        sampled = SamplerOutput(chosen_S, metadata)
        if changes is not None and changes.penalties is not None:
            self._seen_tokens.append_sampled(changes.penalties, sampled.token_ids)
        if changes is not None and changes.bad_words is not None:
            self._bad_words.append_sampled(changes.bad_words, sampled.token_ids)
        if changes is not None and changes.transcripts is not None:
            self._transcripts.append_sampled(changes.transcripts, sampled.token_ids)
        if changes is not None and changes.repetitions is not None:
            self._repetitions.append_sampled(changes.repetitions, sampled.token_ids)
        if wanted is None or raw_logits_RV is None:
            return sampled
        token_ids_R = sampled.token_ids if wanted.rows is None else sampled.token_ids[wanted.rows]
        alternatives = max(wanted.num_top), wanted.listed_RK
        logprobs = compute_logprobs(raw_logits_RV, token_ids_R, *alternatives)
        if wanted.processed is not None:
            is_processed_R, parameters = wanted.processed
            logits_RV = logits_SV if wanted.rows is None else logits_SV[wanted.rows]
            processed = compute_processed(logits_RV, token_ids_R, parameters, *alternatives)
            logprobs = logprobs.replace(is_processed_R, processed)
        return SamplerOutput(chosen_S, metadata, logprobs)

    def predict(
        self, logits_SV: torch.Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> torch.Tensor:
        """Return the tokens, int64 [S], that `sample` would choose without a grammar, without recording them."""
        logits_SV = logits_SV.contiguous()
        self.change(logits_SV, slots_S, positions_S)
        return self.choose(logits_SV, slots_S, positions_S).clip(0)

    def change(self, logits_SV: torch.Tensor, slots_S: Int32Array, positions_S: Int32Array) -> None:
        """Apply the changes that the requests ask for to contiguous logits, in place."""
        self._change(logits_SV, self.describe(slots_S), positions_S)

    def choose(
        self, logits_SV: torch.Tensor, slots_S: Int32Array, positions_S: Int32Array
    ) -> torch.Tensor:
        """Return the tokens or marks, int64 [S], for changed logits, which are overwritten."""
        metadata = self.describe(slots_S)
        changes = self._changes_for(metadata) if metadata.changes_logits else None
        self._apply_samplers(logits_SV, changes, metadata, positions_S)
        return self._choose(logits_SV, metadata, positions_S)

    def _change(
        self,
        logits_SV: torch.Tensor,
        metadata: SamplingMetadata,
        positions_S: Int32Array,
        ending: Collection[int] = (),
    ) -> LogitChanges | None:
        """Apply the changes that the requests ask for, and return them, or None if there are none.

        In the rows `ending`, the tokens that end a request are not forbidden.
        """
        if not metadata.changes_logits:
            return None
        changes = self._changes_for(metadata)
        self._change_logits(logits_SV, changes, positions_S, ending)
        return changes

    def _find_ending(
        self, slots_S: Int64Array, rows_G: Int64Array, bitmask_GK: Int32Array
    ) -> set[int]:
        """Return the rows whose grammar allows only tokens that end the request."""
        ends_of_slot = self._state.end_token_ids
        return {
            row
            for row, bitmask_K in zip(rows_G.tolist(), bitmask_GK, strict=True)
            if (ends := ends_of_slot.get(int(slots_S[row]))) is not None
            and allows_only(bitmask_K, ends)
        }

    def _rows_of(self, slots_S: Int64Array, grammar: Grammar) -> tuple[Int64Array, Int32Array]:
        """Return the batch rows of the grammar's slots, in batch order, and their bitmasks."""
        bitmask_GK = grammar.bitmask_NK[grammar.first_rows_G]
        self._row_of_slot[slots_S] = np.arange(len(slots_S))
        rows_G = self._row_of_slot[grammar.slots_G]
        self._row_of_slot[slots_S] = -1
        order = np.argsort(rows_G)
        order = order[rows_G[order] >= 0]
        return rows_G[order], bitmask_GK[order]

    def _changes_for(self, metadata: SamplingMetadata) -> LogitChanges:
        if self._changes is None or self._changes[0] is not metadata:
            changes = LogitChanges.from_state(
                self._state,
                self._bad_words,
                self._transcripts,
                self._repetitions,
                metadata.slots_S,
            )
            self._changes = metadata, changes
        return self._changes[1]

    def _change_logits(
        self,
        logits_SV: torch.Tensor,
        changes: LogitChanges,
        positions_S: Int32Array,
        ending: Collection[int],
    ) -> None:
        logits = logits_SV.view(-1)
        if changes.transcripts is not None:
            self._transcripts.mask(logits_SV, changes.transcripts)
        if changes.allowed is not None:
            limit(logits_SV, changes.allowed.rows, changes.allowed.limits)
        if changes.bad_words is not None:
            self._bad_words.mask(logits_SV, changes.bad_words)
        ends = changes.end_tokens
        if ends is not None:
            is_early_E = positions_S[ends.rows_E] < ends.min_lengths_E
            index = ends.index_E[is_early_E & ~np.isin(ends.rows_E, list(ending))]
            logits.index_fill_(0, self._to_device(index), float("-inf"))
        if changes.logit_bias is not None:
            logits.index_add_(0, changes.logit_bias.index_E, changes.logit_bias.values_E)
        if changes.penalties is not None:
            self._seen_tokens.penalize(logits_SV, changes.penalties)
        if changes.repetitions is not None:
            self._repetitions.penalize(logits_SV, changes.repetitions)

    def _apply_samplers(
        self,
        logits_SV: torch.Tensor,
        changes: LogitChanges | None,
        metadata: SamplingMetadata,
        positions_S: Int32Array,
    ) -> None:
        """Apply the samplers that `choose` does not, in place."""
        for chain in () if changes is None else changes.chains:
            noise_R = None
            if Kind.XTC in chain.kinds:
                seeds_R = self._state.seed[metadata.slots_S[chain.host_rows]]
                positions_R = positions_S[chain.host_rows].astype(np.int64)
                noise_R = self._to_device(uniforms(seeds_R, positions_R, Stream.XTC))
            apply_samplers(logits_SV, chain, noise_R)

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(array, self._device)
