"""Sample by the native program.

Shapes: S rows of the batch, K sampled tokens (more than S with accepted drafts), V vocabulary.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...protocol.arrays import Int32Array
from ...protocol.worker_messages import RowLogprobs
from ..batch import PersistentBatch
from ..device.dtypes import AnyArray, HostDevice, address, float32_array, on_host
from ..sampling import Grammar, Logprobs, Sampler, SamplerOutput, SamplingMetadata
from ..sampling.state import SamplingState
from .abi.structs import ChainedSampler, LogitRules, LogprobRows, SamplingRows, Step
from .program import NativeProgram


class NativeSampler(Sampler):
    """Samples tokens in the native program.

    It stores no tokens: penalties and bad words read the tokens of the persistent batch.
    """

    def __init__(self, batch: PersistentBatch, vocab_size: int, program: NativeProgram) -> None:
        super().__init__(batch.num_slots, vocab_size, HostDevice())
        self._batch = batch
        self._program = program
        self._rules = (LogitRules * batch.num_slots)()
        self._bad_words: dict[int, Int32Array] = {}
        self._long_breakers: dict[int, Int32Array] = {}
        self._samplers: dict[int, ctypes.Array[ChainedSampler]] = {}
        self._grammar = np.zeros(batch.num_slots, np.uintp)
        self._grammar_words = np.zeros(1, np.int64)
        state = self._state
        self.by_slot: dict[str, Any] = {
            "is_greedy": state.is_greedy.ctypes.data,
            "inverse_temperature": state.inverse_temperature.ctypes.data,
            "top_k": state.top_k.ctypes.data,
            "top_p": state.top_p.ctypes.data,
            "min_p_margin": state.min_p_margin.ctypes.data,
            "seed": state.seed.ctypes.data,
            "changes_logits": state.changes_logits.ctypes.data,
            "rules": self._rules,
            "token_ids": address(batch.token_ids_NL),
            "max_model_len": batch.max_model_len,
            "num_prompt_tokens": batch.num_prompt_tokens.ctypes.data,
            "num_tokens": batch.num_tokens.ctypes.data,
            "grammar": self._grammar.ctypes.data,
            "grammar_words": self._grammar_words.ctypes.data,
        }

    def sample(
        self,
        logits_SV: AnyArray,
        slots_S: Int32Array,
        positions_S: Int32Array,
        grammar: Grammar | None = None,
    ) -> SamplerOutput:
        """Sample one token for each row."""
        metadata = self.describe(slots_S)
        logits_SV = float32_array(logits_SV)
        tokens_S = np.empty(len(logits_SV), np.int32)
        rows = RowsToSample(self, metadata, len(slots_S), positions_S)
        step = Step(
            num_logit_rows=len(logits_SV),
            logits=logits_SV.ctypes.data,
            tokens=tokens_S.ctypes.data,
            sampling=rows.pointer,
        )
        with self.limited_to(grammar):
            self._program.run(step)
        return SamplerOutput(tokens_S.astype(np.int64), metadata, rows.logprobs())

    @contextmanager
    def limited_to(self, grammar: Grammar | None) -> Iterator[None]:
        """A context in which sampling is restricted to the tokens that the grammar allows."""
        if grammar is None:
            yield
            return
        missing = -(-self._state.vocab_size // 32) - grammar.bitmask_NK.shape[1]
        padded = np.pad(grammar.bitmask_NK, ((0, 0), (0, max(missing, 0))))
        bitmask_NK = np.ascontiguousarray(padded)
        self._grammar_words[0] = bitmask_NK.shape[1]
        self._grammar[grammar.slots_G] = (
            bitmask_NK.ctypes.data + bitmask_NK.strides[0] * grammar.first_rows_G
        )
        try:
            yield
        finally:
            self._grammar[grammar.slots_G] = 0

    def _prepare(
        self, slot: int, prompt_token_ids: Int32Array, output_token_ids: Int32Array
    ) -> None:
        """Set the logit rules of a slot. They point to arrays that the sampler's state keeps alive."""
        state = self._state
        rules = LogitRules(
            has_penalties=bool(state.has_penalties[slot]),
            repetition_penalty=float(state.repetition_penalty[slot]),
            presence_penalty=float(state.presence_penalty[slot]),
            frequency_penalty=float(state.frequency_penalty[slot]),
        )
        if (allowed := state.allowed_tokens.get(slot)) is not None:
            rules.allowed = allowed.ctypes.data
        if (words := state.bad_words.get(slot)) is not None:
            flat = _with_lengths(words)
            self._bad_words[slot] = flat
            rules.bad_words, rules.bad_words_size = flat.ctypes.data, len(flat)
        if (ends := state.end_token_ids.get(slot)) is not None:
            rules.end_tokens, rules.num_end_tokens = ends.ctypes.data, len(ends)
            rules.min_length = int(state.min_length[slot])
        if (bias := state.logit_bias.get(slot)) is not None:
            tokens, values = bias
            rules.bias_tokens, rules.biases = tokens.ctypes.data, values.ctypes.data
            rules.num_biases = len(tokens)
        if (transcript := state.transcripts.get(slot)) is not None:
            suppressed, begin_suppressed = transcript.suppressed, transcript.begin_suppressed
            rules.suppressed, rules.num_suppressed = suppressed.ctypes.data, len(suppressed)
            rules.begin_suppressed = begin_suppressed.ctypes.data
            rules.num_begin_suppressed = len(begin_suppressed)
            rules.first_timestamp = transcript.rules.first_timestamp_id
            rules.end_token = transcript.rules.end_token_id
            rules.max_initial_timestamp = transcript.rules.max_initial_timestamp
        if (dry := state.dry.get(slot)) is not None:
            rules.dry_multiplier = dry.params.multiplier
            rules.dry_log_base = math.log(dry.params.base)
            rules.dry_allowed_length = dry.params.allowed_length
            rules.dry_last_n = dry.params.last_n
            rules.breakers = dry.breakers.ctypes.data
            flat = _with_lengths(dry.long_breakers)
            self._long_breakers[slot] = flat
            rules.long_breakers, rules.long_breakers_size = flat.ctypes.data, len(flat)
        if (chain := state.chains.get(slot)) is not None:
            self._samplers[slot] = (ChainedSampler * len(chain))(
                *(ChainedSampler(*each) for each in chain)
            )
            rules.samplers, rules.num_samplers = self._samplers[slot], len(chain)
        self._rules[slot] = rules


