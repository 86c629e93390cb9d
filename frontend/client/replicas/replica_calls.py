"""Calls to the cores of all replicas: about prefix caches, event logs, blocks and the requests of all frontends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ....protocol.errors import EngineError
from ....protocol.messages import (
    AbortByID,
    CallResult,
    DescribeBlocks,
    DumpEventLog,
    EndReasoning,
    PauseGeneration,
    PauseMode,
    PrepareGrammars,
    ReplicaCall,
    ResetPrefixCache,
    ResumeGeneration,
)
from .core_connection import CoreConnection


class ReplicaCalls:
    """Calls the cores of all replicas.

    Every method raises EngineError if a core is not up. The other cores carry out the call nevertheless.
    """

    def __init__(self, find_cores: Callable[[], Sequence[CoreConnection]]) -> None:
        """Store `find_cores`, which returns the connections to the cores and may raise EngineError."""
        self._find_cores = find_cores

    async def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Clear all prefix caches. Return False if running requests prevent it."""
        answers = await self._call(lambda call_id: ResetPrefixCache(call_id, reset_running))
        return all(answer.ok for answer in answers)

    async def dump_event_logs(self) -> list[str]:
        """Make every core write its last events to a file. Return the paths.

        Raises:
            EngineError: A core could not write.
        """
        answers = await self._call(DumpEventLog)
        for answer in answers:
            if not answer.ok:
                raise EngineError(answer.detail)
        return [answer.detail for answer in answers]

    async def describe_blocks(self) -> list[str]:
        """Return the states of the KV-cache blocks of each replica, in the format that `DescribeBlocks` specifies."""
        return [answer.detail for answer in await self._call(DescribeBlocks)]

    async def abort_requests(self, request_id: str) -> int:
        """Abort the requests that have this ID, or all if it is "". Return the number of aborted sequences."""
        answers = await self._call(lambda call_id: AbortByID(call_id, request_id))
        return sum(int(answer.detail) for answer in answers)

    async def end_reasoning(self, owner: str, answer_id: str) -> tuple[bool, str]:
        """End the reasoning of an answer of another frontend. Return whether it was in its reasoning, and else why not.

        The reason is "" if no other frontend holds the answer. The call is relayed by any core that is up.
        """
        cores = self._find_cores()
        core = next((core for core in cores if core.ready), cores[0])
        result = await core.call(lambda call_id: EndReasoning(call_id, owner, answer_id))
        return result.ok, result.detail

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause all cores. Return when nothing is computed any more.

        Raises:
            EngineError: A core did not pause, or blocks of a prefix cache were in use.
        """
        answers = await self._call(lambda call_id: PauseGeneration(call_id, mode, clear_cache))
        for answer in answers:
            if not answer.ok:
                raise EngineError(answer.detail)

    def is_paused(self) -> bool:
        """Return whether an operator has paused generation."""
        return any(core.is_paused for core in self._find_cores())

    async def resume(self) -> None:
        """Resume all cores."""
        await self._call(ResumeGeneration)

    def prepare_grammars(self) -> None:
        """Make every core that is up load what grammars need, while a first grammar is checked."""
        for core in self._find_cores():
            core.send_if_ready(PrepareGrammars())

    async def _call(self, make_call: Callable[[int], ReplicaCall]) -> list[CallResult]:
        return await asyncio.gather(*(core.call(make_call) for core in self._find_cores()))
