"""Write receipts: the field `usage.engine` of a response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ...chat.messages import text_of_content
from ...client.engine_client import Sequence as GeneratedSequence
from ...http.errors import APIError
from ...tokenizer.tokenizer import Tokenizer
from ..generation import PreparedPrompt
from ..logprobs import Json
from .recent_prompts import NearestPrompt, TokenIds

COMPARED_TOKENS: Final = 16
"""Number of tokens after the first difference that are compared character by character."""


class ReceiptSource(msgspec.Struct, frozen=True):
    """The data of a receipt that does not come from the outputs.

    Attributes:
        request_id: The request's identifier in the engine.
        prompt: The first prompt.
        nearest: The earlier prompt with the longest common prefix.
    """

    request_id: str
    prompt: PreparedPrompt
    nearest: NearestPrompt | None


def make_receipt(
    source: ReceiptSource,
    sequences: Sequence[GeneratedSequence],
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
) -> Json:
    """Return the receipt of a request.

    Args:
        source: The request's prompt and its nearest earlier prompt.
        sequences: The outputs. Times are taken from the first one.
        tokenizer: The tokenizer of the prompt.
        messages: The conversation of the prompt; [] if there is none.
    """
    first = sequences[0]
    receipt: Json = {
        "request_id": source.request_id,
        "queue_ms": _milliseconds(first.arrival_time, first.scheduled_time),
        "prefill_ms": _milliseconds(first.scheduled_time, first.first_token_time),
        "decode_ms": _milliseconds(first.first_token_time, first.last_token_time),
        "scheduler_ms": round(1000 * sum(s.scheduler_time for s in sequences), 3),
        "core_seconds": _core_seconds(sequences),
        "prompt_tokens": first.num_prompt_tokens,
        "cached_tokens": first.num_cached_tokens,
        "disk_tokens": first.num_loaded_tokens,
        "preemptions": sum(s.num_preemptions for s in sequences),
        "accepted_draft_tokens": sum(s.num_drafted_tokens for s in sequences),
    }
    place = find_difference(tokenizer, source.prompt, source.nearest, messages)
    cached = f"{first.num_cached_tokens:,} of {first.num_prompt_tokens:,} tokens"
    receipt["prefix_match"] = f"{cached}; {place}" if place else cached
    return receipt


def _core_seconds(sequences: Sequence[GeneratedSequence]) -> float | None:
    """Return the processor time of all outputs in seconds; None if it is unknown because one ended at a stop string."""
    times = [sequence.core_time for sequence in sequences]
    return round(sum(times), 6) if all(times) else None


def _milliseconds(start: float, end: float) -> float | None:
    """Return the milliseconds between two events; None if one did not occur."""
    return round(1000 * (end - start), 3) if start and end else None


def find_difference(
    tokenizer: Tokenizer,
    prompt: PreparedPrompt,
    nearest: NearestPrompt | None,
    messages: Sequence[Mapping[str, Any]],
) -> str:
    """Return a text about where a prompt first differs from the nearest earlier one; "" if there is none."""
    if nearest is None:
        return ""
    start = nearest.num_common
    if start == len(prompt.token_ids):
        return "the whole prompt is a prefix of an earlier one"
    if start == len(nearest.token_ids):
        return "an earlier prompt is a prefix of it"
    before = _text_of(tokenizer, prompt.token_ids[:start])
    if prompt.text is None or not prompt.text.startswith(before):
        return f"first difference at token {start:,}"
    end = start + COMPARED_TOKENS
    here = _text_of(tokenizer, prompt.token_ids[start:end])
    there = _text_of(tokenizer, nearest.token_ids[start:end])
    same = next(
        (i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), 0
    )
    position = len(before) + same
    return f"first difference {_place_of(prompt.text, position, messages)}"


def _text_of(tokenizer: Tokenizer, token_ids: TokenIds) -> str:
    data = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids.tolist())
    # The last character may be incomplete.
    return data.decode(errors="ignore")


def _place_of(text: str, position: int, messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a description of a position in a rendered conversation: the message, and the place in it."""
    cursor = 0
    for number, message in enumerate(messages):
        try:
            content = text_of_content(message.get("content"))
        except (APIError, ValueError):
            content = ""  # It has parts that are not text.
        start = text.find(content, cursor) if content else -1
        if start < 0:
            continue
        if position < start:
            return f"before message {number}"
        if position < start + len(content):
            return f"in message {number} at character {position - start}"
        cursor = start + len(content)
    return "after the messages" if messages else f"at character {position}"
