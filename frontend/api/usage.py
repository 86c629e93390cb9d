"""The `usage` of an answer."""

from __future__ import annotations

from typing import Any

from ..request_group import Sequence


def count_usage(
    sequences: list[Sequence],
    n: int,
    *,
    with_cached: bool,
    reasoning_tokens: int | None = None,
    num_completion_tokens: int | None = None,
) -> dict[str, Any]:
    """Tokens so far. A prompt that was continued n times counts once."""
    prompts = sequences[::n]
    num_prompt = sum(s.num_prompt_tokens for s in prompts)
    if num_completion_tokens is None:
        num_completion_tokens = sum(s.num_generated_tokens for s in sequences)
    counts: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt + num_completion_tokens,
    }
    if with_cached:
        cached = sum(s.num_cached_tokens for s in prompts)
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning_tokens is not None:
        counts["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return counts
