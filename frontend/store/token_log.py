"""Record a frontend's unfinished requests, and deliver no token before it is durable.

An entry is durable when it is in the journal, or when the store has committed it. The store receives entries in
batches, because each batch costs both processes as much as hundreds of tokens.
"""

from __future__ import annotations

import asyncio
import logging
import os
from array import array
from collections import deque
from collections.abc import Callable
from typing import Final

import msgspec

from ...protocol.messages import EngineCoreOutputs, FinishReason
from ...protocol.store.requests import (
    AdoptRequest,
    BeginRequest,
    EndStream,
    LogEntry,
    LogTokens,
    MoveStream,
    OpenSession,
    StreamEnd,
)
from ..client.engine_client import RequestGroup, Sequence
from .entries import end_of, finish_of, merge_entries, numbers_of
from .journal import Journal
from .logprobs import select_recordable, size_of_logprobs

logger = logging.getLogger(__name__)

HOLD_S: Final = 3.0
"""Maximum seconds that tokens wait for the store. A crashed store is usually restarted sooner."""

MAX_UNACKNOWLEDGED_BYTES: Final = 64 * 1024 * 1024
"""Bytes of unacknowledged entries at which the log is abandoned. It begins again when the store answers."""

ENTRY_BYTES: Final = 64
"""Approximate bytes of an entry without its arrays."""

BATCH_S: Final = 0.25
"""Maximum seconds that tokens in the journal wait for others before they are sent to the store."""

Apply = Callable[[EngineCoreOutputs], None]


