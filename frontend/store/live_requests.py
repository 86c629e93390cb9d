"""The requests that are being generated, as the store sees them: their streams, sessions and readers."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from operator import call
from typing import Final, NamedTuple, Self

import msgspec

from ...protocol.messages import FinishedRequest, FinishReason, TokenLogprobs
from ...protocol.store.requests import (
    AdoptRequest,
    BeginRequest,
    EndStream,
    LogTokens,
    MoveStream,
    RequestUpdate,
    StreamEnd,
    StreamState,
    StreamUpdate,
)
from .logprobs import cut_logprobs, last_logprobs, size_of_logprobs

ORPHAN: Final = b""
"""The session of a request whose frontend has exited."""

ReaderId = tuple[bytes, int]
"""The identity of a frontend, and the number of the call that attached the request."""


class Stream(msgspec.Struct, eq=False):
    """One sequence of a request."""

    request: LiveRequest
    tokens: array[int]
    end: StreamEnd | None = None
    finished: FinishedRequest | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []

    @property
    def state(self) -> StreamState:
        """The stream in the form of a message."""
        return StreamState(
            self.tokens.tobytes(), self.end, self.finished, self.logprobs, self.prompt_logprobs
        )

    def cut(self, num_tokens: int) -> None:
        """Delete all tokens after the first `num_tokens`."""
        del self.tokens[num_tokens:]
        cut_logprobs(self.logprobs, num_tokens)

    def update_from(self, position: int, start: int) -> StreamUpdate:
        """Return the tokens from index `start` on as a message.

        `position` is the position of the stream in its request.
        """
        tokens = self.tokens[start:]
        return StreamUpdate(
            position,
            start,
            tokens.tobytes(),
            self.end,
            last_logprobs(self.logprobs, len(tokens)) if self.logprobs else [],
            [] if start else self.prompt_logprobs,
        )


class LiveRequest(msgspec.Struct, eq=False):
    """A request that has not ended.

    Attributes:
        session: The session (frontend process) that owns the request, or `ORPHAN`.
        numbers: The number of each stream in that session; empty after a claim until the new owner has sent the
            numbers.
        run: The run directory of the engine that owns or owned the request; "" if that engine has exited.
        num_starts: The number of times that the request was claimed since its last token.
        claimed_at: The number of the request's tokens at the last claim.
        size: The size of the request's record in bytes.
        size_of_logprobs: The size of the streams' log-probabilities in bytes.
        readers: Reader -> the number of tokens of each stream that it has received, or -1 after the end of the stream.
    """

    request_id: str
    owner: str
    key: str
    session: bytes
    numbers: list[int]
    run: str = ""
    num_starts: int = 0
    claimed_at: int = 0
    size: int = 0
    size_of_logprobs: int = 0
    streams: list[Stream] = []
    readers: dict[ReaderId, list[int]] = {}

    def add_stream(self, state: StreamState) -> None:
        """Add a stream that has this state."""
        logprobs, prompt_logprobs = list(state.logprobs), list(state.prompt_logprobs)
        tokens = array("i", state.tokens)
        self.streams.append(
            Stream(self, tokens, state.end, state.finished, logprobs, prompt_logprobs)
        )
        self.size_of_logprobs += size_of_logprobs(logprobs) + size_of_logprobs(prompt_logprobs)

    @property
    def name(self) -> tuple[str, str]:
        """The owner and the ID, which identify the request."""
        return self.owner, self.request_id

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all streams."""
        return sum(len(stream.tokens) for stream in self.streams)

    @property
    def has_ended(self) -> bool:
        """True if all streams have ended."""
        return all(stream.end is not None for stream in self.streams)

    @property
    def is_aborted(self) -> bool:
        """True if a stream was aborted, so that nothing more will be read."""
        return any(s.end is not None and s.end.reason == FinishReason.ABORT for s in self.streams)

    @property
    def states(self) -> list[StreamState]:
        """The streams as messages."""
        return [stream.state for stream in self.streams]

    def take_update(self, reader: ReaderId) -> RequestUpdate | None:
        """Return the tokens that a reader has not received; None if there are none.

        The last tokens of a stream are returned with its end, without which a stop token would be read as text.
        """
        updates: list[StreamUpdate] = []
        sent = self.readers[reader]
        for position, stream in enumerate(self.streams):
            start = sent[position]
            has_news = len(stream.tokens) > start and stream.finished is None
            if start < 0 or not (has_news or stream.end is not None):
                continue
            updates.append(stream.update_from(position, start))
            sent[position] = -1 if stream.end is not None else len(stream.tokens)
        return RequestUpdate(reader[1], updates) if updates else None


Append = Callable[[int], object]


class _Rows(NamedTuple):
    """The functions that append a token to each stream of an entry. They do nothing for unknown streams."""

    numbers: bytes
    appends: list[Append]
    is_known: bool

    @classmethod
    def find(cls, numbers: bytes, streams: dict[int, Stream]) -> Self:
        found = [streams.get(number) for number in array("i", numbers)]
        appends: list[Append] = [
            _ignore if stream is None else stream.tokens.append for stream in found
        ]
        return cls(numbers, appends, any(stream is not None for stream in found))


def _ignore(token: int) -> None:
    pass


