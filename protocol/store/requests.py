"""Messages that record requests and their tokens in the store, so that they survive the loss of any process.

A frontend process opens a *session*. It records *entries*, numbered in order. The store applies each entry once and
acknowledges it after the commit. After a reconnection, the frontend sends the unacknowledged entries again.

A *stream* is one sequence of a request. Within a session it has the number that its core uses for it, so tokens are
recorded as they arrive: one entry for all streams of a step. A request belongs to one session at a time, its owner. If
the owner's process exits, another session claims the request. From then on, only entries of that session apply to it.
"""

from typing import TypeAlias

import msgspec

from ..messages import I32, FinishedRequest, TokenLogprobs

# Frontend -> store


class OpenSession(msgspec.Struct, tag="open", array_like=True, gc=False, frozen=True):
    """The answer to the greeting. It ends an earlier session of the same frontend.

    `run` is the run directory of the frontend's engine. The engine is running as long as the directory's lock is held.
    """

    session: bytes
    run: str
    client_index: int


class BeginRequest(msgspec.Struct, tag="begin", array_like=True, gc=False, frozen=True):
    """Record that a request was accepted, with the sequences `streams` int32[N].

    `record` has the data that a frontend needs to continue it. `tokens` has the tokens of each stream so far, if any.
    `key` is the client's `Idempotency-Key`, or names its conversation. An earlier request loses the key.
    """

    number: int
    request_id: str
    owner: str
    streams: I32
    record: bytes
    key: str = ""
    tokens: list[I32] = []


class AdoptRequest(msgspec.Struct, tag="adopt", array_like=True, gc=False, frozen=True):
    """Record that a claimed request continues in this session; `streams` int32[N] are its sequences."""

    number: int
    request_id: str
    owner: str
    streams: I32


class LogTokens(msgspec.Struct, tag="tokens", array_like=True, gc=False, frozen=True):
    """Record new tokens in the form in which a core sent them (see `EngineCoreOutputs`).

    Unknown streams are ignored.
    """

    number: int
    streams: I32
    token_ids: I32
    num_tokens: I32 = b""
    finished: list[FinishedRequest] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class MoveStream(msgspec.Struct, tag="move", array_like=True, gc=False, frozen=True):
    """Record that a stream was sent to another core under a new number, with its first `num_tokens` tokens."""

    number: int
    old: int
    new: int
    num_tokens: int


class StreamEnd(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The end of a stream, as reported to its client. `reason` is a `FinishReason`."""

    num_tokens: int
    reason: int
    stop_reason: int | str | None = None
    error: str | None = None
    retry_after_s: float = 0.0
    num_cached_tokens: int = 0
    num_accepted_predictions: int = 0
    num_rejected_predictions: int = 0


class EndStream(msgspec.Struct, tag="end", array_like=True, gc=False, frozen=True):
    """Record the end of a stream.

    When all streams of a request have ended, its answer is kept. An aborted request is deleted.
    """

    number: int
    stream: int
    end: StreamEnd


LogEntry: TypeAlias = BeginRequest | AdoptRequest | LogTokens | MoveStream | EndStream


class AttachRequest(msgspec.Struct, tag="attach", array_like=True, gc=False, frozen=True):
    """Return a request of an owner, and send `RequestUpdate` until it ends or `DetachRequest` is received."""

    call_id: int
    request_id: str
    owner: str


class DetachRequest(msgspec.Struct, tag="detach", array_like=True, gc=False, frozen=True):
    """Stop the `RequestUpdate` that the call `call_id`, an `AttachRequest`, has started."""

    call_id: int


class ReserveKey(msgspec.Struct, tag="reserve", array_like=True, gc=False, frozen=True):
    """Return the last request that began with a key. If there is none, reserve the key for this session.

    With `only_finds`, the key is not reserved.
    """

    call_id: int
    owner: str
    key: str
    only_finds: bool = False


class ReleaseKey(msgspec.Struct, tag="release", array_like=True, gc=False, frozen=True):
    """Release a reserved key, because its request was not accepted, or take a key from a request that began with it."""

    owner: str
    key: str


class ClaimRequests(msgspec.Struct, tag="claim", array_like=True, gc=False, frozen=True):
    """Return up to `limit` requests whose owner has exited. From now on this session is their owner."""

    call_id: int
    limit: int


class TakeDuty(msgspec.Struct, tag="take duty", array_like=True, gc=False, frozen=True):
    """Return whether this session now has a duty, such as running batches, which only one session at a time may have.

    It keeps the duty until it sends `LeaveDuty` or ends.
    """

    call_id: int
    name: str


class LeaveDuty(msgspec.Struct, tag="leave duty", array_like=True, gc=False, frozen=True):
    """Give up a duty, so that another session can take it."""

    name: str


# Store -> frontend


class SessionOpened(msgspec.Struct, tag="opened", array_like=True, gc=False, frozen=True):
    """The answer to `OpenSession`. `last_number` is the number of the last entry that the store has; 0 if none."""

    last_number: int


class Logged(msgspec.Struct, tag="logged", array_like=True, gc=False, frozen=True):
    """All entries up to `number` have been applied and, if the store has a file that can be written, committed."""

    number: int


class StreamState(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The state of a stream: its tokens, and how it ended.

    `finished` is the end reported by its core, and `end` the end reported to its client; None before. `logprobs` belong
    to its tokens, if the request asked for them.
    """

    tokens: I32
    end: StreamEnd | None = None
    finished: FinishedRequest | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class RequestState(msgspec.Struct, tag="request", array_like=True, gc=False, frozen=True):
    """The reply to `AttachRequest`. If it has no streams, there is no such request."""

    call_id: int
    record: bytes = b""
    streams: list[StreamState] = []
    error: str = ""


class StreamUpdate(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """New tokens of one stream of a request, from position `start` on, and the end of the stream if it has ended.

    `logprobs` belong to the new tokens. `prompt_logprobs` come with the first tokens.
    """

    position: int
    start: int
    tokens: I32
    end: StreamEnd | None = None
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []


class RequestUpdate(msgspec.Struct, tag="update", array_like=True, gc=False, frozen=True):
    """Changes of the request that `call_id` has attached. If `is_gone`, it was deleted and nothing follows."""

    call_id: int
    streams: list[StreamUpdate]
    is_gone: bool = False


class KeyReply(msgspec.Struct, tag="key", array_like=True, gc=False, frozen=True):
    """The reply to `ReserveKey`. If `is_busy`, another request has reserved the key but is not accepted yet."""

    call_id: int
    request_id: str = ""
    is_busy: bool = False
    error: str = ""


class ClaimedRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """A request to be continued. `num_starts` counts the claims since its last token."""

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
    """Reports how many clients read a request of this session through the store."""

    request_id: str
    owner: str
    num_readers: int
