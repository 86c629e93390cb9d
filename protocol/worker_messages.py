"""Messages between a core and its workers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from .file_identity import LoraAdapter
from .kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from .messages import F32, I32, EncoderInput
from .pooling_params import PoolingParams
from .sampling_params import SamplingParams

# core -> worker


class CoreHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """A core's first message on each connection. The worker drops every request and answers `WorkerHello`."""

    version: int
    epoch: int


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that takes a slot: newly admitted, or resumed after preemption.

    `token_ids` int32 are all its tokens so far; the first `num_prompt_tokens` are the prompt, and the first
    `num_computed_tokens` are already in the KV cache. `block_ids` has one int32 array per KV-cache group. `request_id`
    is unique among live requests; together with `arrival_time` it is unique forever. `predicted_token_ids` int32 are
    the client's prediction of the output, a source of drafts. `lora_number` is that of the request's LoRA adapter,
    which is loaded, or -1. A request with `pooling_params` returns its pooled vector with the step that computes its
    last token.
    """

    slot: int
    request_id: tuple[int, int]
    token_ids: I32
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: tuple[I32, ...]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    lora_number: int = -1
    encoder_inputs: list[EncoderInput] = []
    arrival_time: float = 0.0
    predicted_token_ids: I32 = b""
    pooling_params: PoolingParams | None = None


class EncoderWork(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes to the encoder cache, which a step makes before it computes anything else.

    The outputs of `freed_hashes` are removed. Then the inputs `computed` int32[k, 2], rows (slot, index of the input),
    are encoded and added. Those in `loaded`, in the same format, are loaded by the connector as `connector_metadata`
    says.
    """

    freed_hashes: list[bytes] = []
    computed: I32 = b""
    loaded: I32 = b""
    connector_metadata: bytes = b""


class LoraLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Asks the workers to load a LoRA adapter. Answered by `LoraLoaded`.

    It replaces the adapter of this number, which no request uses. Requests use it only after the answers of all
    workers.
    """

    number: int
    adapter: LoraAdapter


class SchedulerOutput(msgspec.Struct, tag="step", array_like=True, omit_defaults=True, gc=False):
    """One step: what changed since the previous step, and what to execute.

    The fields are applied in their order, except that `encoders` and the host copies come before anything is computed.

    * `step` counts from 1.
    * `removed_slots` int32 are free again.
    * `new_requests` fill slots.
    * `block_updates` int32[k, 4], rows (group, slot, index, block), set `block_table[group][slot, index] = block`. The
      null block 0 replaces a block that no later token sees.
    * `slots` int32[S] is the batch in order, None if it is that of the previous step. Each slot computes one token,
      except those in `chunks`. A slot samples if its chunk reaches its last known token; the worker appends the sampled
      token.
    * `chunks` int32[k, 2] are rows (position in the batch, number of tokens).
    * `grammar_slots` int32 sample only after this step's `GrammarOutput` has arrived.
    * `kv_connector_metadata` is from the scheduler's half of the KV connector to the workers' half.
    * `drafts` int32[k, 2] are rows (position in the batch, number of drafts). The drafts are the last tokens of such a
      chunk and are to be verified.
    * `draft_token_ids` int32 are these drafts. If it is empty, the worker takes the drafts that it proposed last; if it
      has fewer, the chunk is shorter.
    * `draft_limits` int32[k, 2], rows (slot, limit), set how many drafts the worker proposes for a slot after this step
      and the following ones. A new request has the configured maximum.
    * `host_copies_out` int32[k, 2] copies blocks to host blocks; then `host_copies_in` int32[k, 2] copies host blocks
      to blocks.
    * `num_common_blocks` first blocks are shared by the whole batch in the full-attention groups.
    * `lora_loads` are begun by this step, which does not wait for them.
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
    lora_loads: list[LoraLoad] = []
    draft_limits: I32 = b""


class GrammarOutput(msgspec.Struct, tag="grammar", array_like=True, gc=False, frozen=True):
    """Bitmasks of the allowed tokens of the step's `grammar_slots`, in that order: int32[…, ceil(vocab / 32)].

    Each slot has one row, plus one row after each of its drafts. `forced` are tokens that grammars force next for some
    slots; they are drafts for the following steps.
    """

    step: int
    bitmask: I32
    forced: DraftTokenIds | None = None


class AllocateKVCache(msgspec.Struct, tag="allocate", array_like=True, gc=False, frozen=True):
    """Asks a worker to allocate its KV cache. Answered by `WorkerReady`."""

    num_blocks: int
    num_host_blocks: int = 0


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False, frozen=True):
    """Asks a worker to exit with code 0."""


