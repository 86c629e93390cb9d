"""The program of one worker: `python -m engine.workers CONFIG CORE_INDEX RANK EPOCH`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys

import zmq

from ..protocol.config import ReplicaRole, load_updated_config
from ..protocol.heartbeat import Pulse
from ..protocol.process import configure_logging, exit_with_parent, name_process
from ..protocol.supervisor_messages import Stage
from ..protocol.transport import StatusReporter


def main(config_path: str, core_index: int, rank: int, epoch: int) -> int:
    """Run the worker until its core shuts it down. Return the process's exit code."""
    # Garbage collections would take a fifth of the import time and free nothing. The worker enables them when it is
    # ready.
    gc.disable()
    from .worker import Worker

    config = load_updated_config(config_path, epoch)
    if config.parallel.role_of(core_index) is ReplicaRole.PREFILL:
        yield_to_others()
    name = f"worker {core_index * config.parallel.workers_per_core + rank}"
    name_process(name)
    configure_logging(name, config.frontend.log_level, config.frontend.log_format, core_index)
    exit_with_parent(config.run_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    status = StatusReporter(zmq.Context(), config, name)
    status.report(Stage.STARTING)
    pulse = Pulse(config, name)

    # By default, waiting OpenMP threads spin on cores that other workers could use.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    return status.run(Worker(config, core_index, rank, context, status, pulse).run)


def yield_to_others() -> None:
    """Let no thread of this process interrupt one of another process, because running streams wait for those.

    Prompts take no longer, and streams on the same processors have shorter pauses. Threads that start later inherit it.
    """
    if hasattr(os, "sched_setscheduler"):
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5])))
