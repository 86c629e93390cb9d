"""Answers the calls of frontends that concern a whole replica rather than a request."""

from __future__ import annotations

import time

from ..protocol.config import EngineConfig
from ..protocol.messages import CallResult, DumpEventLog, ReplicaCall, ResetPrefixCache
from .replay.dump_on_demand import dump_event_log
from .scheduler.interface import SchedulerInterface


def answer_call(
    scheduler: SchedulerInterface, config: EngineConfig, call: ReplicaCall
) -> CallResult:
    """Carry out the call of a frontend and return the result to send to it."""
    if isinstance(call, ResetPrefixCache):
        is_reset = scheduler.reset_prefix_cache(call.reset_running_requests, time.monotonic())
        return CallResult(call.call_id, is_reset)
    if isinstance(call, DumpEventLog):
        return CallResult(call.call_id, *dump_event_log(scheduler, config, "request"))
    return CallResult(call.call_id, True, scheduler.describe_blocks())
