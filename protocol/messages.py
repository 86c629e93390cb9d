"""Messages between frontends and cores.

Arrays travel as raw little-endian bytes (see `arrays`); `I32` and `F32` name their element types. Structs are encoded
as msgpack arrays, so a field may be appended but never moved; `PROTOCOL_VERSION` guards all other changes. Only
`SamplingParams` are encoded as a map. A *slot* is a running request's row in the scheduler and in the workers' batch.
"""

import enum
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import msgspec

from .encoder_inputs.inputs import EncoderInput
from .file_identity import LoraAdapter
from .pooling_params import PoolingParams
from .sampling_params import SamplingParams

I32: TypeAlias = bytes
F32: TypeAlias = bytes


class FinishReason(enum.IntEnum):
    """The reason why a request ended. `str()` returns OpenAI's name for it.

    REPETITION: the output repeated itself (`SamplingParams.repetition_detection`). REJECTED: the queue was full.
    THROTTLED: the tenant's limit was reached. MOVED: the request continues at another replica; clients never see this.
    """

    STOP = 0
    LENGTH = 1
    ABORT = 2
    IGNORED = 3
    EXPIRED = 4
    ERROR = 5
    REJECTED = 6
    THROTTLED = 7
    MOVED = 8
    REPETITION = 9

    def __str__(self) -> str:
        """Return OpenAI's name for the reason."""
        return self.name.lower()


class EventKind(enum.IntEnum):
    """The kinds of events in a request's life."""

    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2
    FIRST_TOKEN = 3
    PROGRESS = 4


# Frontend -> core


class PauseState(enum.IntEnum):
    """The pause of a core. FINISHING: requests that arrived before the pause are computed. PAUSED: nothing is."""

    RUNNING = 0
    FINISHING = 1
    PAUSED = 2


class PauseMode(enum.StrEnum):
    """The treatment of unfinished requests when a core is paused, under vLLM's names.

    ABORT ends them, WAIT finishes them first, and KEEP continues them after the pause.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request to generate one sequence or, with `pooling_params`, to pool the hidden states of its prompt."""

    request_index: int
    """The number of the request, unique within its client."""
    prompt_token_ids: I32
    """The tokens of the prompt."""
    sampling_params: SamplingParams
    """The sampling parameters, in which `max_tokens` is always set."""
    arrival_time: float
    """The frontend's CLOCK_MONOTONIC in seconds."""
    eos_token_ids: tuple[int, ...] = ()
    """The tokens that end the sequence, unless `ignore_eos` is set."""
    block_hashes: bytes = b""
    """The digests of the prompt's full blocks (see `block_hash`); empty if prefix caching is off."""
    root_hash: bytes = b""
    """The parent of the first digest; empty if prefix caching is off."""
    priority: int = 0
    """The priority; smaller values are scheduled first."""
    tenant: str = ""
    """The tenant whose limit and whose share of the server apply."""
    deadline: float = 0.0
    """The time by which the request must end, on the clock of `arrival_time`; 0.0 for none."""
    request_id: str = ""
    """The id that clients see. Several sequences may share one."""
    kv_transfer_params: dict[str, object] | None = None
    """Parameters that only the KV connector reads."""
    lora: LoraAdapter | None = None
    """The adapter, or None for the base model."""
    encoder_inputs: list[EncoderInput] = []
    """The images, audio clips and similar inputs, by position."""
    output_token_ids: I32 = b""
    """Output that the client already has. The request continues after it, like one that was preempted."""
    is_resubmitted: bool = False
    """True if a core that had accepted the request has failed."""
    is_suspect: bool = False
    """True if the request may have crashed a worker or a core. It runs alone until its next token."""
    was_index: int = -1
    """The `request_index` by which the failed core may have known the request; -1 for none."""
    trace_headers: dict[str, str] | None = None
    """The W3C trace context of the HTTP request, by header name."""
    predicted_token_ids: I32 = b""
    """The output that the client expects, from which workers draft."""
    pooling_params: PoolingParams | None = None
    """If not None, hidden states of the prompt are pooled in this way; `max_tokens` is 1, its token has no meaning."""
    delivery_times: F32 = b""
    """Seconds from outputs of steps to their writes to clients before this request, recorded for `engine simulate`."""
    is_open: bool = False
    """True if more encoder inputs follow in `AppendInputs`. No token is computed before the input at its position."""
    is_warm_up: bool = False
    """True if a frontend sent the request for itself, before it is ready. Metrics do not count it."""


class ClientHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """A frontend's answer to `CoreReady`, with the same epoch. The core drops earlier messages.

    `requests` are all requests of the frontend at this core. Others of earlier connections are aborted, and unclaimed
    blocks of an earlier core are freed. Unless `is_whole`, more requests follow in `AddRequests`, the last of which has
    `ends_greeting`. `pause` is the last pause that a core reported.
    """

    version: int
    epoch: int
    client_index: int
    requests: list[EngineCoreRequest] = []
    is_whole: bool = True
    pause: PauseState = PauseState.RUNNING


