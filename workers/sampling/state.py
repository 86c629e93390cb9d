"""The sampling parameters of every slot, as a struct of arrays on the host.

The arrays are indexed by slot, and change only when a request is added or removed. Unused features cost nothing: bad
words, biases and masks are stored only for the slots that have them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

from ...protocol.arrays import Float32Array, Int32Array, Int64Array, int32_view
from ...protocol.sampling_params import DryParams, SamplingParams, TranscriptRules
from ..device.dtypes import HostDevice
from .chain import GREEDY_TEMPERATURE, ChainedSampler, Kind, is_plain, samplers_of
from .masks import pack_bitmask


class TranscriptState:
    """The rules of a transcript, with token ids as int32 arrays."""

    def __init__(self, rules: TranscriptRules) -> None:
        self.rules = rules
        self.suppressed = np.array(rules.suppressed_token_ids, np.int32)
        self.begin_suppressed = np.array(rules.begin_suppressed_token_ids, np.int32)


class DryState(NamedTuple):
    """The penalty for repetitions, with the breakers of one token as a bitmask, and all others as tokens."""

    params: DryParams
    breakers: Int32Array
    long_breakers: tuple[tuple[int, ...], ...]

    @classmethod
    def from_params(cls, params: DryParams, vocab_size: int) -> DryState:
        """Divide the breakers by their length. Tokens outside of the vocabulary are left out."""
        flat = int32_view(params.breaker_token_ids).tolist()
        single, longer, i = set(), [], 0
        while i < len(flat):
            breaker = tuple(flat[i + 1 : i + 1 + flat[i]])
            i += 1 + flat[i]
            if len(breaker) > 1:
                longer.append(breaker)
            elif breaker and breaker[0] < vocab_size:
                single.add(breaker[0])
        return cls(params, pack_bitmask(sorted(single), vocab_size), tuple(longer))


class SamplingState:
    """Sampling parameters by slot. `version` changes with every slot; `device` is the device of the logits."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | HostDevice) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.version = 0
        self.is_greedy = np.ones(num_slots, np.bool_)
        self.inverse_temperature = np.ones(num_slots, np.float32)
        self.top_k = np.full(num_slots, vocab_size, np.int64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p_margin = np.full(num_slots, -np.inf, np.float32)
        self.seed = np.zeros(num_slots, np.int64)
        self.changes_logits = np.zeros(num_slots, np.bool_)
        self.has_penalties = np.zeros(num_slots, np.bool_)
        self.repetition_penalty = np.ones(num_slots, np.float32)
        self.presence_penalty = np.zeros(num_slots, np.float32)
        self.frequency_penalty = np.zeros(num_slots, np.float32)
        self.wants_logprobs = np.zeros(num_slots, np.bool_)
        self.num_logprobs = np.zeros(num_slots, np.int64)
        self.wants_processed = np.zeros(num_slots, np.bool_)
        """The slots whose log-probabilities are those after all changes and filters."""
        self.num_listed = np.zeros(num_slots, np.int64)
        self.listed_tokens: dict[int, Int32Array] = {}
        """The tokens whose log-probabilities a slot reports after those of the most likely tokens."""
        self.min_length = np.zeros(num_slots, np.int64)
        self.end_token_ids: dict[int, Int64Array] = {}
        self.logit_bias: dict[int, tuple[Int64Array, Float32Array]] = {}
        self.allowed_tokens: dict[int, Int32Array] = {}
        self.bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.transcripts: dict[int, TranscriptState] = {}
        self.dry: dict[int, DryState] = {}
        self.chains: dict[int, list[ChainedSampler]] = {}
        """The samplers of slots that need more than temperature, top-k, min-p and top-p, which have no effect then."""

    def add_request(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Int32Array,
        eos_token_ids: tuple[int, ...],
        output_token_ids: Int32Array,
    ) -> None:
        """Add a request to a slot. `params` have been validated; `output_token_ids` were sampled before."""
        self.remove_request(slot)
        self._set_samplers(slot, params)
        self.seed[slot] = params.seed or 0
        self.repetition_penalty[slot] = params.repetition_penalty
        self.presence_penalty[slot] = params.presence_penalty
        self.frequency_penalty[slot] = params.frequency_penalty
        self.has_penalties[slot] = (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )
        if params.logprobs is not None:
            self.wants_logprobs[slot] = True
            self.wants_processed[slot] = params.processed_logprobs
            self.num_logprobs[slot] = params.logprobs if params.logprobs >= 0 else self.vocab_size
            if params.logprob_token_ids:
                self.listed_tokens[slot] = np.array(params.logprob_token_ids, np.int32)
                self.num_listed[slot] = len(params.logprob_token_ids)
        if params.min_tokens > len(output_token_ids):
            self.min_length[slot] = len(prompt_token_ids) + params.min_tokens
            ends = {*eos_token_ids, *params.stop_token_ids}
            self.end_token_ids[slot] = np.array(sorted(ends), np.int64)
        if params.logit_bias:
            self.logit_bias[slot] = (
                np.fromiter(params.logit_bias.keys(), np.int64),
                np.fromiter(params.logit_bias.values(), np.float32),
            )
        if params.allowed_token_ids is not None:
            self.allowed_tokens[slot] = pack_bitmask(params.allowed_token_ids, self.vocab_size)
        words = tuple(word for word in params.bad_words_token_ids if word)
        if words:
            self.bad_words[slot] = words
        if params.transcript_rules is not None:
            self.transcripts[slot] = TranscriptState(params.transcript_rules)
        if params.dry is not None and params.dry.multiplier > 0 and params.dry.last_n:
            self.dry[slot] = DryState.from_params(params.dry, self.vocab_size)
        self.changes_logits[slot] = self.has_penalties[slot] or any(
            slot in changes for changes in self._changes
        )

    def _set_samplers(self, slot: int, params: SamplingParams) -> None:
        samplers = samplers_of(params, self.vocab_size)
        plain = is_plain(samplers)
        by_kind = {each.kind: each.first for each in samplers} if plain else {}
        # A top-k or top-p that leaves one token is greedy, which costs less. With other samplers, the token may not be
        # the most likely one.
        leaves_one = plain and (by_kind.get(Kind.TOP_K) == 1 or params.top_p == 0)
        has_temperature = any(each.kind is Kind.TEMPERATURE for each in samplers)
        is_greedy = has_temperature and params.temperature < GREEDY_TEMPERATURE
        self.is_greedy[slot] = is_greedy or leaves_one
        temperature = by_kind.get(Kind.TEMPERATURE, 1.0)
        self.inverse_temperature[slot] = 1 / temperature
        self.top_k[slot] = by_kind.get(Kind.TOP_K, self.vocab_size)
        self.top_p[slot] = by_kind.get(Kind.TOP_P, 1.0)
        # Min-p comes after the temperature, and is applied to logits that are not divided by it.
        self.min_p_margin[slot] = temperature * by_kind.get(Kind.MIN_P, -math.inf)
        if not plain and not is_greedy:
            self.chains[slot] = samplers

    def remove_request(self, slot: int) -> None:
        """Free a slot. Does nothing if it is free already."""
        self.version += 1
        self.changes_logits[slot] = False
        self.has_penalties[slot] = False
        self.wants_logprobs[slot] = self.wants_processed[slot] = False
        self.num_listed[slot] = 0
        self.listed_tokens.pop(slot, None)
        for changes in self._changes:
            changes.pop(slot, None)

    @property
    def _changes(self) -> tuple[dict[int, Any], ...]:
        """The changes of logits, by slot, that only some requests need."""
        return (
            self.end_token_ids,
            self.logit_bias,
            self.allowed_tokens,
            self.bad_words,
            self.transcripts,
            self.dry,
            self.chains,
        )
