"""Messages between a core and its workers."""

from typing import TypeAlias

import msgspec

from .encoder_inputs.inputs import EncoderInput
from .file_identity import LoraAdapter
from .kv_cache_groups import FULL_ATTENTION, KVCacheGroup
from .messages import F32, I32
from .pooling_params import PoolingParams
from .sampling_params import SamplingParams

# Core -> worker


class CoreHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """A core's first message on each connection. The worker drops all its requests and answers with `WorkerHello`."""

    version: int
    epoch: int


class NewRequestData(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A request that gets a slot: newly admitted, or resumed after preemption.

    `token_ids` int32 are all its tokens so far; the first `num_prompt_tokens` are the prompt, and the first
    `num_computed_tokens` are already in the KV cache. `block_ids` has one int32 array per KV-cache group. `request_id`
    is unique among live requests, and unique forever together with `arrival_time`. `predicted_token_ids` int32 are the
    client's prediction of the output, a source of drafts. `lora_number` is the number of the request's LoRA adapter,
    which has been loaded, or -1. A request with `pooling_params` returns its pooled vector with the step that computes
    its last token.
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
    are encoded and their outputs added. The inputs `loaded`, in the same format, are not encoded: the connector loads
    their outputs according to `connector_metadata`. Before all that, the inputs of slots are `appended` to those that
    they have.
    """

    freed_hashes: list[bytes] = []
    computed: I32 = b""
    loaded: I32 = b""
    connector_metadata: bytes = b""
    appended: list[tuple[int, list[EncoderInput]]] = []


class LoraLoad(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Load a LoRA adapter. Answered by `LoraLoaded`.

    It replaces the adapter with the same number, which no request uses. Requests use the new one only after the answers
    of all workers.
    """

    number: int
    adapter: LoraAdapter


class CheckedLoad(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Blocks of one KV-cache group that a connector loads, and that must contain only finite numbers.

    An asynchronous load is checked when transfer `transfer_id` ends. A synchronous one has no transfer id, and is
    checked before the step is computed.
    """

    block_ids: I32
    transfer_id: int | None = None
    group: int = 0


class SchedulerOutput(msgspec.Struct, tag="step", array_like=True, omit_defaults=True, gc=False):
    """One step: what changed since the previous step, and what to execute.

    Workers apply the fields in their order, except that `encoders` and the host copies come before anything is
    computed.

    * `step` counts from 1.
    * `removed_slots` int32 are free again.
    * `new_requests` fill slots.
    * `block_updates` int32[k, 4], rows (group, slot, index, block), set `block_table[group][slot, index] = block`. The
      null block 0 replaces a block that no later token needs.
    * `slots` int32[S] is the batch in order; None if it has not changed. Each slot computes one token, except those in
      `chunks`. A slot samples a token if its chunk reaches its last known token; the worker appends the sampled token.
    * `chunks` int32[k, 2] are rows (position in the batch, number of tokens). In a block-diffusion model, a chunk that
      passes the last known token ends with the block that the slot denoises.
    * `grammar_slots` int32 sample only after this step's `GrammarOutput` has arrived.
    * `kv_connector_metadata` is from the scheduler side of the KV connector to the worker side.
    * `drafts` int32[k, 2] are rows (position in the batch, number of drafts). The drafts are the last tokens of that
      slot's chunk, and are to be verified.
    * `draft_token_ids` int32 are these drafts. If it is empty, the worker takes the drafts that it proposed last; if
      there are fewer of them, the chunk is shorter.
    * `draft_limits` int32[k, 1 + levels], rows (slot, limit of each level of confidence), set how many drafts the
      worker proposes for a slot from this step on. A new request starts with the configured maximum.
    * `host_copies_out` int32[k, 2] copies blocks to host blocks; then `host_copies_in` int32[k, 2] copies host blocks
      to blocks.
    * `num_common_blocks` is the number of first blocks that the whole batch shares in the full-attention groups.
    * `lora_loads` are started by this step, which does not wait for them.
    * `cleared_blocks` int32 are filled with zeros before anything else, because loads that failed may have written NaN.
    * `checked_loads` are the loads that this step starts, if the connector may report success although it wrote NaN.
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
    cleared_blocks: I32 = b""
    checked_loads: list[CheckedLoad] = []


class GrammarOutput(msgspec.Struct, tag="grammar", array_like=True, gc=False, frozen=True):
    """Bitmasks of the allowed tokens for the step's `grammar_slots`, in that order: int32[rows, ceil(vocab / 32)].

    Each slot has one row, plus one row after each of its drafts. `forced` are tokens that grammars force next for some
    slots; they become drafts of the following steps.
    """

    step: int
    bitmask: I32
    forced: "DraftTokenIds | None" = None


class AllocateKVCache(msgspec.Struct, tag="allocate", array_like=True, gc=False, frozen=True):
    """Allocate the KV cache. Answered by `WorkerReady`."""

    num_blocks: int
    num_host_blocks: int = 0


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, gc=False, frozen=True):
    """Exit with code 0."""


WorkerCommand: TypeAlias = CoreHello | SchedulerOutput | GrammarOutput | AllocateKVCache | Shutdown


# Worker -> core


class WorkerHello(msgspec.Struct, tag="hello", array_like=True, gc=False, frozen=True):
    """The answer to `CoreHello`, with the same epoch, once the model is loaded. The core drops earlier messages."""

    version: int
    epoch: int
    rank: int


class WorkerMemory(msgspec.Struct, tag="memory", array_like=True, gc=False, frozen=True):
    """The memory of a worker: `num_blocks` KV-cache blocks, shared by the `groups`, fit or are allocated.

    `num_host_blocks` blocks fit into the CPU KV offload; 0 without one. `num_cores` CPU cores compute the worker's
    steps; 1 on a GPU.
    """

    rank: int
    num_blocks: int
    groups: tuple[KVCacheGroup, ...] = FULL_ATTENTION
    num_host_blocks: int = 0
    num_cores: int = 1


class HeldRequest(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The KV cache of a request of an earlier core: its first `num_computed_tokens` tokens are in `block_ids`.

    `request_id`, `arrival_time` and `block_ids` are as in `NewRequestData`, with all later block updates applied.
    """

    request_id: tuple[int, int]
    arrival_time: float
    num_computed_tokens: int
    block_ids: tuple[I32, ...]


class WorkerReady(msgspec.Struct, tag="ready", array_like=True, gc=False, frozen=True):
    """The KV cache is allocated, so steps may follow, starting with number 1.

    `held` are the requests of an earlier core whose KV cache this worker still has.
    """

    rank: int
    held: list[HeldRequest] = []


class LoraLoaded(msgspec.Struct, tag="lora", array_like=True, gc=False, frozen=True):
    """The answer to a `LoraLoad`. If `error` is set, the adapter cannot be used."""

    rank: int
    number: int
    error: str = ""


class RowLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Log-probabilities of the request in `slot`, with the fields of `TokenLogprobs`."""

    slot: int
    num_positions: int
    token_ids: I32
    logprobs: F32
    ranks: I32


class RowVector(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The pooled vector, or hidden states, of the request in `slot`, as in `PooledVector`."""

    slot: int
    vector: F32
    first: int = 0


class DraftTokenIds(
    msgspec.Struct, tag="drafts", array_like=True, omit_defaults=True, gc=False, frozen=True
):
    """Drafts that follow the tokens sampled by step `step`.

    They arrive with the output of the step or, without asynchronous scheduling, separately soon after it.

    Shapes:
        slots: int32[N]
        num_tokens: int32[N]
        token_ids: int32[sum of num_tokens]
        levels: int32[N], how confident the worker is, from 0 to `SpeculativeConfig.num_levels` - 1; empty if all are 0
    """

    step: int
    slots: I32 = b""
    num_tokens: I32 = b""
    token_ids: I32 = b""
    levels: I32 = b""


class KVConnectorOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A report of the worker side of the KV connector, which identifies transfers by their id.

    `finished_sending` lists transfers that no longer need their blocks. `finished_recving` lists asynchronous loads
    that ended, with or without success. `invalid_block_ids` int32 are blocks that could not be loaded. For an
    asynchronous load they are reported before or with its end, for a synchronous one with its step. `data` is read only
    by the scheduler side.
    """

    finished_sending: list[int] = []
    finished_recving: list[int] = []
    invalid_block_ids: I32 = b""
    data: bytes = b""


class KVConnectorReport(msgspec.Struct, tag="kv", array_like=True, gc=False, frozen=True):
    """A report of the KV connector in one worker, without a step output. It may be sent at any time.

    A transfer has ended when every worker has reported its end.
    """

    rank: int
    output: KVConnectorOutput


class ModelRunnerOutput(
    msgspec.Struct, tag="output", array_like=True, omit_defaults=True, gc=False
):
    """The result of step `step`.

    * `sampled_token_ids` int32 has one token per batch row that sampled, in batch order. Rows with `pooling_params`
      sample token 0.
    * `num_sampled` int32 has the number of tokens per row if drafts were verified or blocks denoised; otherwise it is
      empty. A row whose block still has masks has none.
    * `num_verified` int32 is the number of verified drafts per row; empty if all scheduled drafts were verified.
    * `nan_slots` int32 had NaNs in their logits.
    * `failed_slots` are pairs (slot, reason) for rows in which no token can be chosen. Their computed KV entries are
      valid.
    * `prediction_counts` int32[k, 3] are rows (slot, accepted drafts, rejected drafts) of drafts from a client's
      prediction.
    * `pooled` has the vectors of rows with `pooling_params`, and the states of those with `returned_states`.
    * `seconds` is the duration of the step without the draft model, and `draft_seconds` that of the draft model.
    * `draft_passes` is the number of forward passes of the draft model. Each proposed one token, or all, for some of
      the rows.

    The last three are 0 if they were not measured.
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