class RecordedRequest:
    """The recording of one request of this frontend.

    Attributes:
        group: The sequences of the request.
        num_readers: The number of clients that read the request through the store.
        record: The data that another frontend needs to continue the request.
        is_deleted_later: True if the caller deletes the recording after the end, because the answer is stored in
            another form. Until then the request can be claimed.
    """

    def __init__(
        self,
        log: TokenLog,
        group: RequestGroup,
        request_id: str,
        owner: str,
        record: bytes,
        key: str,
        grace_s: float,
        *,
        is_deleted_later: bool,
    ) -> None:
        self._log = log
        self.group = group
        self.request_id = request_id
        self.owner = owner
        self.record = record
        self.key = key
        self.is_deleted_later = is_deleted_later
        self._grace_s = grace_s
        self.num_readers = 0
        self._has_client = True
        self._timer: asyncio.TimerHandle | None = None

    def record_move(self, old_index: int, position: int) -> None:
        """Record that the sequence at a position has a new request index."""
        sequence = self.group.sequences[position]
        self._log.add_move(old_index, sequence.request_index, sequence.num_generated_tokens)

    def record_end(self, position: int) -> None:
        """Record that the sequence at a position has finished."""
        if not self.is_deleted_later:
            self._log.add_end(self, self.group.sequences[position])
        if not self.group.num_unfinished:
            self._cancel_timer()

    def delete(self) -> None:
        """Delete the recording of a request that has ended."""
        self._log.delete(self)

    def record_departure(self) -> None:
        """Record that the client has disconnected.

        The request continues for the grace period, or while others read it.
        """
        self._has_client = False
        self._consider_abort()

    def set_num_readers(self, num_readers: int) -> None:
        """Set how many clients read the request through the store.

        A request with `is_deleted_later` continues without readers, because its answer is stored.
        """
        if self.is_deleted_later:
            return
        had_readers, self.num_readers = self.num_readers > 0, num_readers
        if num_readers:
            self._cancel_timer()
        elif had_readers and not self._has_client:
            self._consider_abort()

    def continue_alone(self) -> None:
        """Record that a claimed request has no client yet.

        It continues until its end, or until its first client leaves.
        """
        self._has_client = False

    def _consider_abort(self) -> None:
        if self.num_readers or self._timer is not None or not self.group.num_unfinished:
            return
        if not self._grace_s:
            self.group.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if not self.num_readers:
            self.group.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class TokenLog:
    """The session of one frontend process.

    Outputs are applied as soon as their tokens are in the journal. If the journal has no room for them, they are
    applied after the store has committed them, or after `HOLD_S` seconds without an answer.

    Args:
        send: Sends a message to the store.
        run: The run directory of the engine.
        client_index: The number of the frontend.
        open_journal: Creates the journal of a session.
        holds: True if tokens outside the journal wait for the store.
    """

    def __init__(
        self,
        send: Callable[[msgspec.Struct], None],
        run: str,
        client_index: int,
        open_journal: Callable[[bytes], Journal],
        *,
        holds: bool,
    ) -> None:
        self._send = send
        self._run = run
        self._client_index = client_index
        self._session = os.urandom(8)
        self._holds = holds
        self._open_journal = open_journal
        self._journal: Journal | None = None
        self._can_have_journal = True
        self._is_open = False
        self._is_closed = False
        self._must_begin_again = False
        self._last_number = 0
        self._acknowledged = 0
        self._last_unsafe = 0
        """The number of the last entry that is not in the journal."""
        self._unacknowledged: deque[tuple[LogEntry, int]] = deque()
        self._num_bytes = 0
        self._unsent: list[LogTokens] = []
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_with_readers = 0
        self._held: deque[tuple[int, EngineCoreOutputs, Apply]] = deque()
        self._hold_timer: asyncio.TimerHandle | None = None
        self._is_late = False
        self._requests: dict[tuple[str, str], RecordedRequest] = {}

    def begin(
        self,
        group: RequestGroup,
        request_id: str,
        owner: str,
        record: bytes,
        *,
        key: str = "",
        grace_s: float = 0.0,
        is_claimed: bool = False,
        is_deleted_later: bool = False,
    ) -> RecordedRequest:
        """Start to record a request that is about to be sent to a core."""
        request = RecordedRequest(
            self,
            group,
            request_id,
            owner,
            record,
            key,
            grace_s,
            is_deleted_later=is_deleted_later,
        )
        self._requests[owner, request_id] = request
        numbers = numbers_of(group)
        if is_claimed:
            request.continue_alone()
            self._add(AdoptRequest(self._next_number(), request_id, owner, numbers))
        else:
            entry = BeginRequest(self._next_number(), request_id, owner, numbers, record, key)
            self._add(entry, len(record))
        return request

    def append(self, outputs: EngineCoreOutputs, apply: Apply) -> None:
        """Record outputs, and pass them to `apply` as soon as they are durable, in the order of the calls."""
        if not self._requests and not self._held:
            apply(outputs)
            return
        if (outputs.token_ids or outputs.prompt_logprobs) and self._requests:
            logprobs = select_recordable(outputs.logprobs)
            prompt_logprobs = select_recordable(outputs.prompt_logprobs)
            entry = LogTokens(
                self._next_number(),
                outputs.request_indices,
                outputs.token_ids,
                outputs.num_tokens,
                outputs.finished,
                logprobs,
                prompt_logprobs,
            )
            size = len(outputs.request_indices) + len(outputs.token_ids)
            self._add(entry, size + size_of_logprobs(logprobs) + size_of_logprobs(prompt_logprobs))
        if not self._holds or self._is_late or self._last_unsafe <= self._acknowledged:
            self._release_all()
            apply(outputs)
            return
        self._held.append((self._last_number, outputs, apply))
        self._watch_hold()

    def add_move(self, old: int, new: int, num_tokens: int) -> None:
        """Record that a sequence has a new number and continues after its first `num_tokens` tokens."""
        self._add(MoveStream(self._next_number(), old, new, num_tokens))

    def add_end(self, request: RecordedRequest, sequence: Sequence) -> None:
        """Record that a sequence has finished.

        After `close` this does nothing, so that the next server continues the request.
        """
        name = request.owner, request.request_id
        if self._is_closed or name not in self._requests:
            return
        self._add(EndStream(self._next_number(), sequence.request_index, end_of(sequence)))
        if not request.group.num_unfinished:
            del self._requests[name]

    def delete(self, request: RecordedRequest) -> None:
        """Delete the recording of a request.

        After `close` this does nothing, so that the next server continues the request.
        """
        if self._requests.pop((request.owner, request.request_id), None) is None:
            return
        for sequence in request.group.sequences:
            end = StreamEnd(0, int(FinishReason.ABORT))
            self._add(EndStream(self._next_number(), sequence.request_index, end))

    def end_claimed(
        self,
        request_id: str,
        owner: str,
        num_tokens: list[int],
        error: str | None,
    ) -> None:
        """End a claimed request with an error, or delete its recording if there is no error.

        `num_tokens` has the number of recorded tokens of each sequence.
        """
        reason = FinishReason.ABORT if error is None else FinishReason.ERROR
        # No core uses these numbers.
        numbers = range(-self._last_number - 1, -self._last_number - 1 - len(num_tokens), -1)
        streams = array("i", numbers).tobytes()
        self._add(AdoptRequest(self._next_number(), request_id, owner, streams))
        for number, count in zip(numbers, num_tokens, strict=True):
            end = StreamEnd(count, int(reason), error=error)
            self._add(EndStream(self._next_number(), number, end))

    def set_num_readers(self, request_id: str, owner: str, num_readers: int) -> None:
        """Apply the store's report of how many clients read a request."""
        request = self._requests.get((owner, request_id))
        if request is not None:
            request.set_num_readers(num_readers)
            self._num_with_readers = sum(r.num_readers > 0 for r in self._requests.values())
            self._send_batch()

    def greet(self) -> None:
        """Open the session with a store that has sent its greeting."""
        self._is_open = False
        # `record_opened` sends all that is unacknowledged, in order.
        self._unsent.clear()
        self._send(OpenSession(self._session, self._run, self._client_index))

    def record_opened(self, last_number: int) -> None:
        """Send the entries that the store has not received."""
        self._is_open = True
        if last_number < self._acknowledged:
            self._begin_again()
            return
        self.acknowledge(last_number)
        for entry, _ in self._unacknowledged:
            self._send(entry)

    def acknowledge(self, number: int) -> None:
        """Apply the outputs of entries that the store has committed."""
        if self._must_begin_again:
            self._begin_again()
            return
        self._acknowledged = max(self._acknowledged, number)
        while self._unacknowledged and self._unacknowledged[0][0].number <= number:
            self._num_bytes -= self._unacknowledged.popleft()[1]
        self._clean_journal()
        self._is_late = False
        while self._held and self._held[0][0] <= number:
            _, outputs, apply = self._held.popleft()
            apply(outputs)
        if not self._held and self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    async def flush(self, timeout_s: float) -> None:
        """Wait until the store has committed all entries, at most `timeout_s` seconds."""
        self._send_batch()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._unacknowledged and loop.time() < deadline:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """Stop recording. Requests that end from now on stay unfinished in the store."""
        self._send_batch()
        self._release_all()
        self._is_closed = True
        if self._journal is not None:
            self._journal.close(is_complete=not self._unacknowledged)
            self._journal = None
        if self._hold_timer is not None:
            self._hold_timer.cancel()

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _add(self, entry: LogEntry, size: int = 0) -> None:
        if self._is_closed or self._must_begin_again:
            return
        size += ENTRY_BYTES
        self._unacknowledged.append((entry, size))
        self._num_bytes += size
        # An entry in the journal must not depend on an earlier one that only the store may have.
        is_safe = (
            self._journal is not None
            and self._last_unsafe <= self._acknowledged
            and self._journal.append(entry)
        )
        if not is_safe:
            self._last_unsafe = entry.number
        if not isinstance(entry, LogTokens) or not is_safe or self._num_with_readers:
            self._send_batch()
            if self._is_open:
                self._send(entry)
        elif self._is_open:
            self._unsent.append(entry)
            if self._send_timer is None:
                loop = asyncio.get_running_loop()
                self._send_timer = loop.call_later(BATCH_S, self._send_batch)
        if self._num_bytes > MAX_UNACKNOWLEDGED_BYTES:
            logger.warning(
                "the store does not respond; its log of running requests will be rebuilt later"
            )
            self._must_begin_again = True
            self._drop_unacknowledged()

    def _send_batch(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        unsent, self._unsent = self._unsent, []
        for entry in merge_entries(unsent):
            self._send(entry)

    def _clean_journal(self) -> None:
        """Delete the entries that the store has committed from the journal.

        The first commit of a session also commits that the session exists. Before, nobody would look for its journal.
        """
        if self._journal is None:
            is_known = self._acknowledged > 0 and not self._unacknowledged
            if is_known and not self._is_closed and self._can_have_journal:
                try:
                    self._journal = self._open_journal(self._session)
                except OSError as error:
                    logger.warning(
                        "the journal of tokens cannot be created: %s; tokens are sent to clients only after the store has them",
                        error,
                    )
                    self._can_have_journal = False
        elif not self._unacknowledged or self._journal.is_filling:
            self._journal.keep(entry for entry, _ in self._unacknowledged)

    def _drop_unacknowledged(self) -> None:
        self._unacknowledged.clear()
        self._unsent.clear()
        self._num_bytes = 0
        if self._journal is not None:
            self._journal.keep(())
        self._release_all()

    def _begin_again(self) -> None:
        """Record all unfinished requests with their tokens, because the store has lost its state.

        Requests with log-probabilities are no longer recorded, because the ones that the client has already read are
        not stored here.
        """
        self._must_begin_again = False
        self._drop_unacknowledged()
        self._acknowledged = 0
        for name, request in list(self._requests.items()):
            sequences = request.group.sequences
            params = sequences[0].params
            if params.logprobs is not None or params.prompt_logprobs is not None:
                del self._requests[name]
                continue
            tokens = [sequence.token_ids.tobytes() for sequence in sequences]
            number = self._next_number()
            self._add(
                BeginRequest(
                    number,
                    request.request_id,
                    request.owner,
                    numbers_of(request.group),
                    request.record,
                    request.key,
                    tokens,
                ),
                len(request.record) + sum(map(len, tokens)),
            )
            for sequence in sequences:
                if sequence.finished and request.is_deleted_later:
                    ended = [finish_of(sequence)]
                    self._add(LogTokens(self._next_number(), b"", b"", finished=ended))
                elif sequence.finished:
                    self.add_end(request, sequence)

    def _watch_hold(self) -> None:
        if self._hold_timer is None:
            self._hold_timer = asyncio.get_running_loop().call_later(HOLD_S, self._give_up_holding)

    def _give_up_holding(self) -> None:
        self._hold_timer = None
        if self._held:
            logger.warning(
                "the store does not respond; requests continue without durability until it does"
            )
            self._is_late = True
            self._release_all()

    def _release_all(self) -> None:
        while self._held:
            _, outputs, apply = self._held.popleft()
            apply(outputs)
