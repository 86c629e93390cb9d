"""Run expensive grammars in separate processes, so that they do not delay the core's loop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import SimpleQueue
from typing import Final

from ...protocol.errors import EngineError
from ...protocol.grammars.messages import (
    MAX_WALL_S,
    Advance,
    Compile,
    Failed,
    Mask,
    Reply,
    decode_reply,
)
from ...protocol.grammars.process import GrammarProcesses, describe_exit
from ...protocol.isolation.pool import Lost, PooledProcess
from ...protocol.isolation.processes import MAX_TRIES
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
        self._compile = Compile(structured_output)
        self._token_ids: list[int] = []
        """All tokens that were sent to the process."""
        self._num_losses = 0
        """Number of processes that ended since the last answer."""
        self._messages: SimpleQueue[Advance | None] = SimpleQueue()
        self._process: PooledProcess[Reply] | None = None
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
                self._process.interrupt()
        self._messages.put(None)

    def run(self) -> None:
        """Serve the grammar until it is closed or fails. Runs in its own thread.

        If its process ends and the grammar may not be the reason, another one compiles it and gets all tokens again.
        """
        try:
            while True:
                try:
                    return self._serve()
                except Lost as lost:
                    self._num_losses += 1
                    if self._num_losses == MAX_TRIES or not lost.may_be_innocent:
                        return self.fail(f"the grammar {describe_exit(lost.signal)}")
        except (OSError, EngineError) as error:
            self.fail(f"cannot be used: {error}")

    def _serve(self) -> None:
        """Serve the grammar by a new process. Raise Lost if it ends before the grammar is closed."""
        process: PooledProcess[Reply] = PooledProcess(
            self._processes,
            decode_reply,
            # Normally the kernel ends the process before this limit.
            2 * MAX_WALL_S,
        )
        with closing(process):
            with self._lock:
                if self.is_closed:
                    return
                self._process = process
            try:
                reply, _ = process.exchange(self._compile)
                if self._token_ids and isinstance(reply, Mask):
                    reply, _ = process.exchange(Advance(self._token_ids))
                self._take(reply)
                while not self.error and (message := self._messages.get()) is not None:
                    self._token_ids += message.token_ids
                    self._take(process.exchange(message)[0])
            except Lost:
                if not self.is_closed:
                    raise
            finally:
                with self._lock:
                    self._process = None

    def _take(self, reply: Reply) -> None:
        if isinstance(reply, Failed):
            return self.fail(reply.reason)
        assert isinstance(reply, Mask)
        self._num_losses = 0
        self.mask = reply.bits
        self._report(self)

    def fail(self, reason: str) -> None:
        """Make the grammar accept no more tokens, for this reason."""
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
        """Return a grammar, which is compiled as soon as a process is available.

        Raises:
            RuntimeError: The system starts no thread now.
        """
        if self._threads is None:
            self._threads = start_threads(MAX_ISOLATED, "isolated grammar")
        grammar = IsolatedGrammar(structured_output, self._processes, report)
        self._threads.submit(grammar.run)
        return grammar

    def close(self) -> None:
        """Stop all processes that are not in use. Grammars in use must be closed as well."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()


def start_threads(count: int, name: str, stack_bytes: int = 0) -> ThreadPoolExecutor:
    """Start threads with stacks of a given size; 0 for the system's default.

    Raises:
        RuntimeError: The system does not start all of them now.
    """
    all_run = threading.Barrier(count)
    size = threading.stack_size(stack_bytes)
    try:
        threads = ThreadPoolExecutor(count, thread_name_prefix=name)
        for _ in range(count):
            threads.submit(all_run.wait)
    except RuntimeError:
        # Otherwise a thread that has started would wait for the others forever.
        all_run.abort()
        raise
    finally:
        threading.stack_size(size)
    return threads
