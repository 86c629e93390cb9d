"""Make core 0 exit when its first successor receives requests, and restart nothing after that crash.

Python imports this module when it starts with this directory on PYTHONPATH.
"""

import os
import signal

from engine.core.engine_core import EngineCore
from engine.core.scheduler.scheduler import Scheduler
from engine.frontend.supervisor import recovery
from engine.protocol.config import FIRST_EPOCH


def crash(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def construct(core, config, core_index, *args, init=EngineCore.__init__):
    if core_index == 0 and config.epoch == FIRST_EPOCH + 1:
        Scheduler.add_request = crash
    init(core, config, core_index, *args)


EngineCore.__init__ = construct
recovery.FIRST_BACKOFF_S = recovery.MAX_BACKOFF_S = 3600.0
