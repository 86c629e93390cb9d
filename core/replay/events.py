"""The inputs and decisions of a scheduler, one event per call.

An event is recorded before the scheduler handles it, so the last event may be the one that raised an error. Events of
steps also hold the decision, and the value of the `DecisionHash` after it, which is empty if the scheduler raised.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

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


class Call(msgspec.Struct, tag=0, array_like=True, gc=False):
    """A call of a method in `ARGUMENTS`. Texts, data of connectors and media are not recorded."""

    method: str
    args: tuple[Any, ...]

    @property
    def now(self) -> float | None:
        """The time of the call, if it has one."""
        return self.args[-1] if self.args and isinstance(self.args[-1], float) else None

    def decode_args(self) -> tuple[Any, ...]:
        """Return the arguments, which a file has as plain data.

        Raises:
            ValidationError: They do not fit the method, or it is unknown.
        """
        if self.method not in ARGUMENTS:
            raise msgspec.ValidationError(f"unknown method {self.method}")
        args: tuple[Any, ...] = msgspec.convert(self.args, ARGUMENTS[self.method])
        return args


ARGUMENTS: Final[dict[str, Any]] = {
    "adopt_blocks": tuple[list[HeldRequest]],
    "end_adoption": tuple[int],
    "add_client": tuple[int],
    "finish_client": tuple[int],
    "append_inputs": tuple[int, AppendInputs],
    "finish_requests": tuple[list[RequestKey], FinishReason],
    "grammar_ready": tuple[RequestKey, str | None],
    "lora_loaded": tuple[int, str | None],
    "reset_prefix_cache": tuple[bool, float],
    "make_stats": tuple[()],
    "update_draft_token_ids": tuple[DraftTokenIds],
    "update_from_connector": tuple[int, KVConnectorOutput, float],
}
"""The types of the arguments of each method that is recorded as a `Call`."""


class AddRequest(msgspec.Struct, tag=2, array_like=True, gc=False):
    """A call of `add_request`.

    In a file, `message` has no prompt; `num_prompt_bytes` is its size, and zeros replace output and predicted tokens.
    """

    client_index: int
    message: EngineCoreRequest
    num_prompt_bytes: int
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


Decided: TypeAlias = Schedule | Update | TakeOutputs
Event: TypeAlias = Decided | Answer | Call | AddRequest
