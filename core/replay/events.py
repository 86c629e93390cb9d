"""The inputs and decisions of a scheduler, as one struct per call.

An event is recorded before the scheduler handles it, so the last event may be the one that raised an error. Events of
steps also hold the decision, and the value of the `DecisionHash` after it, which is empty if the scheduler raised.
"""

from __future__ import annotations

from typing import Final, TypeAlias

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

HASH_BLOCKS: Final = "hash_blocks"
"""The name of the hash function in an `Answer`."""


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


class Answer(msgspec.Struct, tag=10, array_like=True, omit_defaults=True, gc=False):
    """An answer that the scheduler got from the method `call` of something outside of it, or the error that it raised.

    The scheduler asked while it handled the event before it in the log. `about` is the key or transfer id of a request
    (see `external.Ask`). For the hash function it is the number of blocks; in a file, numbers replace their digests.
    """

    call: str
    about: int | tuple[int, int]
    value: bool | int | bytes | tuple[int, bool] | None = None
    raised: bool = False


def without_tokens(drafts: DraftTokenIds) -> DraftTokenIds:
    """Return drafts with their tokens replaced by the number of tokens, an int32."""
    num_tokens = int32_bytes(len(drafts.token_ids) // 4)
    return msgspec.structs.replace(drafts, token_ids=num_tokens)


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