class AddRequests(msgspec.Struct, tag="add", array_like=True, gc=False, frozen=True):
    """New requests of a frontend."""

    requests: list[EngineCoreRequest]
    ends_greeting: bool = False


class AppendInputs(msgspec.Struct, tag="append", array_like=True, gc=False, frozen=True):
    """Further encoder inputs of an open request. If `is_last`, none follow, and their tokens limit the output."""

    request_index: int
    inputs: list[EncoderInput]
    is_last: bool


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, gc=False, frozen=True):
    """Abort requests that lost their HTTP client, or in which the frontend found a stop string.

    If `are_moved`, they continue at another replica, which fetches their blocks. A core sends it for invalid ones.
    """

    request_indices: I32
    are_moved: bool = False


class ResetPrefixCache(msgspec.Struct, tag="reset", array_like=True, gc=False, frozen=True):
    """Remove all cached prefixes. Answered by `CallResult`."""

    call_id: int
    reset_running_requests: bool = False


class DumpEventLog(msgspec.Struct, tag="dump", array_like=True, gc=False, frozen=True):
    """Write the event log to a file, whose path is the `detail` of the `CallResult`."""

    call_id: int


class DescribeBlocks(msgspec.Struct, tag="blocks", array_like=True, gc=False, frozen=True):
    """Returns the `BlockState` of every N-th KV-cache block in `detail`; N keeps it within `MAX_BLOCK_CELLS`."""

    call_id: int


class AbortByID(msgspec.Struct, tag="abort-id", array_like=True, gc=False, frozen=True):
    """Abort the requests of all frontends that have this ID, or all if it is ""; their number is the `detail`."""

    call_id: int
    request_id: str


class EndReasoning(msgspec.Struct, tag="end", array_like=True, gc=False, frozen=True):
    """End the reasoning of a running answer of another frontend, to which the core relays this call."""

    call_id: int
    owner: str
    answer_id: str


class PauseGeneration(msgspec.Struct, tag="pause", array_like=True, gc=False, frozen=True):
    """Pause the core. Answered by `CallResult` when nothing is computed any more.

    With `clear_cache`, all cached prefixes are removed then, except with KEEP. Requests that arrive later wait.
    """

    call_id: int
    mode: PauseMode
    clear_cache: bool = True


class ResumeGeneration(msgspec.Struct, tag="resume", array_like=True, gc=False, frozen=True):
    """Resume a paused core. Answered by `CallResult`."""

    call_id: int


class CallResult(msgspec.Struct, tag="result", array_like=True, gc=False, frozen=True):
    """The result of a call. `detail` is the requested value, or the reason for a failure."""

    call_id: int
    ok: bool
    detail: str = ""


class PrepareGrammars(msgspec.Struct, tag="grammars", array_like=True, gc=False, frozen=True):
    """Load what grammars need, because a request with a grammar may follow. Not answered."""


class LossNoted(msgspec.Struct, tag="noted", array_like=True, gc=False, frozen=True):
    """Confirms a `ReplicaLost`."""


ReplicaCall: TypeAlias = (
    ResetPrefixCache
    | DumpEventLog
    | DescribeBlocks
    | AbortByID
    | EndReasoning
    | PauseGeneration
    | ResumeGeneration
)
"""Messages that are answered by `CallResult`."""

ClientMessage: TypeAlias = (
    ClientHello
    | AddRequests
    | AppendInputs
    | AbortRequests
    | ReplicaCall
    | CallResult
    | PrepareGrammars
    | LossNoted
)


# Core -> frontend


class CoreReady(msgspec.Struct, tag="ready", array_like=True, gc=False, frozen=True):
    """A core's first message on each connection, once its workers can execute.

    `max_concurrency` is the number of requests of `max_model_len` tokens whose blocks fit into the KV cache.
    `weights` are the `weights_id` and the `weight_version` of `ModelConfig`.
    """

    version: int
    epoch: int
    core_index: int
    num_blocks: int
    block_size: int
    max_concurrency: float = 0.0
    pause: PauseState = PauseState.RUNNING
    weights: tuple[str, str] = ("", "")


class PauseUpdate(msgspec.Struct, tag="paused", array_like=True, gc=False, frozen=True):
    """The pause of a core has changed, or differs from that of a `ClientHello`."""

    state: PauseState


class FinishedRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The end of a request.

    `stop_reason` is the stop token, or None for an end-of-sequence token. `kv_transfer_params` come from the KV
    connector, for the engine that will fetch the request's blocks. `retry_after_s` is the expected queue time in
    seconds of a request that was not admitted, or 0.0 if unknown. `trace_headers` came with the request.
    """

    request_index: int
    reason: FinishReason
    stop_reason: int | None = None
    message: str = ""
    kv_transfer_params: dict[str, object] | None = None
    retry_after_s: float = 0.0
    trace_headers: dict[str, str] | None = None


class RequestEvent(NamedTuple):
    """An event in a request's life. The numbers of tokens are set only at the first SCHEDULED and for PROGRESS."""

    request_index: int
    kind: EventKind
    timestamp: float
    num_cached_tokens: int
    num_loaded_tokens: int = 0


