"""The inputs and decisions of a scheduler, as one struct per call.

An event is recorded before the scheduler handles it, so the last event may be the one that raised an error. Events of
steps also hold the decision, and the value of the `DecisionHash` after it, which is empty if the scheduler raised.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...protocol.arrays import int32_bytes
from ...protocol.messages import (
    AppendInputs,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    RequestEvents,
)
from ...protocol.worker_messages import (
    DraftTokenIds,
    HeldRequest,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from ..state.request import RequestKey


class ClientReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The part of a client's outputs other than tokens: finished requests and request events."""

    client_index: int
    finished: list[FinishedRequest] = []
    finished_set: bytes = b""
    events: list[RequestEvents] = []


class AddClient(msgspec.Struct, tag=0, array_like=True, gc=False):
    """A call of `add_client`."""

    client_index: int


class FinishClient(msgspec.Struct, tag=1, array_like=True, gc=False):
    """A call of `finish_client`."""

    client_index: int


class AddRequest(msgspec.Struct, tag=2, array_like=True, gc=False):
    """A call of `add_request`.

    In a file, `message` has no prompt; `num_prompt_bytes` is its size, and zeros replace output and predicted tokens.
    """

    client_index: int
    message: EngineCoreRequest
    num_prompt_bytes: int
    now: float


class FinishRequests(msgspec.Struct, tag=3, array_like=True, gc=False):
    """A call of `finish_requests`."""

    keys: list[RequestKey]
    reason: FinishReason


class GrammarReady(msgspec.Struct, tag=4, array_like=True, gc=False):
    """A call of `grammar_ready`. `ok` is False if the grammar failed to compile."""

    key: RequestKey
    ok: bool


class ResetPrefixCache(msgspec.Struct, tag=5, array_like=True, gc=False):
    """A call of `reset_prefix_cache`."""

    reset_running_requests: bool
    now: float


class Schedule(msgspec.Struct, tag=6, array_like=True, omit_defaults=True, gc=False):
    """A call of `schedule` with the step that it returned.

    In a file, counts replace the tokens of `step` (see `redaction`).
    """

    now: float
    step: SchedulerOutput | None = None
    decision_hash: bytes = b""


class Update(msgspec.Struct, tag=7, array_like=True, omit_defaults=True, gc=False):
    """A call of `update_from_output` with `num_tokens` sampled tokens.

    After a flush, only the tokens at which some request stops are kept. `stops` holds int32 pairs (position, token).
    """

    now: float
    result: ModelRunnerOutput
    num_tokens: int = 0
    stops: bytes = b""
    reports: list[ClientReport] = []
    decision_hash: bytes = b""


class TakeOutputs(msgspec.Struct, tag=8, array_like=True, omit_defaults=True, gc=False):
    """A call of `take_outputs` that returned something."""

    now: float
    reports: list[ClientReport] = []
    decision_hash: bytes = b""


class MakeStats(msgspec.Struct, tag=9, array_like=True, gc=False):
    """A call of `make_stats`."""


class Hashed(msgspec.Struct, tag=10, array_like=True, gc=False):
    """The answer of the hash function: the digests of full blocks of output.

    Every `Answer` was given while the scheduler handled the event before it in the log.
    """

    digests: bytes


class GrammarRefused(msgspec.Struct, tag=11, array_like=True, gc=False):
    """The answer of a grammar that refused a token."""

    key: RequestKey


def without_tokens(drafts: DraftTokenIds) -> DraftTokenIds:
    """Return drafts with their tokens replaced by the number of tokens, an int32."""
    num_tokens = int32_bytes(len(drafts.token_ids) // 4)
    return msgspec.structs.replace(drafts, token_ids=num_tokens)


class GrammarAccepts(msgspec.Struct, tag=12, array_like=True, gc=False):
    """The answer of a grammar that allowed only the first `num_tokens` drafts."""

    key: RequestKey
    num_tokens: int


class GrammarForces(msgspec.Struct, tag=20, array_like=True, gc=False):
    """The answer of a grammar that forced the next `num_tokens` tokens."""

    key: RequestKey
    num_tokens: int


class Matched(msgspec.Struct, tag=14, array_like=True, omit_defaults=True, gc=False):
    """The answer of a KV connector: how many tokens it can load, or None if it cannot say yet."""

    transfer_id: int
    num_tokens: int | None
    is_async: bool = False


class DelaysFree(msgspec.Struct, tag=15, array_like=True, gc=False):
    """The answer of a KV connector that keeps the blocks of a finished request."""

    transfer_id: int


class CacheItemFound(msgspec.Struct, tag=16, array_like=True, gc=False):
    """The answer of an encoder-cache connector: whether it has the output of an encoder input."""

    transfer_id: int
    input_index: int
    found: bool


class ConnectorRaised(msgspec.Struct, tag=17, array_like=True, gc=False):
    """An error that the connector method `call` raised."""

    call: str
    transfer_id: int


class BlocksFound(msgspec.Struct, tag=25, array_like=True, gc=False):
    """The answer of a `BlockConnector`: a byte for each key, 1 if it can load the block, else 0; None if deferred."""

    transfer_id: int
    mask: bytes | None


class NeedsStep(msgspec.Struct, tag=26, array_like=True, gc=False):
    """The answer of a KV connector that has metadata for the workers."""


class ConnectorReport(msgspec.Struct, tag=27, array_like=True, gc=False):
    """A call of `update_from_connector`. The data for the connector is not recorded."""

    rank: int
    output: KVConnectorOutput
    now: float


class UpdateDrafts(msgspec.Struct, tag=13, array_like=True, gc=False):
    """A call of `update_draft_token_ids`. The number of tokens replaces the tokens."""

    drafts: DraftTokenIds


class AdoptBlocks(msgspec.Struct, tag=18, array_like=True, gc=False):
    """A call of `adopt_blocks`."""

    held: list[HeldRequest]


class EndAdoption(msgspec.Struct, tag=19, array_like=True, gc=False):
    """A call of `end_adoption`."""

    client_index: int


class LoraLoaded(msgspec.Struct, tag=21, array_like=True, gc=False):
    """A call of `lora_loaded`. `ok` is False if the adapter cannot be used."""

    number: int
    ok: bool


class InputsAppended(msgspec.Struct, tag=28, array_like=True, gc=False):
    """A call of `append_inputs`. Contents of media are not recorded."""

    client_index: int
    message: AppendInputs


Decided: TypeAlias = Schedule | Update | TakeOutputs
Answer: TypeAlias = (
    Hashed
    | GrammarRefused
    | GrammarAccepts
    | GrammarForces
    | Matched
    | DelaysFree
    | CacheItemFound
    | ConnectorRaised
    | BlocksFound
    | NeedsStep
)
Event: TypeAlias = (
    Decided
    | Answer
    | AddClient
    | FinishClient
    | AddRequest
    | FinishRequests
    | GrammarReady
    | ResetPrefixCache
    | MakeStats
    | UpdateDrafts
    | ConnectorReport
    | AdoptBlocks
    | EndAdoption
    | LoraLoaded
    | InputsAppended
)
