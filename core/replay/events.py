"""What a scheduler is told, one struct a call, and what followed from it.

Those of a step also hold what was decided, and the value of the `DecisionHash` afterwards. They are written down
before the scheduler hears of them, so that the last one may be what brought it down: its chain is empty.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from ...protocol.arrays import int32_bytes
from ...protocol.messages import (
    DraftTokenIds,
    EngineCoreRequest,
    FinishedRequest,
    FinishReason,
    HeldRequest,
    ModelRunnerOutput,
    RequestEvents,
    SchedulerOutput,
)
from ..state.request import RequestKey


class ClientReport(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one client is told beside tokens."""

    client_index: int
    finished: list[FinishedRequest] = []
    finished_set: bytes = b""
    events: list[RequestEvents] = []


class AddClient(msgspec.Struct, tag=0, array_like=True, gc=False):
    client_index: int


class FinishClient(msgspec.Struct, tag=1, array_like=True, gc=False):
    client_index: int


class AddRequest(msgspec.Struct, tag=2, array_like=True, gc=False):
    """A request that arrived.

    In a file `message` has zeros for output and predicted tokens, and no prompt, only its length `num_prompt_bytes`.
    """

    client_index: int
    message: EngineCoreRequest
    num_prompt_bytes: int
    now: float


class FinishRequests(msgspec.Struct, tag=3, array_like=True, gc=False):
    keys: list[RequestKey]
    reason: FinishReason


class GrammarReady(msgspec.Struct, tag=4, array_like=True, gc=False):
    key: RequestKey
    ok: bool


class ResetPrefixCache(msgspec.Struct, tag=5, array_like=True, gc=False):
    reset_running_requests: bool
    now: float


class Schedule(msgspec.Struct, tag=6, array_like=True, omit_defaults=True, gc=False):
    """In a file `step` is without tokens, but for their number (see `redaction`)."""

    now: float
    step: SchedulerOutput | None = None
    chain: bytes = b""


class Update(msgspec.Struct, tag=7, array_like=True, omit_defaults=True, gc=False):
    """The output of a step.

    It has `num_tokens` tokens. After some time only those are kept at which a request stops: `stops` are int32 pairs
    (position, token).
    """

    now: float
    result: ModelRunnerOutput
    num_tokens: int = 0
    stops: bytes = b""
    told: list[ClientReport] = []
    chain: bytes = b""


class TakeOutputs(msgspec.Struct, tag=8, array_like=True, omit_defaults=True, gc=False):
    """Only when there was something to take."""

    now: float
    told: list[ClientReport] = []
    chain: bytes = b""


class MakeStats(msgspec.Struct, tag=9, array_like=True, gc=False):
    pass


class Hashed(msgspec.Struct, tag=10, array_like=True, gc=False):
    """While the event before was handled, the full blocks of an output got these hashes."""

    digests: bytes


class GrammarRefused(msgspec.Struct, tag=11, array_like=True, gc=False):
    """While the event before was handled, a grammar did not accept a token."""

    key: RequestKey


def without_tokens(drafts: DraftTokenIds) -> DraftTokenIds:
    """Drafts with the number of their tokens, int32, in the place of these."""
    num_tokens = int32_bytes(len(drafts.token_ids) // 4)
    return msgspec.structs.replace(drafts, token_ids=num_tokens)


class GrammarAccepts(msgspec.Struct, tag=12, array_like=True, gc=False):
    """While the event before was handled, a grammar allowed only the first so many drafts."""

    key: RequestKey
    num_tokens: int


class GrammarForces(msgspec.Struct, tag=20, array_like=True, gc=False):
    """While the event before was handled, a grammar left no choice about so many tokens."""

    key: RequestKey
    num_tokens: int


class Matched(msgspec.Struct, tag=14, array_like=True, omit_defaults=True, gc=False):
    """While the event before was handled, the KV connector said what it can load; None: not yet."""

    transfer_id: int
    num_tokens: int | None
    is_async: bool = False


class DelaysFree(msgspec.Struct, tag=15, array_like=True, gc=False):
    """While the event before was handled, the KV connector kept the blocks of a request that ended."""

    transfer_id: int


class CacheItemFound(msgspec.Struct, tag=16, array_like=True, gc=False):
    """While the event before was handled, the encoder-cache connector said whether it has an output."""

    transfer_id: int
    input_index: int
    found: bool


class ConnectorRaised(msgspec.Struct, tag=17, array_like=True, gc=False):
    """While the event before was handled, this method of a connector raised an error."""

    call: str
    transfer_id: int


class UpdateDrafts(msgspec.Struct, tag=13, array_like=True, gc=False):
    """Drafts that came after the output of their step, without the tokens but for their number."""

    drafts: DraftTokenIds


class AdoptBlocks(msgspec.Struct, tag=18, array_like=True, gc=False):
    held: list[HeldRequest]


class EndAdoption(msgspec.Struct, tag=19, array_like=True, gc=False):
    client_index: int


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
)
Event: TypeAlias = (
    AddClient
    | FinishClient
    | AddRequest
    | FinishRequests
    | GrammarReady
    | ResetPrefixCache
    | Schedule
    | Update
    | TakeOutputs
    | MakeStats
    | Hashed
    | GrammarRefused
    | GrammarAccepts
    | GrammarForces
    | UpdateDrafts
    | Matched
    | DelaysFree
    | CacheItemFound
    | ConnectorRaised
    | AdoptBlocks
    | EndAdoption
)