class RequestEvents(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """The same event of several requests, `request_indices` int32[N].

    `num_cached_tokens` int32[N] is set for SCHEDULED, and for PROGRESS, where it counts all computed tokens.
    `num_loaded_tokens` int32[N] says how many of these a KV connector loaded; it is empty if none was loaded.
    """

    kind: EventKind
    timestamp: float
    request_indices: I32
    num_cached_tokens: I32 = b""
    num_loaded_tokens: I32 = b""

    def split(self) -> Iterator[RequestEvent]:
        """Yield the event of each request."""
        indices = memoryview(self.request_indices).cast("i").tolist()
        num_cached = memoryview(self.num_cached_tokens).cast("i").tolist() or [0] * len(indices)
        num_loaded = memoryview(self.num_loaded_tokens).cast("i").tolist() or [0] * len(indices)
        for index, cached, loaded in zip(indices, num_cached, num_loaded, strict=True):
            yield RequestEvent(index, self.kind, self.timestamp, cached, loaded)


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities for n consecutive positions of one request.

    Each position has k+1 entries: the chosen token first, then the k most likely ones.

    Shapes:
        token_ids: int32[n, k+1]
        logprobs: float32[n, k+1]
        ranks: int32[n], the 1-based rank of the chosen token.
    """

    request_index: int
    num_positions: int
    token_ids: I32
    logprobs: F32
    ranks: I32


class PooledVector(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The result of a request with `pooling_params`, float32[D], or hidden states from position `first` on."""

    request_index: int
    vector: F32
    first: int = 0


class KVConnectorStats(msgspec.Struct, array_like=True, gc=False):
    """Counts of a KV connector since the last message with statistics.

    Queries and hits are in tokens. `counts` are additional ones that the connector names.
    """

    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_failed_loads: int = 0
    num_expired_transfers: int = 0
    counts: dict[str, float] = {}


class SpecDecodingStats(msgspec.Struct, array_like=True, gc=False):
    """Counts of speculative decoding since the last message with statistics.

    `num_drafts` counts verifications. `num_accepted_tokens_per_pos[i]` is how many of them accepted more than i tokens.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Statistics of a core: gauges at the end of the step, and counts since the last message with statistics.

    `num_waiting` includes `num_deferred` requests that wait for a grammar or for external blocks, not for capacity.
    `prefix_cache_hits` includes `cpu_offload_hits`, the tokens from the CPU KV offload. `step_tokens` int32 has one
    entry per step that generated tokens: their number, plus the prompt tokens of requests that got their first token.
    `num_prompt_tokens` counts only these prompt tokens. `num_block_preemptions` is the number of preemptions for lack
    of blocks. `running_loras` and `waiting_loras` are the sorted names of adapters of running and waiting requests.
    Block times are float32 seconds of sampled blocks: lifetimes and idle times of evicted ones, idle times of reused.
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
    running_loras: list[str] = []
    waiting_loras: list[str] = []


class EngineCoreOutputs(
    msgspec.Struct, tag="outputs", array_like=True, omit_defaults=True, gc=False
):
    """New tokens and events of one client's requests after one step.

    `request_indices` is int32[N] and `token_ids` int32[sum]. `num_tokens` int32[N] is the number of tokens per request,
    empty if each got one. `finished` requests produce nothing after this message. `finished_set` int32 lists every
    request of the client that ended since its last message, including those that the client aborted.

    `scheduler_times` float32[N] are the seconds that the scheduler spent while each request was running. `core_times`
    float32[N] are the seconds of CPU cores, or of GPUs, that its tokens took. Both are empty if they were not measured.
    `prediction_counts` int32[k, 3] are rows (request index, accepted tokens, rejected tokens) of a client's prediction.
    `draft_counts` int32[k, 2] are rows (request index, verified drafts).
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
    pooled: list[PooledVector] = []
    core_times: F32 = b""
    draft_counts: I32 = b""


class ReplicaLost(msgspec.Struct, tag="lost", array_like=True, gc=False, frozen=True):
    """The last message of a core that lost a worker or failed itself.

    It lists the client's requests in the steps in flight: `suspects` int32 had no token since their admission, and
    `unsuspected` int32 had one. If `is_own`, the error occurred in the core, so any may be at fault and none is listed.
    """

    suspects: I32 = b""
    unsuspected: I32 = b""
    is_own: bool = False


class ReplicaLoadUpdate(
    msgspec.Struct, tag="update", array_like=True, omit_defaults=True, gc=False
):
    """The load and cache content of a core, by which a frontend chooses between cores.

    `num_others` counts the requests of other frontends. `stored` and `removed` are keys of blocks that entered and left
    the prefix cache, and of LoRA adapters that the workers loaded and replaced (see `block_hash.block_keys` and
    `adapter_key`). If `is_whole`, `stored` lists all keys.
    """

    num_others: int
    stored: bytes = b""
    removed: bytes = b""
    is_whole: bool = False


CoreMessage: TypeAlias = (
    CoreReady
    | PauseUpdate
    | EngineCoreOutputs
    | AbortRequests
    | CallResult
    | EndReasoning
    | ReplicaLost
    | ReplicaLoadUpdate
)
