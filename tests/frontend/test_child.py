"""What the supervisor makes of the signs of life of a process."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
from engine.frontend.child import Child
from engine.frontend.local_process import LocalProcess, ProcessSpec, Role
from engine.protocol.supervisor_messages import Heartbeat


@pytest.mark.parametrize(
    ("signum", "name"),
    [(signal.SIGSEGV, "SIGSEGV"), (signal.SIGRTMIN + 1, f"signal {signal.SIGRTMIN + 1}")],
)
def test_an_obituary_names_any_signal(signum: int, name: str) -> None:
    program = "import os, sys; os.kill(os.getpid(), int(sys.argv[1]))"
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-S", "-c", program, str(int(signum))))
    process = LocalProcess(spec, 1)
    child = Child(spec, 1, process)
    process.close()
    assert child.obituary() == f"core 0 was killed by {name}; its messages are above"
    child.close()


def test_beats_that_have_waited_do_not_make_a_process_faster() -> None:
    spec = ProcessSpec("core 0", Role.CORE, (sys.executable, "-c", "input()"))
    process = LocalProcess(spec, 1)
    try:
        child = Child(spec, 1, process)
        for num_steps in (50, 100, 150):
            child.beat(Heartbeat(num_steps=num_steps))
        assert 0 < child.info(time.monotonic(), 0).steps_per_s <= 100
    finally:
        process.kill()
        process.close()
        if process.exit_fd is not None:
            os.close(process.exit_fd)
