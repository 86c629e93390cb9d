"""Messages about generating requests and their tokens.

A frontend process opens a *session*. What it records are *entries*, numbered in their order. The store applies each
entry once, and acknowledges it after the commit. The frontend sends the entries without an acknowledgment again to the
next store.

A *stream* is one sequence of a request. Within a session it has the number that its core knows it by, so tokens are
recorded as they arrive: one entry for all streams of a step. A request has one session at a time, its owner. When the
owner's process is gone, another session claims the request, and from then on only entries of that one count.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ..messages import I32, FinishedRequest, TokenLogprobs

# frontend -> store


class OpenSession(msgspec.Struct, tag="open", array_like=True, gc=False, frozen=True):
    """The answer to the greeting. An earlier session of the same frontend is over.

    `run` is the run directory of the frontend's engine. As long as the directory's lock is held, the engine lives.
    """

    session: bytes
    run: str
    client_index: int


class BeginRequest(msgspec.Struct, tag="begin", array_like=True, gc=False, frozen=True):
    """A request was accepted. `record` is what a frontend needs to continue it; `streams` int32[N] are its sequences.

    `tokens` has the tokens of each stream so far, if there are any. `key` is the client's `Idempotency-Key`.
    """

    number: int
    request_id: str
    owner: str
    streams: I32
    record: bytes
    key: str = ""
    tokens: list[I32] = []


class AdoptRequest(msgspec.Struct, tag="adopt", array_like=True, gc=False, frozen=True):
    """A claimed request continues in this session; `streams` int32[N] are its sequences."""

    number: int
    request_id: str
    owner: str
    streams: I32


class LogTokens(msgspec.Struct, tag="tokens", array_like=True, gc=False, frozen=True):
    """New tokens, as a core sent them (see `EngineCoreOutputs`). Unknown streams are ignored."""

    number: int
    streams: I32
    token_ids: I32
    num_tokens: I32 = b""
    finished: list[FinishedRequest] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class MoveStream(msgspec.Struct, tag="move", array_like=True, gc=False, frozen=True):
    """A stream was sent to another core under a new number, with its first `num_tokens` tokens."""

    number: int
    old: int
    new: int
    num_tokens: int


class StreamEnd(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The end of a stream, as it is reported to its client. `reason` is a `FinishReason`."""

    num_tokens: int
    reason: int
    stop_reason: int | str | None = None
    error: str | None = None
    retry_after_s: float = 0.0
    num_cached_tokens: int = 0
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0


class EndStream(msgspec.Struct, tag="end", array_like=True, gc=False, frozen=True):
    """A stream has ended. When all streams of a request have, its answer is kept; an aborted request is deleted."""

    number: int
    stream: int
    end: StreamEnd


LogEntry: TypeAlias = BeginRequest | AdoptRequest | LogTokens | MoveStream | EndStream


class AttachRequest(msgspec.Struct, tag="attach", array_like=True, gc=False, frozen=True):
    """Return a request of an owner, and send `RequestNews` until it ends or `DetachRequest` is sent."""

    call_id: int
    request_id: str
    owner: str


class DetachRequest(msgspec.Struct, tag="detach", array_like=True, gc=False, frozen=True):
    """Stop the news of the request that `call_id` has attached."""

    call_id: int


class ReserveKey(msgspec.Struct, tag="reserve", array_like=True, gc=False, frozen=True):
    """Return the request that was begun with an idempotency key; if there is none, keep the key for this session."""

    call_id: int
    owner: str
    key: str


class ReleaseKey(msgspec.Struct, tag="release", array_like=True, gc=False, frozen=True):
    """No request begins with the key that was reserved."""

    owner: str
    key: str


class ClaimRequests(msgspec.Struct, tag="claim", array_like=True, gc=False, frozen=True):
    """Return up to `limit` requests whose owner is gone. This session owns them from now on."""

    call_id: int
    limit: int


class TakeDuty(msgspec.Struct, tag="take duty", array_like=True, gc=False, frozen=True):
    """Return whether this session has a duty, which one session at a time has, until it leaves it or ends."""

    call_id: int
    name: str


class LeaveDuty(msgspec.Struct, tag="leave duty", array_like=True, gc=False, frozen=True):
    """Let another session have a duty."""

    name: str


# store -> frontend


class SessionOpened(msgspec.Struct, tag="opened", array_like=True, gc=False, frozen=True):
    """The answer to `OpenSession`. `last_number` is that of the last entry that the store has; 0 if it has none."""

    last_number: int


class Logged(msgspec.Struct, tag="logged", array_like=True, gc=False, frozen=True):
    """All entries up to `number` were applied and, if the store has a file that can be written, committed."""

    number: int


class StreamState(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A stream: its tokens, and how it ended for its core (`finished`) and for its client (`end`), if it did.

    `logprobs` are those of its tokens, if the request asked for them.
    """

    tokens: I32
    end: StreamEnd | None = None
    finished: FinishedRequest | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class RequestState(msgspec.Struct, tag="request", array_like=True, gc=False, frozen=True):
    """The reply to `AttachRequest`. Without streams there is no such request."""

    call_id: int
    record: bytes = b""
    streams: list[StreamState] = []
    error: str = ""


class StreamNews(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """New tokens of the stream at a position of a request, from `start` on, and its end.

    `logprobs` are those of the new tokens. `prompt_logprobs` come with the first tokens.
    """

    position: int
    start: int
    tokens: I32
    end: StreamEnd | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class RequestNews(msgspec.Struct, tag="news", array_like=True, gc=False, frozen=True):
    """News of the request that `call_id` has attached. If it `is_gone`, it was deleted and nothing follows."""

    call_id: int
    streams: list[StreamNews]
    is_gone: bool = False


class KeyReply(msgspec.Struct, tag="key", array_like=True, gc=False, frozen=True):
    """The reply to `ReserveKey`. If a request that `is_busy` has the key, it is not accepted yet."""

    call_id: int
    request_id: str = ""
    is_busy: bool = False
    error: str = ""


class ClaimedRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A request to continue. `num_starts` counts the claims since it last got a token."""

    request_id: str
    owner: str
    record: bytes
    num_starts: int
    streams: list[StreamState]


class ClaimReply(msgspec.Struct, tag="claimed", array_like=True, gc=False, frozen=True):
    """The reply to `ClaimRequests`."""

    call_id: int
    requests: list[ClaimedRequest] = []
    error: str = ""


class DutyReply(msgspec.Struct, tag="duty", array_like=True, gc=False, frozen=True):
    """The reply to `TakeDuty`."""

    call_id: int
    has_it: bool
    error: str = ""


class ReadersChanged(msgspec.Struct, tag="readers", array_like=True, gc=False, frozen=True):
    """So many clients read a request of this session through the store."""

    request_id: str
    owner: str
    num_readers: int
