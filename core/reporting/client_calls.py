"""Answers the calls of frontends that concern a whole replica rather than a request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from ...protocol.messages import (
    AbortByID,
    CallResult,
    DumpEventLog,
    FinishReason,
    ReplicaCall,
    ResetPrefixCache,
)
from ..scheduler.interface import SchedulerInterface

ABORTED: Final = "the request was aborted by an operator"
"""The message of a request that a call of /abort_request ended."""


def answer_call(
    scheduler: SchedulerInterface,
    call: ReplicaCall,
    dump_event_log: Callable[[str], tuple[bool, str]],
) -> CallResult:
    """Carry out the call of a frontend and return the result to send to it.

    `dump_event_log` gets the reason of the dump, and returns whether it worked and the path or the error message.
    """
    if isinstance(call, ResetPrefixCache):
        is_reset = scheduler.reset_prefix_cache(call.reset_running_requests, time.monotonic())
        return CallResult(call.call_id, is_reset)
    if isinstance(call, DumpEventLog):
        return CallResult(call.call_id, *dump_event_log("request"))
    if isinstance(call, AbortByID):
        keys = scheduler.find_requests(call.request_id)
        scheduler.finish_requests(keys, FinishReason.ABORT, ABORTED)
        return CallResult(call.call_id, True, str(len(keys)))
    return CallResult(call.call_id, True, scheduler.describe_blocks())