WorkerCommand: TypeAlias = CoreHello | SchedulerOutput | GrammarOutput | AllocateKVCache | Shutdown


# worker -> core


class WorkerHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """The answer to `CoreHello`, with the same epoch, once the model is loaded. Messages before it are dropped."""

    version: int
    epoch: int
    rank: int


class WorkerMemory(msgspec.Struct, tag="memory", array_like=True, gc=False, frozen=True):
    """The memory of a worker: `num_blocks` KV-cache blocks, shared by the `groups`, fit or are allocated.

    `num_host_blocks` blocks fit into the CPU KV offload; 0 without one. `num_cores` processor cores compute the
    worker's steps; 1 on a GPU.
    """

    rank: int
    num_blocks: int
    groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION
    num_host_blocks: int = 0
    num_cores: int = 1


class HeldRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The KV cache of an earlier core's request: its first `num_computed_tokens` tokens, in `block_ids`.

    `request_id`, `arrival_time` and `block_ids` are as in `NewRequestData`, with all later block updates applied.
    """

    request_id: tuple[int, int]
    arrival_time: float
    num_computed_tokens: int
    block_ids: tuple[I32, ...]


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, gc=False, frozen=True):
    """The KV cache is allocated, so steps may follow, starting with number 1.

    `held` are the requests of an earlier core.
    """

    rank: int
    held: list[HeldRequest] = []


class LoraLoaded(msgspec.Struct, tag="lora", array_like=True, gc=False, frozen=True):
    """The answer to a `LoraLoad`. If there is an `error`, the adapter cannot be used."""

    rank: int
    number: int
    error: str = ""


class RowLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The `TokenLogprobs` of the request in `slot`."""

    slot: int
    num_positions: int
    token_ids: I32
    logprobs: F32
    ranks: I32


class RowVector(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The `PooledVector` of the request in `slot`."""

    slot: int
    vector: F32


class DraftTokenIds(
    msgspec.Struct, tag="drafts", array_like=True, omit_defaults=True, gc=False, frozen=True
):
    """Tokens proposed after those that step `step` sampled.

    They arrive with the output of the step or, without asynchronous scheduling, separately soon after it.

    Shapes:
        slots: int32[N]
        num_tokens: int32[N]
        token_ids: int32[sum of num_tokens]
    """

    step: int
    slots: I32 = b""
    num_tokens: I32 = b""
    token_ids: I32 = b""


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The report of the workers' half of the KV connector. Transfers are identified by their id.

    `finished_sending` no longer need their blocks. `finished_recving` are asynchronous loads that ended, with or
    without success. `invalid_block_ids` int32 could not be loaded. For an asynchronous load they are reported with its
    end or before, for a synchronous one with its step. `data` is for the scheduler's half alone.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: I32 = b""
    data: bytes = b""


class KVConnectorReport(msgspec.Struct, tag="kv", array_like=True, gc=False, frozen=True):
    """A report of one worker's half of the KV connector that belongs to no step. It is sent at any time.

    A transfer has ended when every worker has reported its end.
    """

    rank: int
    output: KVConnectorOutput


class ModelRunnerOutput(
    msgspec.Struct, tag="output", array_like=True, omit_defaults=True, gc=False
):
    """The result of step `step`.

    `sampled_token_ids` int32 has one token per batch row that sampled, in batch order. If drafts were verified,
    `num_sampled` int32 has the number of tokens per row; otherwise it is empty. `num_verified` int32 is the number of
    verified drafts per row, empty if all scheduled drafts were verified. `nan_slots` int32 had NaNs in their logits.
    `failed_slots` are (slot, reason) of rows for which no token can be chosen; their computed KV entries are valid.
    `prediction_counts` int32[k, 3] are rows (slot, accepted drafts, rejected drafts) of drafts from a client's
    prediction. Rows with `pooling_params` sample token 0, and their vectors are `pooled`. With drafts, `seconds` is the
    time that the step took, without the `draft_seconds` of a draft model, each of whose `draft_passes` proposed a token
    for some rows; all are 0 if they were not measured.
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
    pooled: list[RowVector] = []
    seconds: float = 0.0
    draft_seconds: float = 0.0
    draft_passes: int = 0


WorkerMessage: TypeAlias = (
    WorkerHello
    | WorkerMemory
    | WorkerReady
    | ModelRunnerOutput
    | DraftTokenIds
    | LoraLoaded
    | KVConnectorReport
)