def _with_lengths(sequences: Iterable[tuple[int, ...]]) -> Int32Array:
    """Return all sequences of tokens, each after its length, int32."""
    return np.array([x for sequence in sequences for x in (len(sequence), *sequence)], np.int32)


class PromptScorer(NativeSampler):
    """Computes the log-probabilities of given tokens, for at most `max_rows` tokens at a time."""

    def __init__(self, max_rows: int, vocab_size: int, program: NativeProgram) -> None:
        super().__init__(PersistentBatch(max_rows, 1, 1, 0, HostDevice()), vocab_size, program)
        self._state.changes_logits[:] = True
        rules_TB = np.frombuffer(memoryview(self._rules).cast("B"), np.uint8).reshape(max_rows, -1)
        self._allowed_T = rules_TB[:, LogitRules.allowed.offset :][:, :8].view(np.uintp)[:, 0]

    def __call__(
        self,
        slot: int,
        logits_TV: AnyArray,
        next_token_ids_T: AnyArray,
        count: int,
        listed_TK: Int32Array,
    ) -> RowLogprobs:
        """Return the log-probabilities of consecutive prompt tokens of one request; see `prompt_logprobs`.

        The logits are overwritten.
        """
        next_token_ids_T = on_host(next_token_ids_T)
        state, num_rows = self._state, len(next_token_ids_T)
        num_top = state.vocab_size if count < 0 else count
        state.wants_logprobs[:], state.num_logprobs[:] = True, num_top
        state.num_listed[:] = listed_TK.shape[1]
        state.listed_tokens = dict(enumerate(listed_TK))
        state.version += 1
        # Allow only the given token to be chosen. Log-probabilities are computed before such changes.
        rows = np.arange(num_rows)
        words_TK = np.zeros((num_rows, -(-state.vocab_size // 32)), np.uint32)
        bits_T = np.uint32(1) << (next_token_ids_T % 32).astype(np.uint32)
        words_TK[rows, next_token_ids_T // 32] = bits_T
        self._allowed_T[:num_rows] = words_TK.ctypes.data + words_TK.strides[0] * rows
        positions_T = np.zeros(num_rows, np.int32)
        sampled = self.sample(logits_TV, rows.astype(np.int32), positions_T)
        logprobs = sampled.raw_logprobs
        assert logprobs is not None
        # A token that cannot be chosen has a probability of 0, or its logits contain a NaN.
        logprobs.logprobs[sampled.raw_token_ids < 0, 0] = -np.inf
        logprobs.token_ids[:, 0] = next_token_ids_T
        (result,) = logprobs.rows([slot], [num_top + listed_TK.shape[1]], [num_rows])
        return result


class RowsToSample:
    """The sampling parameters of a batch's rows for native code, with arrays for the log-probabilities it returns.

    There are at most `num_rows` rows, including those of drafts. `positions_S` is not needed for decoding. All
    arguments must outlive the call of the program.
    """

    def __init__(
        self,
        sampler: NativeSampler,
        metadata: SamplingMetadata,
        num_rows: int,
        positions_S: Int32Array | None = None,
    ) -> None:
        state = metadata.state
        self._metadata = metadata
        self._wants_S = state.wants_logprobs[metadata.slots_S]
        rows = SamplingRows(**sampler.by_slot, slots=metadata.slots_S.ctypes.data)
        if positions_S is not None:
            rows.positions = positions_S.ctypes.data
        if metadata.logprobs is not None:
            rows.logprobs = self._logprob_rows(state, num_rows, 1 + max(metadata.logprobs.counts))
        self.pointer = ctypes.pointer(rows)

    def logprobs(self, num_sampled_S: Int32Array | None = None) -> Logprobs | None:
        """Return the log-probabilities of the rows that requested them, for one or `num_sampled_S` tokens each."""
        if self._metadata.logprobs is None:
            return None
        wants_K = (
            self._wants_S if num_sampled_S is None else np.repeat(self._wants_S, num_sampled_S)
        )
        rows = np.flatnonzero(wants_K)
        token_ids, logprobs, ranks = self._written
        return Logprobs(token_ids[rows], logprobs[rows], ranks[rows])

    def _logprob_rows(self, state: SamplingState, num_rows: int, width: int) -> Any:
        token_ids = np.empty((num_rows, width), np.int32)
        logprobs = np.empty((num_rows, width), np.float32)
        ranks = np.empty(num_rows, np.int32)
        self._written = token_ids, logprobs, ranks
        self._listed = np.zeros(len(state.num_listed), np.uintp)
        for slot, listed in state.listed_tokens.items():
            self._listed[slot] = listed.ctypes.data
        return ctypes.pointer(
            LogprobRows(
                state.wants_logprobs.ctypes.data,
                state.num_logprobs.ctypes.data,
                state.wants_processed.ctypes.data,
                self._listed.ctypes.data,
                state.num_listed.ctypes.data,
                width,
                *(array.ctypes.data for array in self._written),
            )
        )
