"""What a core says and hears: every message between frontends, cores and workers.

Arrays travel as raw little-endian bytes (see `arrays`): `I32` and `F32` name their element types.
Structs are encoded as msgpack arrays, so a field may be appended but never moved; `PROTOCOL_VERSION`
guards the rest. Only `SamplingParams`, of which a request sets a few, are maps of what is set. A *slot* is the row
of a running request in the scheduler's arrays and in every worker's persistent batch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from .kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from .sampling_params import SamplingParams

I32: TypeAlias = bytes
F32: TypeAlias = bytes


class FinishReason(enum.IntEnum):
    """Why a request ended. `str()` gives the OpenAI word.

    A request that is rejected found no room in the queue, one that is throttled none within its tenant's limit.
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2
    IGNORED = 3
    EXPIRED = 4
    ERROR = 5
    REJECTED = 6
    THROTTLED = 7

    def __str__(self) -> str:
        return _FINISH_WORDS[self]


_FINISH_WORDS = ("stop", "length", "abort", "ignored", "expired", "error", "rejected", "throttled")


class EventKind(enum.IntEnum):
    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2
    FIRST_TOKEN = 3


# frontend -> core


class EncoderInput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """An image, a sound or the like, in the place of the prompt's tokens [position, position + num_tokens).

    `num_tokens` 0 stands for the input of an encoder-decoder model, which the first token needs already. `size` is
    the number of embeddings that the encoder makes of `data`, which only the workers understand; equal
    `content_hash` (32 bytes) mean equal embeddings.
    """

    position: int
    num_tokens: int
    content_hash: bytes
    size: int
    data: bytes = b""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One sequence to generate.

    `request_index` is unique within its client. `block_hashes` are the digests of the prompt's full
    blocks (see `block_hash`), `root_hash` the parent of the first, both empty when prefix caching is off.
    `arrival_time` is the frontend's CLOCK_MONOTONIC in seconds. `sampling_params.max_tokens` is always
    set here. `request_id` is what clients know it by; several sequences may share one. `kv_transfer_params` are for the
    KV connector alone. `trace_headers` are the W3C trace context of the HTTP request, by header name.
    `predicted_token_ids` are what the client expects the output to be; the workers only draft from them.

    A request `is_resubmitted` when a core that had accepted it is gone, which may have known it as `was_index`. It goes
    on after `output_token_ids`, which its client has already, as one does that was preempted. One that `is_suspect` of
    having killed a worker or a core runs alone until its next token is there.
    """

    request_index: int
    prompt_token_ids: I32
    sampling_params: SamplingParams
    arrival_time: float
    eos_token_ids: tuple[int, ...] = ()
    block_hashes: bytes = b""
    root_hash: bytes = b""
    priority: int = 0
    tenant: str = ""
    deadline: float = 0.0
    request_id: str = ""
    kv_transfer_params: dict[str, object] | None = None
    lora_name: str = ""
    encoder_inputs: list[EncoderInput] = []
    output_token_ids: I32 = b""
    is_resubmitted: bool = False
    is_suspect: bool = False
    was_index: int = -1
    trace_headers: dict[str, str] | None = None
    predicted_token_ids: I32 = b""


class ClientHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """A frontend's answer to `CoreReady`, of the same epoch; anything before it is dropped.

    The `requests` are all that it has at this core. Those of an earlier connection are aborted, and blocks of an
    earlier core's requests with which none of them goes on are given up. Unless it `is_whole`, more requests follow in
    `AddRequests`, the last of which `ends_greeting`.
    """

    version: int
    epoch: int
    client_index: int
    requests: list[EngineCoreRequest] = []
    is_whole: bool = True


class AddRequests(msgspec.Struct, tag="add", array_like=True, gc=False, frozen=True):
    requests: list[EngineCoreRequest]
    ends_greeting: bool = False


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, gc=False, frozen=True):
    """Requests that lost their HTTP client, or in which the frontend found a stop string."""

    request_indices: I32


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True, gc=False, frozen=True):
    call_id: int
    reset_running_requests: bool = False


class DumpEventLog(msgspec.Struct, tag="dump", array_like=True, gc=False, frozen=True):
    """Write the scheduler's last events to a file. Its path is the detail of the answer."""

    call_id: int


class LossNoted(msgspec.Struct, tag="noted", array_like=True, gc=False, frozen=True):
    """Answer to `ReplicaLost`."""


ClientMessage: TypeAlias = (
    ClientHello | AddRequests | AbortRequests | ResetPrefixCache | DumpEventLog | LossNoted
)


# core -> frontend


