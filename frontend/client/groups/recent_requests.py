"""Times and counts of the running and recently ended requests of one frontend, for operators."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

import msgspec

from ..request_group import RequestGroup

MAX_REQUESTS: Final = 256
"""Number of ended requests that are kept, and maximum number of listed running requests."""


class RecentRequest(msgspec.Struct, frozen=True, gc=False):
    """The times and counts of one request, without any of its content.

    Times are CLOCK_MONOTONIC seconds; 0.0 means that the event has not occurred yet. Times and counts of the prompt are
    those of the first sequence. `lora` is its LoRA adapter; "" for none. `outcome` is its finish reason; "" while the
    request runs.
    """

    id: str
    lora: str
    replica: int
    arrival_time: float
    scheduled_time: float
    first_token_time: float
    last_token_time: float
    finish_time: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    draft_tokens: int
    preemptions: int
    num_sequences: int
    outcome: str

    @classmethod
    def from_group(cls, group: RequestGroup) -> RecentRequest:
        """Return the current times and counts of a request."""
        sequences = group.sequences
        first = sequences[0]
        return cls(
            id=group.request_id,
            lora=first.lora_name,
            replica=first.core_index,
            arrival_time=first.arrival_time,
            scheduled_time=first.scheduled_time,
            first_token_time=first.first_token_time,
            last_token_time=first.last_token_time,
            finish_time=0.0 if group.num_unfinished else first.finish_time,
            prompt_tokens=first.num_prompt_tokens,
            cached_tokens=first.num_cached_tokens,
            generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
            draft_tokens=sum(sequence.num_drafted_tokens for sequence in sequences),
            preemptions=sum(sequence.num_preemptions for sequence in sequences),
            num_sequences=len(sequences),
            outcome="" if first.finish_reason is None else str(first.finish_reason),
        )


class RecentRequests:
    """Keeps the requests that ended last. Running requests are looked up when they are listed."""

    def __init__(self) -> None:
        self._ended: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)

    def record_end(self, group: RequestGroup) -> None:
        """Record a request whose last sequence has ended."""
        self._ended.append(RecentRequest.from_group(group))

    def list(self, unfinished: Iterable[RequestGroup]) -> list[RecentRequest]:
        """Return the ended requests in the order of their ends, then the unfinished ones.

        `unfinished` yields the group of each unfinished sequence. A request with very many sequences can hide other
        requests.
        """
        running = dict.fromkeys(islice(unfinished, MAX_REQUESTS))
        return [*self._ended, *map(RecentRequest.from_group, running)]
