"""The times of one answer, under the names that vLLM and llama.cpp use."""

from __future__ import annotations

import time

from ...client.engine_client import Sequence
from ..logprobs import Json


def vllm_metrics(sequence: Sequence) -> Json:
    """Return vLLM's `metrics` of a finished sequence in milliseconds, without those that it has too few tokens for."""
    begin, first, last = (
        sequence.scheduled_time,
        sequence.first_token_time,
        sequence.last_token_time,
    )
    count = sequence.num_read_tokens
    found: Json = {}
    if begin:
        found["queue_time_ms"] = (begin - sequence.queued_time) * 1e3
    if begin and first:
        found["time_to_first_token_ms"] = (first - begin) * 1e3
        found["generation_time_ms"] = (last - first) * 1e3
    if first and count > 1:
        found["mean_itl_ms"] = (last - first) / (count - 1) * 1e3
    if begin and last > begin:
        found["tokens_per_second"] = count / (last - begin)
    return found


def llama_timings(sequence: Sequence, num_generated: int) -> Json:
    """Return llama.cpp's `timings` of a sequence: the times of the prompt and of the answer in milliseconds."""
    now = time.monotonic()
    first = sequence.first_token_time or now
    begin = sequence.scheduled_time or sequence.arrival_time
    prompt_ms = max(first - begin, 0.0) * 1e3
    answer_ms = max((sequence.last_token_time or now) - first, 0.0) * 1e3
    num_cached = sequence.num_cached_tokens
    num_computed = sequence.num_prompt_tokens - num_cached
    timings = _llama_timings(num_cached, num_computed, prompt_ms, num_generated, answer_ms)
    if sequence.num_drafts:
        timings["draft_n"] = sequence.num_drafts
        timings["draft_n_accepted"] = min(sequence.num_drafted_tokens, sequence.num_drafts)
    return timings


def llama_prompt_timings(progress: Json) -> Json:
    """Return llama.cpp's `timings` of a prompt that is being computed, from its `prompt_progress`."""
    cached = progress["cache"]
    return _llama_timings(cached, progress["processed"] - cached, progress["time_ms"], 0, 0.0)


def _llama_timings(
    num_cached: int, num_computed: int, prompt_ms: float, num_generated: int, answer_ms: float
) -> Json:
    # The first token belongs to the time of the prompt.
    num_later = max(num_generated - 1, 0)
    return {
        "cache_n": num_cached,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(num_computed, 1),
        "prompt_per_second": num_computed / prompt_ms * 1e3 if prompt_ms else 0.0,
        "predicted_n": num_generated,
        "predicted_ms": answer_ms,
        "predicted_per_token_ms": answer_ms / max(num_later, 1),
        "predicted_per_second": num_later / answer_ms * 1e3 if answer_ms else 0.0,
    }
