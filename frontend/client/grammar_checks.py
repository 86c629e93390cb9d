"""Check grammars before requests go to a core, in separate processes, because a grammar can crash its compiler."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import socket
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from ...protocol.errors import EngineError, UnavailableError
from ...protocol.grammars.grammar import MAX_SPEC_LENGTH
from ...protocol.grammars.messages import MAX_WALL_S, Check, Verdict, decode_reply
from ...protocol.grammars.process import GrammarProcesses, describe_exit
from ...protocol.isolation.messages import LENGTH_BYTES, Exited, frame, may_be_innocent
from ...protocol.isolation.processes import MAX_TRIES, is_idle
from ...protocol.sampling_params import StructuredOutput
from .executor import ThreadExecutor

MAX_CHECKS: Final = 4
"""Maximum grammars that are checked at the same time."""

MAX_LONG_CHECKS: Final = 2
"""Maximum long grammars that are checked at the same time, so that short ones need not wait for them."""
LONG_SPEC: Final = 16 << 10
"""Characters above which a grammar counts as long."""

MAX_VERDICTS: Final = 1024
"""Maximum cached verdicts."""
MAX_CHECKS_PER_PROCESS: Final = 200
"""Checks after which a process is replaced."""

_encode = msgspec.msgpack.Encoder().encode


class GrammarChecks:
    """A pool of processes that check grammars, with a cache of recent verdicts.

    The first process starts with the first grammar or `prepare`, because many servers never get one.
    `run` prepares grammars in the threads of `executor`, which nothing else uses. Whenever a process must be started,
    `prepare_cores` is called first, so that the cores load what they need at the same time.
    """

    def __init__(
        self,
        processes: GrammarProcesses,
        executor: ThreadExecutor,
        prepare_cores: Callable[[], None] = lambda: None,
    ) -> None:
        self._processes = processes
        self._prepare_cores = prepare_cores
        self._executor = executor
        self.run = executor.run
        self._slots = asyncio.Semaphore(MAX_CHECKS)
        self._long_slots = asyncio.Semaphore(MAX_LONG_CHECKS)
        self._idle: list[_Checker] = []
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()

    def close(self) -> None:
        """Stop the processes."""
        self._executor.close()
        self._processes.close()

    async def prepare(self) -> None:
        """Start to load what processes and cores need for the first grammar."""
        # The first grammar reports an engine or a system that cannot do this.
        with contextlib.suppress(EngineError, OSError):
            self._prepare_cores()
            await asyncio.get_running_loop().run_in_executor(None, self._processes.start)

    async def check(
        self, structured_output: StructuredOutput, parts: Sequence[StructuredOutput] = ()
    ) -> Verdict:
        """Check a grammar: whether it can be used, and whether its request must be isolated.

        Cancelling ends the process.

        Raises:
            UnavailableError: No process can be started now.
            EngineError: The engine has exited.
        """
        size = len(structured_output.spec)
        if size > MAX_SPEC_LENGTH:
            return Verdict(f"must have at most {MAX_SPEC_LENGTH} characters, got {size}")
        request = await self.run(size, frame, Check(structured_output, list(parts)))
        digest = hashlib.blake2b(request, digest_size=16).digest()
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
            return verdict
        if len(request) > LONG_SPEC:
            async with self._long_slots:
                verdict = await self._check(request)
        else:
            verdict = await self._check(request)
        if len(verdict.spec or "") <= LONG_SPEC:
            self._verdicts[digest] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def _check(self, request: bytes) -> Verdict:
        exited: Exited | None = None
        async with self._slots:
            for _ in range(MAX_TRIES):
                reply = await self._ask(request)
                if isinstance(reply, Verdict):
                    return reply
                exited = reply
                if not may_be_innocent(exited):
                    break
        return Verdict(describe_exit(None if exited is None else exited.signal))

    async def _start(self) -> _Checker:
        self._prepare_cores()
        loop = asyncio.get_running_loop()
        try:
            return _Checker(await loop.run_in_executor(None, self._processes.spawn))
        except (OSError, RuntimeError) as error:
            # Python reports a thread that the system refuses to start as RuntimeError.
            raise UnavailableError(
                f"cannot start a process to check the grammar: {error}; retry later"
            ) from None

    async def _ask(self, request: bytes) -> Verdict | Exited | None:
        """Return the reply of a process, or how it ended; None if that is unknown."""
        checker = self._idle.pop() if self._idle else None
        if checker is None or not checker.is_alive:
            checker = await self._start()
        reply = None
        try:
            reply = await asyncio.wait_for(checker.check(request), 2 * MAX_WALL_S)
        except TimeoutError:
            return Exited(signal.SIGALRM)
        finally:
            if isinstance(reply, Verdict) and checker.is_reusable and not reply.is_isolated:
                self._idle.append(checker)
            else:
                checker.close()
        return reply


class _Checker:
    """One process, which checks grammars one after another."""

    def __init__(self, process: socket.socket) -> None:
        process.setblocking(False)
        self._process = process
        self._num_checks = 0
        self.is_reusable = True

    @property
    def is_alive(self) -> bool:
        """True if the process waits for a grammar. An unexpected end of the connection means that it has exited."""
        if is_idle(self._process):
            return True
        self.close()
        return False

    def close(self) -> None:
        self._process.close()

    async def check(self, request: bytes) -> Verdict | Exited | None:
        """Return the verdict, or how the process ended; None if that is unknown."""
        loop = asyncio.get_running_loop()
        self._num_checks += 1
        self.is_reusable = self._num_checks < MAX_CHECKS_PER_PROCESS
        received = b""
        with contextlib.suppress(ConnectionError):
            await loop.sock_sendall(self._process, request)
        try:
            while len(received) < LENGTH_BYTES or len(received) < LENGTH_BYTES + int.from_bytes(
                received[:LENGTH_BYTES], "big"
            ):
                piece = await loop.sock_recv(self._process, 1 << 16)
                if not piece:
                    return None
                received += piece
        except ConnectionError:
            return None
        reply = decode_reply(received[LENGTH_BYTES:])
        return reply if isinstance(reply, Verdict | Exited) else None
