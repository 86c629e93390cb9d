"""Python imports this at its start where the directory is on PYTHONPATH: some tokens kill the core, which says nothing.

One kills it when the request arrives, the other when it is about to be computed.
"""

import os
import signal

from engine.core.engine_core import EngineCore
from engine.core.scheduler import Scheduler

KILLS_BY_ARRIVING = 49_001
KILLS_WHEN_SCHEDULED = 49_002


def die_of(token_id: int, token_ids: bytes) -> None:
    if token_id in memoryview(token_ids).cast("i"):
        os.kill(os.getpid(), signal.SIGKILL)


def add_requests(core, client_index, requests, add=EngineCore._add_requests):
    for request in requests:
        die_of(KILLS_BY_ARRIVING, request.prompt_token_ids)
    add(core, client_index, requests)


def schedule(scheduler, now, schedule=Scheduler.schedule):
    step = schedule(scheduler, now)
    for new in step.new_requests if step is not None else ():
        die_of(KILLS_WHEN_SCHEDULED, new.token_ids)
    return step


EngineCore._add_requests = add_requests
Scheduler.schedule = schedule
