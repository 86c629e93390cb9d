"""A pool of disposable processes, each of which handles messages one after another."""

from __future__ import annotations

import contextlib
import itertools
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from ..errors import UnavailableError
from .channel import SharedContent, receive, send
from .messages import Exited, may_be_innocent
from .processes import LOOK_S, MAX_TRIES, IsolatedProcesses, is_idle

Reply = TypeVar("Reply")

MAX_USES: Final = 100
"""Number of inputs after which a process is replaced, which bounds the memory that it keeps."""


class Lost(Exception):
    """Raised if a process ended before it replied.

    Attributes:
        signal: The signal that ended it, SIGALRM if it did not reply in time; None if the reason is unknown.
        may_be_innocent: True if something other than the input may be the reason.
    """

    def __init__(self, exited: Exited | None) -> None:
        super().__init__(exited)
        self.signal = None if exited is None else exited.signal
        self.may_be_innocent = may_be_innocent(exited)


class PooledProcess(Generic[Reply]):
    """One new process of `processes`. `decode` decodes its replies, and the report of its exit."""

    def __init__(
        self,
        processes: IsolatedProcesses,
        decode: Callable[[bytes], Reply | Exited],
        timeout_s: float | None,
    ) -> None:
        self._processes, self._decode, self._timeout_s = processes, decode, timeout_s
        self._connection = processes.spawn()
        self._connection.settimeout(timeout_s)
        self.num_uses = 0

    @property
    def is_reusable(self) -> bool:
        """True if the process waits for another input."""
        if self.num_uses >= MAX_USES or not is_idle(self._connection):
            return False
        self._connection.settimeout(self._timeout_s)
        return True

    def close(self) -> None:
        """End the process."""
        self._connection.close()

    def interrupt(self) -> None:
        """Let an exchange in another thread fail immediately."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def exchange(
        self, message: msgspec.Struct, content: Iterable[bytes | memoryview] = ()
    ) -> tuple[Reply, SharedContent]:
        """Send a message and its content, and return the reply and its content. Raise Lost if the process ended."""
        exited: Exited | None = None
        try:
            # If the process has ended, its signal can still be received.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                send(self._connection, message, content)
            self._await_reply()
            # The fork server reports how a process ended, unless the fork server has ended as well.
            if (received := receive(self._connection)) is not None:
                with contextlib.suppress(msgspec.MsgspecError):
                    reply = self._decode(received[0])
                    if not isinstance(reply, Exited):
                        return reply, received[1]
                    exited = reply
                received[1].close()
        except TimeoutError:
            exited = Exited(signal.SIGALRM)
        except OSError:
            pass
        raise Lost(exited)

    def _await_reply(self) -> None:
        """Wait for a reply. Raise TimeoutError if it takes too long, and ConnectionError if nobody watches the process.

        A fork server that is stopped reports no exits, and kills no stopped processes.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while not poll.poll(LOOK_S * 1000):
            if self._processes.is_stopped:
                raise ConnectionError("the fork server is stopped")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError


class ProcessPool(IsolatedProcesses, Generic[Reply]):
    """Processes that start on demand, and are used again. Thread-safe.

    An input that crashes its process fails alone. A process may also be killed or stopped for another reason, and so
    may the process that forks them. Then the input is sent to a new process, a few times.

    Args:
        module: The program of the fork server.
        arguments: A function that returns the program's arguments.
        decode: Decodes replies, and the report that a process has exited.
        timeout_s: The seconds after which a process that does not reply is lost; None for no limit.
        max_idle: The maximum number of idle processes.
    """

    def __init__(
        self,
        module: str,
        arguments: Callable[[], Sequence[str]],
        decode: Callable[[bytes], Reply | Exited],
        timeout_s: float | None,
        max_idle: int,
    ) -> None:
        super().__init__(module, arguments)
        self._decode, self._timeout_s, self._max_idle = decode, timeout_s, max_idle
        self._idle_lock = threading.Lock()
        self._idle: list[PooledProcess[Reply]] = []

    def close(self) -> None:
        """Stop the fork server and all processes."""
        super().close()
        with self._idle_lock:
            while self._idle:
                self._idle.pop().close()

    @contextlib.contextmanager
    def exchange(
        self, what: str, message: msgspec.Struct, content: Sequence[bytes | memoryview]
    ) -> Iterator[tuple[Reply, SharedContent]]:
        """Send an input to a process. The context is its reply, with the content of it.

        Raises:
            Lost: The process ended, and the input is probably the reason.
            UnavailableError: No process can be started to read `what`.
        """
        process, reply, received = self.occupy(what, message, content)
        try:
            with received:
                yield reply, received
        except EOFError:
            process.close()
            raise
        finally:
            self.put_back(process)

    def occupy(
        self, what: str, message: msgspec.Struct, content: Sequence[bytes | memoryview]
    ) -> tuple[PooledProcess[Reply], Reply, SharedContent]:
        """Send an input to a process. Return the process, which must be put back, with its reply and the content of it.

        Raises:
            Lost: The process ended, and the input is probably the reason.
            UnavailableError: No process can be started to read `what`.
        """
        process = self._take_idle() or self._new_process(what)
        for num_tries in itertools.count(1):
            process.num_uses += 1
            try:
                return process, *process.exchange(message, content)
            except Lost as error:
                process.close()
                if not error.may_be_innocent or num_tries == MAX_TRIES:
                    raise
                process = self._new_process(what)
            except BaseException:
                process.close()
                raise
        raise AssertionError

    def put_back(self, process: PooledProcess[Reply]) -> None:
        """Keep an idle process for the next input, or end it if there are enough."""
        if process.is_reusable:
            with self._idle_lock:
                if len(self._idle) < self._max_idle:
                    self._idle.append(process)
                    return
        process.close()

    def _take_idle(self) -> PooledProcess[Reply] | None:
        with self._idle_lock:
            while self._idle:
                process = self._idle.pop()
                if process.is_reusable:
                    return process
                process.close()
        return None

    def _new_process(self, what: str) -> PooledProcess[Reply]:
        try:
            return PooledProcess(self, self._decode, self._timeout_s)
        except OSError as error:
            raise UnavailableError(
                f"cannot start a process to read {what}: {error.strerror or error}; retry later"
            ) from None
