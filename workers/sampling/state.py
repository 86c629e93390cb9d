"""The sampling parameters of every slot, as a struct of arrays on the host.

The arrays are indexed by slot, and change only when a request is added or removed. Unused features cost nothing: bad
words, biases and masks are stored only for the slots that have them.
"""

from __future__ import annotations

import math
import sys
from typing import Final

import numpy as np
import torch

from ...protocol.arrays import Float32Array, Int32Array, Int64Array
from ...protocol.sampling_params import SamplingParams, TranscriptRules
from ..device.dtypes import HostDevice
from .masks import pack_bitmask

GREEDY_TEMPERATURE: Final = 1e-5
"""Temperature below which only the most likely token has a nonzero weight, so that sampling is greedy."""


class TranscriptState:
    """The rules of a transcript, with token ids as int32 arrays."""

    def __init__(self, rules: TranscriptRules) -> None:
        self.rules = rules
        self.suppressed = np.array(rules.suppressed_token_ids, np.int32)
        self.begin_suppressed = np.array(rules.begin_suppressed_token_ids, np.int32)


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
        self.typical_p = np.ones(num_slots, np.float64)
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
        # A top-k or top-p that leaves one token is greedy, which costs less. A typical_p that leaves one token is not,
        # because it may not be the most likely one.
        leaves_one = params.top_k == 1 or params.top_p == 0
        is_greedy = params.temperature < GREEDY_TEMPERATURE or (
            leaves_one and params.typical_p == 1
        )
        self.is_greedy[slot] = is_greedy
        self.typical_p[slot] = 1.0 if is_greedy else params.typical_p
        self.inverse_temperature[slot] = 1 / max(params.temperature, GREEDY_TEMPERATURE)
        self.top_k[slot] = (
            min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size
        )
        # The smallest positive top-p still keeps one token.
        self.top_p[slot] = max(params.top_p, sys.float_info.min)
        self.min_p_margin[slot] = (
            params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
        )
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
        self.changes_logits[slot] = (
            self.has_penalties[slot]
            or self.typical_p[slot] < 1
            or any(
                slot in changes
                for changes in (
                    self.end_token_ids,
                    self.logit_bias,
                    self.allowed_tokens,
                    self.bad_words,
                    self.transcripts,
                )
            )
        )

    def remove_request(self, slot: int) -> None:
        """Free a slot. Does nothing if it is free already."""
        self.version += 1
        self.changes_logits[slot] = False
        self.has_penalties[slot] = False
        self.wants_logprobs[slot] = self.wants_processed[slot] = False
        self.num_listed[slot] = 0
        self.listed_tokens.pop(slot, None)
        self.end_token_ids.pop(slot, None)
        self.logit_bias.pop(slot, None)
        self.allowed_tokens.pop(slot, None)
        self.bad_words.pop(slot, None)
        self.transcripts.pop(slot, None)
