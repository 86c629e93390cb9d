"""Python imports this at its start where the directory is on PYTHONPATH: core 0 dies in its second life, as soon as
a frontend takes it for alive.

After such a second death in a row nobody is started anew while a test runs.
"""

import os
import signal

from engine.core.engine_core import EngineCore
from engine.frontend.supervisor import recovery
from engine.protocol.config import FIRST_EPOCH


def add_requests(core, client_index, requests, add=EngineCore._add_requests):
    if core._core_index == 0 and core._config.epoch == FIRST_EPOCH + 1:
        os.kill(os.getpid(), signal.SIGKILL)
    add(core, client_index, requests)


EngineCore._add_requests = add_requests
recovery.FIRST_BACKOFF_S = recovery.MAX_BACKOFF_S = 3600.0
