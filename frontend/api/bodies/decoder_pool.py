"""The processes that decode large bodies, as their frontend sees them."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final

import msgspec

from ...http.errors import APIError, bad_request, unavailable
from .body import Body
from .messages import (
    HEAD,
    LENGTH,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    SCHEMAS,
)

NUM_PROCESSES: Final = 2
MAX_WALL_S: Final = 60.0
"""Seconds after which a process that makes no progress is killed."""

MAX_BODIES: Final = 100
"""Bodies after which a process is replaced, so that the memory that it keeps is bounded."""

RETRY_AFTER_S: Final = 1.0


class DecoderPool:
    """A pool of processes that start when they are needed. A body that ends one costs only its own request."""

    def __init__(self, *, strict: bool, log_level: str) -> None:
        self._arguments = (str(strict), log_level)
        self._idle: list[_Decoder] = []
        self._slots = asyncio.Semaphore(NUM_PROCESSES)

    async def decode(self, schema: type[msgspec.Struct], body: Body) -> bytes:
        """Return the decoded body or its refusal, for `unpack`.

        Raises APIError: 400 for a body that takes too much time or memory, 503 if no process can be started.
        """
        async with self._slots:
            decoder = self._idle.pop() if self._idle else None
            if decoder is None or not decoder.is_alive:
                decoder = _Decoder(await self._start())
            reply = None
            try:
                async with asyncio.timeout(MAX_WALL_S):
                    reply = await decoder.decode(SCHEMAS.index(schema), body)
            except (OSError, asyncio.IncompleteReadError, TimeoutError):
                raise await decoder.find_cause() from None
            finally:
                if reply is not None and decoder.num_bodies < MAX_BODIES:
                    self._idle.append(decoder)
                else:
                    decoder.kill()
        return reply

    async def _start(self) -> Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                f"{__package__}.decoder_process",
                *self._arguments,
                stdin=PIPE,
                stdout=PIPE,
            )
        except OSError as error:
            raise unavailable(
                f"no process can be started to decode a large body: {error.strerror}", RETRY_AFTER_S
            ) from None


class _Decoder:
    """One process, for one body after another."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._bodies, self._replies = process.stdin, process.stdout
        self.num_bodies = 0

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    def kill(self) -> None:
        if self.is_alive:
            self._process.kill()

    async def decode(self, schema: int, body: Body) -> bytes:
        """Raises OSError or asyncio.IncompleteReadError if the process ends meanwhile."""
        self.num_bodies += 1
        self._bodies.write(HEAD.pack(schema, body.num_values, body.size))
        for part in body.parts:
            self._bodies.write(part)
            await self._bodies.drain()
        [size] = LENGTH.unpack(await self._replies.readexactly(LENGTH.size))
        return await self._replies.readexactly(size)

    async def find_cause(self) -> APIError:
        """Return what to say of a body that has ended the process, or that it did not finish."""
        is_late = self.is_alive and not self._replies.at_eof()
        self.kill()
        code = await self._process.wait()
        if is_late:
            return unavailable(
                f"the request body was not decoded in {MAX_WALL_S:g} s", RETRY_AFTER_S
            )
        if code == -signal.SIGPROF:
            reason = f"takes more than {MAX_CPU_S} s of processor time to decode"
        else:
            reason = f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to decode"
        return bad_request(
            None, f"the request body {reason}; send less in one request", "body_too_complex"
        )
