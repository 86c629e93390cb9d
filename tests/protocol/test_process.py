"""Signals that a process watches, in a process of their own."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, select, signal
from engine.protocol.process import StopSignal

stop = StopSignal()
stop.add_signal(signal.SIGUSR1)

def readable():
    return bool(select.select([stop.fd], [], [], 0)[0])

assert stop.take_signals() == set() and not readable()
for _ in range(3):
    os.kill(os.getpid(), signal.SIGUSR1)
    assert readable() and not stop.requested
    assert stop.take_signals() == {signal.SIGUSR1}
    assert stop.take_signals() == set() and not readable(), "an idle process would spin"
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
assert stop.take_signals() == {signal.SIGUSR1} and stop.requested
"""


def test_watched_signals_wake_the_poll_once_and_do_not_end_the_process():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
