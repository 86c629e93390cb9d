"""Run one function in a fork of this process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import msgspec

from ..protocol.errors import EngineError
from .stop_signals import STOP_SIGNALS, StopSignals

T = TypeVar("T")

CLEAN_UP_S = 2.0


class ForkFailed(EngineError):
    """The message of the EngineError that the function raised."""


def run_in_fork(function: Callable[[], T], result_type: type[T], signals: StopSignals) -> T:
    """What `function` returns (anything msgspec encodes), computed in a child process.

    What it imports and allocates is gone afterwards. An EngineError comes back as `ForkFailed` with the same
    message. A stop signal interrupts it, as does the end of this process, and raises `StopRequested`.
    """
    result_fd, child_result_fd = os.pipe()
    child_life_fd, life_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(life_fd)
        os.close(result_fd)
        _run_child(function, child_result_fd, child_life_fd)
    os.close(child_result_fd)
    os.close(child_life_fd)
    try:
        encoded = _read_all(result_fd, signals)
    finally:
        os.close(life_fd)
        os.close(result_fd)
        _, wait_status = os.waitpid(pid, 0)
    if not encoded:
        code = os.waitstatus_to_exitcode(wait_status)
        raise ForkFailed(f"{function.__name__} ended with code {code}; its messages are above")
    error, result = msgspec.msgpack.decode(encoded)
    if error is not None:
        raise ForkFailed(error)
    return msgspec.convert(result, result_type)


def _read_all(fd: int, signals: StopSignals) -> bytes:
    pieces: list[bytes] = []
    while True:
        readable, _, _ = select.select([fd, signals.fd], [], [])
        signals.raise_if_received()
        if fd in readable:
            piece = os.read(fd, 65536)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)


def _run_child(function: Callable[[], object], result_fd: int, life_fd: int) -> NoReturn:
    for signum in STOP_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(life_fd,), daemon=True).start()
    code = 1
    try:
        try:
            reply: tuple[str | None, object] = (None, function())
        except EngineError as error:
            reply = (str(error), None)
        os.write(result_fd, msgspec.msgpack.encode(reply))
        code = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _end_with_parent(life_fd: int) -> None:
    """Interrupt this process group, so that it cleans up, when the parent closes its end."""
    # The main thread must get the signal, since it is the one that may be waiting.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.read(life_fd, 1)
    os.killpg(0, signal.SIGINT)
    time.sleep(CLEAN_UP_S)
    os.killpg(0, signal.SIGKILL)
