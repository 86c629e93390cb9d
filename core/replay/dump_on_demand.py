"""Write the event log of a core to a file, on SIGUSR1 and after errors."""

from __future__ import annotations

import logging
import time

from ...protocol.config import EngineConfig
from ..scheduler.interface import SchedulerInterface
from .dump import default_directory, write_dump
from .recorder import RecordedScheduler

logger = logging.getLogger(__name__)


def dump_event_log(
    scheduler: SchedulerInterface, config: EngineConfig, reason: str
) -> tuple[bool, str]:
    """Write the event log of a scheduler.

    Return whether it worked, and the path or the error message; both are logged.
    """
    if not isinstance(scheduler, RecordedScheduler):
        name = config.scheduler.scheduler_cls
        problem = f"--scheduler-cls {name} has no event log: it does not derive from Scheduler"
        logger.error("cannot write the event log: %s", problem)
        return False, problem
    try:
        path = write_dump(
            scheduler,
            config.frontend.dump_dir or default_directory(),
            reason=reason,
            wall_time=time.time(),
            now=time.monotonic(),
        )
    except Exception as error:
        # Whatever fails here must not affect requests.
        logger.error("cannot write the event log: %s", error)
        return False, str(error)
    logger.warning("wrote the event log (reason: %s) to %s", reason, path)
    return True, str(path)
