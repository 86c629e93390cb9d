"""Signals that a process watches, tested in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import os, select, signal
from engine.protocol.process import STOP_PROCESS, StopSignal

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
os.kill(os.getpid(), STOP_PROCESS)
assert stop.take_signals() == {signal.SIGUSR1} and stop.requested
"""


def test_watched_signals_wake_the_poll_once_and_do_not_end_the_process():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_json_log_has_one_object_a_line_with_the_request_and_the_traceback() -> None:
    program = """
import logging, threading, warnings
from engine.protocol.process import configure_logging, logged_request_id
configure_logging("core 1", "info", "json", 1)
logger = logging.getLogger("part")
logger.debug("left out")
logger.info("two\\nlines of %s", "\\udcff text")
logged_request_id.set("r-1")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
logger.warning("other", extra={"request_id": "r-2"})
warnings.warn("beware")
thread = threading.Thread(target=lambda: [][0])
thread.start()
thread.join()
raise ValueError("the end")
"""
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    for line in lines:
        assert (line["process"], line["replica"]) == ("core 1", 1)
    info, failed, other, warning, in_thread, last = lines
    assert (info["level"], info["message"]) == ("info", "two\nlines of \udcff text")
    assert info["logger"] == "part" and "request_id" not in info
    assert failed["level"] == "error" and failed["request_id"] == "r-1"
    assert failed["traceback"].endswith("ZeroDivisionError: division by zero")
    assert other["request_id"] == "r-2" and "beware" in warning["message"]
    assert "IndexError" in in_thread["traceback"]
    assert last["level"] == "critical" and last["traceback"].endswith("ValueError: the end")
