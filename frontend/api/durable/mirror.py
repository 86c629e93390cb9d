"""A mirror: a copy of a recorded request's sequences, which receives their tokens from the store."""

from __future__ import annotations

import asyncio
import time
from array import array
from typing import Final

from ....protocol.messages import FinishReason, TokenLogprobs
from ....protocol.store.requests import RequestUpdate, StreamEnd, StreamUpdate
from ...client.engine_client import RequestGroup, Sequence
from ...http.errors import APIError, bad_request, unavailable
from ...store.logprobs import last_logprobs, take_logprobs
from ..streaming.event_stream import ChunkEncoder
from .event_positions import HEADER, EventPosition

CATCH_UP_S: Final = 60.0
"""Maximum seconds, after a restart of the server, until a request has regenerated the tokens that its client had."""

TOKENS_AT_ONCE: Final = 4096
"""Number of tokens that are processed before other tasks run."""


class _Stream:
    """The recorded tokens of one sequence.

    `num_fed` tokens were passed on. `logprobs` are the log-probabilities of the other tokens.
    """

    def __init__(self) -> None:
        self.tokens = array("i")
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.end: StreamEnd | None = None
        self.num_fed = 0

    def add(self, update: StreamUpdate) -> None:
        num_known = len(self.tokens) - update.start
        new = update.tokens[4 * max(num_known, 0) :]
        self.tokens.frombytes(new)
        self.logprobs += last_logprobs(update.logprobs, len(new) // 4)
        self.prompt_logprobs = self.prompt_logprobs or update.prompt_logprobs
        if self.end is None and update.end is not None:
            self.end = update.end
            del self.tokens[update.end.num_tokens :]

    def has(self, num_tokens: int, has_end: bool) -> bool:
        return self.end is not None or (len(self.tokens) >= num_tokens and not has_end)


class Mirror:
    """Collects the tokens of a request, and adds them to a group once `open` is called."""

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self._group: RequestGroup | None = None
        self._is_gone = False
        self._changed = asyncio.Event()

    def on_update(self, update: RequestUpdate) -> None:
        """Add new tokens and ends of sequences."""
        self._is_gone |= update.is_gone
        for stream in update.streams:
            self._streams.setdefault(stream.position, _Stream()).add(stream)
        self._changed.set()
        if self._group is not None:
            self._feed_all(self._group)

    async def read_silently(
        self, group: RequestGroup, position: EventPosition, chunks: ChunkEncoder
    ) -> None:
        """Make an encoder read the output that the client already has, without writing it.

        Raises:
            APIError: The position does not belong to this request (400), or was not reached again in time (503).
        """
        counts = position.counts
        if position.is_closed:
            streams = [self._streams.get(s.position, _Stream()) for s in group.sequences]
            counts = tuple((len(stream.tokens), True) for stream in streams)
        if len(counts) != len(group.sequences):
            raise bad_request(
                HEADER,
                f"has numbers for {len(counts)} sequences, but the request has "
                f"{len(group.sequences)}",
            )
        for sequence, (num_tokens, has_end) in zip(group.sequences, counts, strict=True):
            stream = await self._wait_for(sequence.position, num_tokens, has_end)
            if self._is_gone and not stream.has(num_tokens, has_end):
                raise APIError(410, f"The stream cannot be continued: {GONE}")
            if len(stream.tokens) < num_tokens:
                raise bad_request(
                    HEADER,
                    f"refers to token {num_tokens} of a sequence with {len(stream.tokens)} tokens",
                )
            while stream.num_fed < num_tokens or (has_end and not sequence.finished):
                end = min(stream.num_fed + TOKENS_AT_ONCE, num_tokens)
                _feed(group, sequence, stream, end, with_end=has_end and end == num_tokens)
                sequence.has_updates = True
                while sequence.has_updates:
                    chunks.encode(sequence)
                await asyncio.sleep(0)
        group.updates.clear()

    async def _wait_for(self, position: int, num_tokens: int, has_end: bool) -> _Stream:
        stream = self._streams.setdefault(position, _Stream())
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while not stream.has(num_tokens, has_end) and not self._is_gone:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise unavailable(
                "The request has not yet reached this position again after a restart; retry later",
                5.0,
            ) from None
        return stream

    def open(self, group: RequestGroup) -> None:
        """Add tokens to the group from now on."""
        self._group = group
        self._feed_all(group)

    def _feed_all(self, group: RequestGroup) -> None:
        for sequence in group.sequences:
            stream = self._streams.get(sequence.position)
            if stream is not None and not sequence.finished:
                _feed(group, sequence, stream, len(stream.tokens), with_end=True)
            if self._is_gone and not sequence.finished:
                _finish(group, sequence, StreamEnd(0, FinishReason.ERROR, error=GONE))
        group.wake_soon()


GONE: Final = "the request was aborted, or the server has lost it; send it again"


def abort_mirror(group: RequestGroup) -> None:
    """Finish the sequences of a mirror whose client has disconnected. The request itself continues."""
    for sequence in group.sequences:
        if not sequence.finished:
            _finish(group, sequence, StreamEnd(sequence.num_generated_tokens, FinishReason.ABORT))


def _feed(
    group: RequestGroup, sequence: Sequence, stream: _Stream, num_tokens: int, *, with_end: bool
) -> None:
    """Add tokens to a sequence up to `num_tokens` in total, and its end if it is known and `with_end` is set."""
    sequence.token_ids.extend(stream.tokens[stream.num_fed : num_tokens])
    sequence.logprobs += take_logprobs(stream.logprobs, num_tokens - stream.num_fed)
    sequence.prompt_logprob_messages = stream.prompt_logprobs
    stream.num_fed = max(stream.num_fed, num_tokens)
    end = stream.end if with_end else None
    if sequence.is_watched:
        by_core = end is not None and not isinstance(end.stop_reason, str)
        found = sequence.find_end(FinishReason(end.reason) if end is not None and by_core else None)
        if found is not None and end is None:
            # The frontend that owns the request finds the same end.
            end = StreamEnd(sequence.num_generated_tokens, *found)
    if end is not None:
        _finish(group, sequence, end)
    elif sequence.num_generated_tokens >= sequence.wake_at:
        _mark(group, sequence)


def _finish(group: RequestGroup, sequence: Sequence, end: StreamEnd) -> None:
    sequence.finish_reason = FinishReason(end.reason)
    sequence.stop_reason, sequence.error = end.stop_reason, end.error
    sequence.retry_after_s = end.retry_after_s
    sequence.num_cached_tokens = end.num_cached_tokens
    sequence.num_accepted_predictions = end.num_accepted_predictions
    sequence.num_rejected_predictions = end.num_rejected_predictions
    sequence.finish_time = time.monotonic()
    group.record_sequence_end(sequence)
    _mark(group, sequence)


def _mark(group: RequestGroup, sequence: Sequence) -> None:
    if not sequence.has_updates:
        sequence.has_updates = True
        group.updates.append(sequence)
