"""The processes that decode large bodies for a frontend."""

from __future__ import annotations

import asyncio
import signal
from typing import Final

import msgspec

from ....protocol.isolation.pool import Lost, ProcessPool
from ...client.executor import start_threads
from ...http.errors import APIError, unavailable
from .body import Body
from .messages import MAX_CPU_S, SCHEMAS, Answer, Decode, decode_answer, too_complex, too_large

NUM_PROCESSES: Final = 2
"""Maximum number of bodies of one frontend that are decoded at the same time."""

MAX_WALL_S: Final = 60.0
"""Seconds after which a process that has not replied is killed."""

RETRY_AFTER_S: Final = 1.0


class DecoderPool(ProcessPool[Answer]):
    """A pool of processes that decode bodies. A body that crashes its process fails only its own request."""

    def __init__(self, *, strict: bool, log_level: str, log_format: str) -> None:
        arguments = [str(strict), log_level, log_format]
        module = f"{__package__}.decoder_process"
        super().__init__(module, lambda: arguments, decode_answer, MAX_WALL_S, NUM_PROCESSES)
        self._threads = start_threads("body", NUM_PROCESSES)

    async def decode(self, schema: type[msgspec.Struct], body: Body) -> bytes:
        """Return the decoded body or its rejection, encoded for `unpack`.

        Raises:
            APIError: The body takes too much processor time or memory (400), or no process replies in time (503).
            UnavailableError: No process can be started.
        """
        assert body.structure is not None
        message = Decode(SCHEMAS.index(schema), body.structure.num_values, body.size)
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._decode_body, message, body
        )

    def _decode_body(self, message: Decode, body: Body) -> bytes:
        try:
            with self.exchange("a large body", message, body.parts) as (answer, content):
                return content.read(answer.size)
        except Lost as error:
            raise _explain(error.signal) from None


def _explain(signum: int | None) -> APIError:
    """Return the error for a body whose process was ended by this signal."""
    match signum:
        case signal.SIGALRM:
            problem = f"the request body was not decoded in {MAX_WALL_S:g} s"
            return unavailable(problem, RETRY_AFTER_S)
        case signal.SIGPROF:
            return too_complex(f"takes more than {MAX_CPU_S} s of processor time to decode")
    return too_large()
