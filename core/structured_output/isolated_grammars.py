"""Run expensive grammars in separate processes, so that they do not delay the core's loop."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Final

import msgspec

from ...protocol.errors import EngineError
from ...protocol.grammars.messages import (
    Advance,
    Compile,
    Failed,
    Mask,
    decode_reply,
)
from ...protocol.grammars.messages import Request as Message
from ...protocol.grammars.process import GrammarProcesses, describe_exit
from ...protocol.isolation.messages import LENGTH_BYTES, Exited, frame
from ...protocol.sampling_params import StructuredOutput

MAX_ISOLATED: Final = 4
"""Maximum number of grammar processes at the same time. Requests beyond it wait."""


class IsolatedGrammar:
    """The grammar of one request, which runs in its own process and is served by a thread.

    `mask` is None while it is being computed. `error` says why no mask will follow. `report` is called after each
    answer of the process, but not after `close`.
    """

    def __init__(
        self,
        structured_output: StructuredOutput,
        processes: GrammarProcesses,
        report: Callable[[IsolatedGrammar], None],
    ) -> None:
        self.mask: bytes | None = None
        self.error = ""
        self.is_closed = False
        self._processes = processes
        self._report = report
        self._messages: SimpleQueue[Message | None] = SimpleQueue()
        self._messages.put(Compile(structured_output))
        self._process: socket.socket | None = None
        self._lock = threading.Lock()

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Start to compute the mask after these tokens. Return False if the grammar has failed."""
        self.mask = None
        self._messages.put(Advance(list(token_ids)))
        return not self.error

    def close(self) -> None:
        """Stop the process and the thread, even while they compute."""
        with self._lock:
            self.is_closed = True
            if self._process is not None:
                with contextlib.suppress(OSError):
                    self._process.shutdown(socket.SHUT_RDWR)
        self._messages.put(None)

    def run(self) -> None:
        """Serve the grammar until it is closed or fails. Runs in its own thread."""
        try:
            with self._lock:
                if self.is_closed:
                    return
                self._process = self._processes.spawn()
            self._serve(self._process)
        except (OSError, EngineError, msgspec.MsgspecError) as error:
            self._fail(f"cannot be used: {error}")
        finally:
            with self._lock:
                if self._process is not None:
                    self._process.close()
                    self._process = None

    def _serve(self, process: socket.socket) -> None:
        while not self.error and (message := self._messages.get()) is not None:
            process.sendall(frame(message))
            header = _receive(process, LENGTH_BYTES)
            body = _receive(process, int.from_bytes(header, "big"))
            reply = decode_reply(body) if body else None
            match reply:
                case Mask(bits):
                    self.mask = bits
                    self._report(self)
                case Failed(reason):
                    self._fail(reason)
                case _:
                    exited = reply if isinstance(reply, Exited) else None
                    self._fail(f"the grammar {describe_exit(exited)}")

    def _fail(self, reason: str) -> None:
        self.error = reason
        self._report(self)


class IsolatedGrammars:
    """The threads and processes of a core's isolated grammars."""

    def __init__(self, processes: GrammarProcesses) -> None:
        self._processes = processes
        self._threads: ThreadPoolExecutor | None = None

    def start(
        self, structured_output: StructuredOutput, report: Callable[[IsolatedGrammar], None]
    ) -> IsolatedGrammar:
        """Return a grammar, which is compiled as soon as a process is available."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_ISOLATED, thread_name_prefix="isolated grammar")
        grammar = IsolatedGrammar(structured_output, self._processes, report)
        self._threads.submit(grammar.run)
        return grammar

    def close(self) -> None:
        """Stop all processes that are not in use. Grammars in use must be closed as well."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()


def _receive(process: socket.socket, size: int) -> bytes:
    """Return `size` bytes from the process, or b"" if it has exited."""
    received = b""
    while len(received) < size and (piece := process.recv(size - len(received))):
        received += piece
    return received if len(received) == size else b""
