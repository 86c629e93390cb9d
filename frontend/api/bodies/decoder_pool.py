"""The processes that decode large bodies for a frontend."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import PIPE, Process
from typing import Final

import msgspec

from ...http.errors import APIError, unavailable
from .body import Body
from .messages import (
    HEAD,
    LENGTH,
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    OUT_OF_MEMORY,
    SCHEMAS,
)

NUM_PROCESSES: Final = 2
"""Maximum number of decoder processes of one frontend."""
MAX_WALL_S: Final = 60.0
"""Seconds after which a process that has not replied is killed."""

MAX_BODIES: Final = 100
"""Number of bodies after which a process is replaced, which bounds the memory that it keeps."""

PIECE_BYTES: Final = 1 << 16

RETRY_AFTER_S: Final = 1.0


class DecoderPool:
    """A pool of processes that start on demand. A body that crashes its process fails only its own request.

    The operating system may also kill an idle process. So if a process that has decoded bodies before ends for an
    unknown reason, the body is sent once more, to a new process.
    """

    def __init__(self, *, strict: bool, log_level: str, log_format: str) -> None:
        self._arguments = (str(strict), log_level, log_format)
        self._idle: list[_Decoder] = []
        self._slots = asyncio.Semaphore(NUM_PROCESSES)

    async def decode(self, schema: type[msgspec.Struct], body: Body) -> bytearray:
        """Return the decoded body or its rejection, encoded for `unpack`.

        Raises:
            APIError: The body takes too much processor time or memory (400), or no process can be started or replies in
                time (503).
        """
        async with self._slots:
            while self._idle:
                decoder = self._idle.pop()
                if decoder.is_alive:
                    with contextlib.suppress(_EndedEarly):
                        return await self._decode(decoder, schema, body)
                    break
            return await self._decode(_Decoder(await self._start()), schema, body)

    async def _decode(
        self, decoder: _Decoder, schema: type[msgspec.Struct], body: Body
    ) -> bytearray:
        reply = None
        try:
            async with asyncio.timeout(MAX_WALL_S):
                reply = await decoder.decode(SCHEMAS.index(schema), body)
            return reply
        except TimeoutError:
            raise unavailable(
                f"the request body was not decoded in {MAX_WALL_S:g} s", RETRY_AFTER_S
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            raise await decoder.find_cause() from None
        finally:
            if reply is not None and decoder.num_bodies < MAX_BODIES:
                self._idle.append(decoder)
            else:
                decoder.kill()

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
                f"cannot start a process to decode a large body: {error.strerror}; retry later",
                RETRY_AFTER_S,
            ) from None


class _EndedEarly(Exception):
    """Raised if a process ended for an unknown reason, perhaps before it received the body."""


class _Decoder:
    """One process, which decodes bodies one after another."""

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

    async def decode(self, schema: int, body: Body) -> bytearray:
        """Return the encoded reply.

        Raises:
            OSError: The process ended before it replied.
            asyncio.IncompleteReadError: The process ended while it replied.
        """
        self.num_bodies += 1
        self._verify_open()
        self._bodies.write(HEAD.pack(schema, body.num_values, body.size))
        for part in body.parts:
            self._verify_open()
            self._bodies.write(part)
            await self._bodies.drain()
        [size] = LENGTH.unpack(await self._replies.readexactly(LENGTH.size))
        reply, num_read = bytearray(size), 0
        while num_read < size:
            # Reading a large reply in one piece would copy it on the event loop.
            piece = await self._replies.read(min(size - num_read, PIECE_BYTES))
            if not piece:
                raise asyncio.IncompleteReadError(b"", size)
            reply[num_read : num_read + len(piece)] = piece
            num_read += len(piece)
        return reply

    def _verify_open(self) -> None:
        """Raise BrokenPipeError if the process has ended, because uvloop would raise RuntimeError on write."""
        if self._bodies.is_closing():
            raise BrokenPipeError

    async def find_cause(self) -> APIError | _EndedEarly:
        """Return the error for a body whose process has ended, depending on how it ended."""
        self.kill()
        code = await self._process.wait()
        if code == -signal.SIGPROF:
            reason = f"takes more than {MAX_CPU_S} s of processor time to decode"
        elif code == OUT_OF_MEMORY or self.num_bodies == 1:
            reason = f"needs more than {MAX_MEMORY_BYTES >> 20} MiB of memory to decode"
        else:
            return _EndedEarly()
        return APIError(
            400, f"the request body {reason}; send less in one request", code="body_too_complex"
        )
