"""Run a function in a forked child process."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import msgspec

from ...protocol.errors import EngineError
from ...protocol.process import ignore_stop_signals
from ..supervisor.signals import StopSignals

T = TypeVar("T")

CLEAN_UP_S = 2.0


class ForkFailed(EngineError):
    """The function raised an EngineError, or its process exited without a result.

    The message is the message of that error, or describes how the process exited.
    """


def run_in_fork(function: Callable[[], T], result_type: type[T], signals: StopSignals) -> T:
    """Call `function` in a child process and return its result.

    Modules that it imports and memory that it allocates are released when the child exits. A stop signal, or the end
    of this process, interrupts the child.

    Args:
        function: Must return a value that msgspec can encode.
        result_type: The type of that value.
        signals: The source of stop signals.

    Raises:
        ForkFailed: `function` raised an EngineError (same message), or the child exited without a result.
        StopRequested: A stop signal was received.
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
        raise ForkFailed(f"{function.__name__} exited with code {code}; see the messages above")
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
    # A stop signal to all processes must not end this one before it has cleaned up: the parent interrupts it.
    ignore_stop_signals()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_parent, args=(life_fd,), daemon=True).start()
    code = 1
    try:
        try:
            reply: tuple[str | None, object] = (None, function())
        except EngineError as error:
            reply = (str(error), None)
        # The parent may have exited.
        with suppress(BrokenPipeError):
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
    """Interrupt this process group, so that it cleans up and exits, when the parent closes its end of the pipe."""
    # The main thread must receive the signal, because it may be blocked in a system call.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.read(life_fd, 1)
    os.killpg(0, signal.SIGINT)
    time.sleep(CLEAN_UP_S)
    os.killpg(0, signal.SIGKILL)