class LiveRequests:
    """All requests that have not ended, by name and by the numbers of their streams.

    Attributes:
        changed: Requests that ended since the caller last cleared this.
        num_orphans: The number of requests whose frontend has exited.
    """

    def __init__(self) -> None:
        self.by_name: dict[tuple[str, str], LiveRequest] = {}
        self.changed: list[LiveRequest] = []
        self._streams: dict[bytes, dict[int, Stream]] = {}
        self._last_rows: dict[bytes, _Rows] = {}
        """The rows of each session's last entry, because the next entry usually has the same streams.

                Deleted when a stream is added or removed.
        """
        self.num_orphans = 0

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    @property
    def orphans(self) -> list[LiveRequest]:
        """The requests whose frontend has exited."""
        return [request for request in self if request.session == ORPHAN]

    def add_request(self, request: LiveRequest) -> None:
        """Add a request and the numbers of its streams."""
        self.by_name[request.name] = request
        self.num_orphans += request.session == ORPHAN
        self._map_streams(request)

    def remove_request(self, request: LiveRequest) -> None:
        """Remove a request."""
        self._unmap_streams(request)
        self.num_orphans -= request.session == ORPHAN
        del self.by_name[request.name]

    def end_session(self, session: bytes) -> list[LiveRequest]:
        """Make all requests of a session orphans, and return them."""
        orphans = [request for request in self if request.session == session]
        for request in orphans:
            self._unmap_streams(request)
            request.session, request.numbers = ORPHAN, []
        self.num_orphans += len(orphans)
        self._streams.pop(session, None)
        return orphans

    def claim(self, request: LiveRequest, session: bytes, run: str) -> None:
        """Give an orphaned request to a session of the engine with run directory `run`."""
        request.session, request.run = session, run
        self.num_orphans -= 1

    def begin(self, session: bytes, entry: BeginRequest) -> LiveRequest | None:
        """Add a new request, or replace this session's request of the same name.

        Return None if another session has it.
        """
        known = self.by_name.get((entry.owner, entry.request_id))
        if known is not None and known.session != session:
            return None
        numbers = array("i", entry.streams).tolist()
        request = LiveRequest(entry.request_id, entry.owner, entry.key, session, numbers)
        for tokens in entry.tokens[: len(numbers)] or [b""] * len(numbers):
            request.add_stream(StreamState(tokens))
        if known is not None:
            self.remove_request(known)
            request.readers = known.readers
        self.add_request(request)
        return request

    def adopt(self, session: bytes, entry: AdoptRequest) -> LiveRequest | None:
        """Set the stream numbers of a claimed request. Return None if this session does not own the request."""
        request = self.by_name.get((entry.owner, entry.request_id))
        numbers = array("i", entry.streams).tolist()
        if request is None or request.session != session or len(numbers) != len(request.streams):
            return None
        self._unmap_streams(request)
        request.numbers = numbers
        self._map_streams(request)
        return request

    def append_tokens(self, session: bytes, entry: LogTokens) -> bool:
        """Append tokens to their streams. Return whether any of the streams is known."""
        streams = self._streams.get(session)
        if not streams:
            return False
        rows = self._last_rows.get(session)
        if rows is None or rows.numbers != entry.streams:
            rows = self._last_rows[session] = _Rows.find(entry.streams, streams)
        tokens = array("i", entry.token_ids)
        appends: Iterable[Append] = rows.appends
        num_tokens = len(rows.appends)
        if entry.num_tokens:
            counts = array("i", entry.num_tokens)
            if len(counts) != num_tokens:
                return False
            appends, num_tokens = chain.from_iterable(map(repeat, appends, counts)), sum(counts)
        if num_tokens != len(tokens):
            return False
        # This consumes the iterator without running Python code for each token.
        deque(map(call, appends, tokens), maxlen=0)
        find = streams.get
        for done in entry.finished:
            if (stream := find(done.request_index)) is not None:
                stream.finished = done
        for message in entry.logprobs:
            if (stream := find(message.request_index)) is not None:
                stream.logprobs.append(message)
                stream.request.size_of_logprobs += size_of_logprobs([message])
        for message in entry.prompt_logprobs:
            if (stream := find(message.request_index)) is not None:
                stream.prompt_logprobs.append(message)
                stream.request.size_of_logprobs += size_of_logprobs([message])
        return rows.is_known

    def move(self, session: bytes, entry: MoveStream) -> None:
        """Change the number of a stream, and remove the tokens after those that its client may have received."""
        streams = self._streams.get(session, {})
        stream = streams.pop(entry.old, None)
        if stream is None:
            return
        self._last_rows.pop(session, None)
        streams[entry.new] = stream
        request = stream.request
        request.numbers[request.numbers.index(entry.old)] = entry.new
        stream.cut(entry.num_tokens)
        if not entry.num_tokens:
            # The log-probabilities are sent again with the first token.
            stream.prompt_logprobs.clear()
        stream.finished = None
        for sent in request.readers.values():
            position = request.streams.index(stream)
            # The recomputed tokens will be the same, so a reader that already has them only waits.
            sent[position] = min(sent[position], len(stream.tokens))

    def end(self, session: bytes, entry: EndStream) -> LiveRequest | None:
        """End a stream. Return the request; None if the stream is unknown."""
        stream = self._streams.get(session, {}).pop(entry.stream, None)
        if stream is None:
            return None
        self._last_rows.pop(session, None)
        stream.cut(entry.end.num_tokens)
        stream.end = entry.end
        self.changed.append(stream.request)
        return stream.request

    def _map_streams(self, request: LiveRequest) -> None:
        self._last_rows.pop(request.session, None)
        if request.numbers:
            streams = self._streams.setdefault(request.session, {})
            for number, stream in zip(request.numbers, request.streams, strict=True):
                if stream.end is None:
                    streams[number] = stream

    def _unmap_streams(self, request: LiveRequest) -> None:
        self._last_rows.pop(request.session, None)
        streams = self._streams.get(request.session, {})
        for number in request.numbers:
            streams.pop(number, None)