class CoreReady(msgspec.Struct, tag="ready", array_like=True, gc=False, frozen=True):
    """What a core says first on each connection, once its workers can execute."""

    version: int
    epoch: int
    core_index: int
    num_blocks: int
    block_size: int


class FinishedRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """`stop_reason` is the stop token id, None for the end-of-sequence token.

    `kv_transfer_params` are the KV connector's, for the engine that fetches the request's blocks. For a request that
    was not admitted `retry_after_s` says how long the queue will take, 0.0 if that is not known. `trace_headers` are
    those that the request came with.
    """

    request_index: int
    reason: FinishReason
    stop_reason: int | None = None
    message: str = ""
    kv_transfer_params: dict[str, object] | None = None
    retry_after_s: float = 0.0
    trace_headers: dict[str, str] | None = None


class RequestEvent(NamedTuple):
    """A moment in a request's life. `num_cached_tokens` is meant at the first SCHEDULED only."""

    request_index: int
    kind: EventKind
    timestamp: float
    num_cached_tokens: int


class RequestEvents(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """A moment that several requests have in common: `request_indices` int32[N].

    `num_cached_tokens` int32[N] come with those that are SCHEDULED.
    """

    kind: EventKind
    timestamp: float
    request_indices: I32
    num_cached_tokens: I32 = b""

    def split(self) -> Iterator[RequestEvent]:
        """The event of each request."""
        indices = memoryview(self.request_indices).cast("i").tolist()
        num_cached = memoryview(self.num_cached_tokens).cast("i").tolist() or [0] * len(indices)
        for index, count in zip(indices, num_cached, strict=True):
            yield RequestEvent(index, self.kind, self.timestamp, count)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities of consecutive positions of one request.

    With n positions and k+1 entries each (the chosen token first, then the k most likely):
    `token_ids` int32[n, k+1], `logprobs` float32[n, k+1], `ranks` int32[n] (1-based rank of the chosen token).
    """

    request_index: int
    num_positions: int
    token_ids: I32
    logprobs: F32
    ranks: I32


class KVConnectorStats(msgspec.Struct, array_like=True, gc=False):
    """Counts since the last message with stats; queries and hits are in tokens, `counts` are the connector's own."""

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_failed_loads: int = 0
    num_expired_transfers: int = 0
    counts: dict[str, float] = {}


class SpecDecodingStats(msgspec.Struct, array_like=True, gc=False):
    """Counts since the last message with stats.

    `num_drafts` are verifications; `num_accepted_tokens_per_pos[i]` of them accepted more than i tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Gauges are values at the end of the step; the rest counts since the last message with stats.

    Of the `num_waiting` requests, `num_deferred` wait for a grammar or for blocks from elsewhere, not for room.
    `cpu_offload_hits` of the `prefix_cache_hits` tokens are in the host tier.
    `step_tokens` int32 are the tokens of each step that generated some: these, and the prompts whose first token is
    among them. `num_prompt_tokens` are those prompts. Of the preemptions, `num_block_preemptions` were for lack of
    blocks.

    The block times are float32 seconds of a sample of cached blocks: how long evicted ones lived, how long these had
    idled by then, and how long reused ones idled.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_corrupted_requests: int = 0
    num_dropped_frames: int = 0
    num_invariant_violations: int = 0
    kv_connector: KVConnectorStats | None = None
    spec_decoding: SpecDecodingStats | None = None
    cpu_offload_usage: float = 0.0
    num_blocks_copied_out: int = 0
    num_blocks_copied_in: int = 0
    block_lifetimes: F32 = b""
    block_idle_times: F32 = b""
    block_reuse_gaps: F32 = b""
    num_deferred: int = 0
    cpu_offload_hits: int = 0
    step_tokens: I32 = b""
    num_prompt_tokens: int = 0
    num_block_preemptions: int = 0


class EngineCoreOutputs(
    msgspec.Struct, tag="outputs", array_like=True, omit_defaults=True, gc=False
):
    """New tokens of one client's requests after one step.

    `request_indices` int32[N] and `token_ids` int32[sum]; `num_tokens` int32[N] says how many tokens each
    request got and is empty when each got one. `finished` requests produce nothing after this message.
    `finished_set` int32 lists every request of the client that ended since its last message, including those
    aborted by the client itself. `scheduler_times` float32 are the seconds that the scheduler spent while each of them
    was running; empty if they were not measured. `prediction_counts` int32[k, 3] are rows (request index, number of
    accepted tokens, number of rejected tokens) of the drafts that came from a client's prediction.
    """

    core_index: int
    sequence: int
    timestamp: float
    request_indices: I32 = b""
    token_ids: I32 = b""
    num_tokens: I32 = b""
    finished: list[FinishedRequest] = []
    events: list[RequestEvents] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    finished_set: I32 = b""
    stats: SchedulerStats | None = None
    scheduler_times: F32 = b""
    prediction_counts: I32 = b""


class CallResult(msgspec.Struct, tag="result", array_like=True, gc=False, frozen=True):
    """`detail` is what was asked for, or why it could not be done."""

    call_id: int
    ok: bool
    detail: str = ""


class ReplicaLost(msgspec.Struct, tag="lost", array_like=True, gc=False, frozen=True):
    """The last message of a core that has lost a worker or met an error of its own.

    Of the client's requests in the steps in flight `suspects` int32 had no token yet since they were admitted;
    `unsuspected` int32 had. An error that `is_own` may be due to any request, also to one in no step, and names nobody.
    """

    suspects: I32 = b""
    unsuspected: I32 = b""
    is_own: bool = False


class ReplicaLoadUpdate(
    msgspec.Struct, tag="update", array_like=True, omit_defaults=True, gc=False
):
    """What a frontend must know of a core to choose between several.

    `num_others` requests of other frontends are there. `stored` and `removed` are the keys of blocks that its prefix
    cache has got and lost (see `block_hash.block_keys`). If the news `is_whole`, `stored` is all that the cache has.
    """

    num_others: int
    stored: bytes = b""
    removed: bytes = b""
    is_whole: bool = False


CoreMessage: TypeAlias = (
    CoreReady | EngineCoreOutputs | CallResult | ReplicaLost | ReplicaLoadUpdate
)


# core -> worker


class CoreHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """What a core says first on each connection. The worker forgets every request, and answers `WorkerHello`."""

    version: int
    epoch: int


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that takes a slot: newly admitted, or resumed after preemption.

    `token_ids` int32 are all its tokens so far, the first `num_prompt_tokens` of them the prompt.
    `num_computed_tokens` of them are in the KV cache already. `block_ids` holds one int32 array a KV-cache group.
    With `arrival_time` the `request_id` is unique for ever, not only among live requests.
    `predicted_token_ids` int32 are the client's prediction of the output, a source of drafts.
    """

    slot: int
    request_id: tuple[int, int]
    token_ids: I32
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[I32, ...]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    lora_name: str = ""
    encoder_inputs: list[EncoderInput] = []
    arrival_time: float = 0.0
    predicted_token_ids: I32 = b""


class EncoderWork(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a step does to the encoder cache, before anything else is computed.

    The outputs of `freed_hashes` leave it, then those of the inputs `computed` int32[k, 2], rows (slot, index of the
    input), enter it, and of those `loaded` from elsewhere, of which `connector_metadata` tells.
    """

    freed_hashes: list[bytes] = []
    computed: I32 = b""
    loaded: I32 = b""
    connector_metadata: bytes = b""


class SchedulerOutput(msgspec.Struct, tag="step", array_like=True, omit_defaults=True, gc=False):
    """What changed, and what to execute. Apply in the order of the fields.

    `step` counts from 1. `removed_slots` int32 are free again. `new_requests` fill slots.
    `block_updates` int32[k, 4] set `block_table[group][slot, index] = block`, rows (group, slot, index, block); the
    null block, 0, replaces one that no later token sees.
    `slots` int32[S] is the batch in order, None when it is that of the previous step. Each slot computes one token,
    but for `chunks` int32[k, 2]: rows (position in the batch, number of tokens). A slot samples when its
    chunk reaches its last known token; the sampled token is appended by the worker itself.
    `grammar_slots` int32 lists the slots that sample only after this step's `GrammarOutput` has come.
    `kv_connector_metadata` is from the scheduler's half of the KV connector to the workers'.
    `drafts` int32[k, 2]: rows (position in the batch, number of drafts), drafts being the last tokens of such a chunk,
    to be verified. `draft_token_ids` int32 are theirs, empty when the worker is to take those that it proposed last,
    as many as there are: where these are fewer, so are the tokens of the chunk.
    The batch has its first `num_common_blocks` blocks in common, in the full-attention groups.
    Before anything is computed, `host_copies_out` int32[k, 2] copies blocks to host blocks, then `host_copies_in`
    int32[k, 2] host blocks to blocks.
    """

    step: int
    removed_slots: I32 = b""
    new_requests: list[NewRequestData] = []
    block_updates: I32 = b""
    slots: I32 | None = None
    chunks: I32 = b""
    grammar_slots: I32 = b""
    kv_connector_metadata: bytes = b""
    drafts: I32 = b""
    draft_token_ids: I32 = b""
    encoders: EncoderWork | None = None
    host_copies_out: I32 = b""
    host_copies_in: I32 = b""
    num_common_blocks: int = 0


class GrammarOutput(msgspec.Struct, tag="grammar", array_like=True, gc=False, frozen=True):
    """Allowed tokens of the step's `grammar_slots`, in that order: int32[…, ceil(vocab / 32)] bitmasks.

    A slot has one row, and one more for what follows each of its drafts. `forced` are tokens that its grammar expects
    to come next, of some slots: drafts for the steps after this one.
    """

    step: int
    bitmask: I32
    forced: DraftTokenIds | None = None


class AllocateKVCache(msgspec.Struct, tag="allocate", array_like=True, gc=False, frozen=True):
    num_blocks: int
    num_host_blocks: int = 0


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False, frozen=True):
    """The receiver exits with code 0."""


WorkerCommand: TypeAlias = CoreHello | SchedulerOutput | GrammarOutput | AllocateKVCache | Shutdown


# worker -> core


class WorkerHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """Answer to `CoreHello`, of the same epoch, once the model is loaded; anything before it is dropped."""

    version: int
    epoch: int
    rank: int


class WorkerMemory(msgspec.Struct, tag="memory", array_like=True, gc=False, frozen=True):
    """`num_blocks` KV-cache blocks, which the `groups` share, fit into this worker, or are there already.

    `num_host_blocks` blocks fit into the host tier, 0 without one.
    """

    rank: int
    num_blocks: int
    groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION
    num_host_blocks: int = 0


class HeldRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """What the KV cache holds of an earlier core's request: its first `num_computed_tokens` tokens, in `block_ids`.

    `request_id`, `arrival_time` and `block_ids` are as in `NewRequestData`, the blocks with all later changes.
    """

    request_id: tuple[int, int]
    arrival_time: float
    num_computed_tokens: int
    block_ids: tuple[I32, ...]


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, gc=False, frozen=True):
    """The KV cache is allocated; steps may follow, from number 1 on. `held` is what it has from an earlier core."""

    rank: int
    held: list[HeldRequest] = []


class RowLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """`TokenLogprobs` of the request in `slot`."""

    slot: int
    num_positions: int
    token_ids: I32
    logprobs: F32
    ranks: I32


class DraftTokenIds(
    msgspec.Struct, tag="drafts", array_like=True, omit_defaults=True, gc=False, frozen=True
):
    """Tokens proposed after those that step `step` has sampled.

    They come with the output of the step, or, without asynchronous scheduling, by themselves soon after it.
    `slots` int32[N], `num_tokens` int32[N], `token_ids` int32[sum].
    """

    step: int
    slots: I32 = b""
    num_tokens: I32 = b""
    token_ids: I32 = b""


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What the workers' half of the KV connector has to report, transfers by their id.

    `finished_sending` need their blocks no more. `finished_recving` end asynchronous loads, well or badly.
    `invalid_block_ids` int32 could not be loaded; they are named with or before the end of an asynchronous
    load, and with the step that a synchronous one belongs to.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: I32 = b""


class ModelRunnerOutput(
    msgspec.Struct, tag="output", array_like=True, omit_defaults=True, gc=False
):
    """The result of step `step`.

    `sampled_token_ids` int32 has one token for each batch row that sampled, in batch order; `num_sampled` int32
    gives another count a row when drafts were verified, and is empty otherwise; `num_verified` int32 is how many drafts
    of each row were, empty if all that were scheduled. `nan_slots` int32 had NaNs in their logits.
    `failed_slots` are rows for which no token can be chosen, with the reason: what was computed of them is good.
    `prediction_counts` int32[k, 3] are rows (slot, number of accepted drafts, number of rejected drafts) of the drafts
    that came from a client's prediction.
    """

    step: int
    sampled_token_ids: I32 = b""
    num_sampled: I32 = b""
    num_verified: I32 = b""
    logprobs: list[RowLogprobs] = []
    prompt_logprobs: list[RowLogprobs] = []
    nan_slots: I32 = b""
    failed_slots: list[tuple[int, str]] = []
    kv_connector_output: KVConnectorOutput | None = None
    drafts: DraftTokenIds | None = None
    prediction_counts: I32 = b""


WorkerMessage: TypeAlias = (
    WorkerHello | WorkerMemory | WorkerReady | ModelRunnerOutput | DraftTokenIds
)
