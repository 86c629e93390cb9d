"""The native library's structs for sampling; see `STRUCTS`."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p


class LogitRules(ctypes.Structure):
    """The changes to the logits of a slot's request; see `csrc/sampling/logit_rules.h`."""

    _fields_ = (
        ("allowed", c_void_p),
        ("bad_words", c_void_p),
        ("end_tokens", c_void_p),
        ("bias_tokens", c_void_p),
        ("biases", c_void_p),
        ("bad_words_size", c_int32),
        ("num_end_tokens", c_int32),
        ("min_length", c_int32),
        ("num_biases", c_int32),
        ("has_penalties", c_int32),
        ("repetition_penalty", c_float),
        ("presence_penalty", c_float),
        ("frequency_penalty", c_float),
        ("suppressed", c_void_p),
        ("begin_suppressed", c_void_p),
        ("num_suppressed", c_int32),
        ("num_begin_suppressed", c_int32),
        ("first_timestamp", c_int32),
        ("end_token", c_int32),
        ("max_initial_timestamp", c_int32),
    )


class LogprobRows(ctypes.Structure):
    """The arrays that log-probabilities are written to; see `csrc/sampling/token_chooser.h`."""

    _fields_ = (
        ("is_wanted", c_void_p),
        ("num_top", c_void_p),
        ("is_processed", c_void_p),
        ("width", c_int64),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
    )


class SamplingRows(ctypes.Structure):
    """Sampling parameters by slot, and the rows to sample; see `csrc/sampling/token_chooser.h`."""

    _fields_ = (
        ("is_greedy", c_void_p),
        ("inverse_temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("typical_p", c_void_p),
        ("min_p_margin", c_void_p),
        ("seed", c_void_p),
        ("changes_logits", c_void_p),
        ("rules", POINTER(LogitRules)),
        ("token_ids", c_void_p),
        ("max_model_len", c_int64),
        ("num_prompt_tokens", c_void_p),
        ("num_tokens", c_void_p),
        ("grammar", c_void_p),
        ("grammar_words", c_void_p),
        ("logprobs", POINTER(LogprobRows)),
        ("slots", c_void_p),
        ("positions", c_void_p),
    )
