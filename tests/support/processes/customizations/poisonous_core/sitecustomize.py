"""Make some tokens crash the core. Python imports this module if the directory is on PYTHONPATH.

One token kills the core without a message when the request is about to be computed. Another one makes it raise an
exception when the request arrives. A third one makes it raise an exception before it has stored anything of the
request.
"""

import os
import signal

from engine.core.scheduler.limits import Requirements
from engine.core.scheduler.scheduler import Scheduler

KILLS_WHEN_SCHEDULED = 49_002
RAISES_BY_ARRIVING = 49_003
RAISES_WHEN_READ = 49_005


def die_of(token_id: int, token_ids: bytes) -> None:
    if token_id in memoryview(token_ids).cast("i"):
        os.kill(os.getpid(), signal.SIGKILL)


def raise_for(token_id: int, token_ids: bytes) -> None:
    if token_id in memoryview(token_ids).cast("i"):
        raise RuntimeError("a test asked for this failure")


def add_request(scheduler, client_index, request, now, add=Scheduler.add_request):
    raise_for(RAISES_BY_ARRIVING, request.prompt_token_ids)
    add(scheduler, client_index, request, now)


def schedule(scheduler, now, schedule=Scheduler.schedule):
    step = schedule(scheduler, now)
    for new in step.new_requests if step is not None else ():
        die_of(KILLS_WHEN_SCHEDULED, new.token_ids)
    return step


def refuse(requirements, request, *args, refuse=Requirements.find_refusal):
    raise_for(RAISES_WHEN_READ, request.prompt_token_ids)
    return refuse(requirements, request, *args)


Scheduler.add_request = add_request
Scheduler.schedule = schedule
Requirements.find_refusal = refuse
