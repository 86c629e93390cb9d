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
        ("listed", c_void_p),
        ("num_listed", c_void_p),
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


class Suffixes(ctypes.Structure):
    """The earlier passages from which drafts are copied; see `csrc/sampling/suffixes.h`."""

    _fields_ = (
        ("context_length", c_int32),
        ("longest_match", c_int32),
        ("drafts_per_match", c_float),
        ("least_share", c_float),
        ("num_buckets", c_int32),
        ("history_buckets", c_int32),
        ("heads", c_void_p),
        ("previous", c_void_p),
        ("num_indexed", c_void_p),
        ("source_distance", c_void_p),
        ("source_length", c_void_p),
        ("history_size", c_int64),
        ("history_begin", c_int64),
        ("history_end", c_int64),
        ("history_tokens", c_void_p),
        ("history_previous", c_void_p),
        ("history_heads", c_void_p),
    )


class DraftLookup(ctypes.Structure):
    """The drafts of every slot, and the drafts found last; see `csrc/sampling/draft_lookup.h`."""

    _fields_ = (
        ("num_drafts", c_void_p),
        ("limits", c_void_p),
        ("suffixes", POINTER(Suffixes)),
        ("most", c_int32),
        ("shortest_match", c_int32),
        ("is_searching", c_int32),
        ("num_found", c_int32),
        ("forced_width", c_int32),
        ("num_forced", c_void_p),
        ("forced_start", c_void_p),
        ("forced_tokens", c_void_p),
        ("predicted_tokens", c_void_p),
        ("num_predicted", c_void_p),
        ("num_prompt_tokens", c_void_p),
        ("num_from_prediction", c_void_p),
        ("found_slots", c_void_p),
        ("found_counts", c_void_p),
        ("found_tokens", c_void_p),
    )
