"""The sleep of replicas, whose processes are stopped meanwhile to free all memory of the model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from ....protocol.config.weights import ReplacedWeights, WeightsFiles
from ....protocol.errors import EngineError
from ....protocol.supervisor_messages import ReplicaAction, ReplicaState
from ..engine_watch import EngineWatch
from ..request_group import Sequence as EngineSequence
from .core_connection import CoreConnection

SLEEP_S: Final = 60.0
"""Maximum seconds for all processes of the replicas to exit."""

RESEND_S: Final = 1.0
"""Seconds after which a command that has had no effect is sent again."""

BEGIN_S: Final = 10.0
"""Maximum seconds for the supervisor to begin an update of the weights."""

POLL_S: Final = 0.02
"""Seconds between checks whether all replicas sleep, or are awake."""


class ReplicaSleep:
    """Puts all replicas to sleep, and wakes them.

    Requests that arrive meanwhile wait. They wake replicas that sleep because they were idle, but not those that an
    operator put to sleep. Unfinished sequences continue after the sleep with the tokens that they would have had.

    Args:
        cores: The connections to the cores of all replicas. The list may change.
        check_alive: Raises EngineError if the engine has failed.
        find_watch: Returns the watch over the engine; None before the start.
    """

    def __init__(
        self,
        cores: Sequence[CoreConnection],
        check_alive: Callable[[], object],
        find_watch: Callable[[], EngineWatch | None],
    ) -> None:
        self._cores = cores
        self._check_alive = check_alive
        self._find_watch = find_watch

    @property
    def is_asleep(self) -> bool:
        """True while no replica serves, because all that could sleep or wake."""
        return any(core.is_asleep for core in self._cores) and not any(
            core.ready and core.is_serving for core in self._cores
        )

    @property
    def awaits_operator(self) -> bool:
        """True while no replica serves, and no request can change that."""
        return self.is_asleep and all(
            core.state is ReplicaState.SLEEPING and not core.wakes_on_request
            for core in self._cores
            if core.is_asleep
        )

    def unload(self) -> None:
        """Let all replicas sleep until the next request, if they are idle within seconds."""
        self._command(ReplicaAction.UNLOAD, self._cores[:1])

    def load(self) -> None:
        """Wake the replicas that sleep until the next request."""
        self._command(ReplicaAction.WAKE, (core for core in self._cores if core.wakes_on_request))

    def wake_for_request(self, core: CoreConnection) -> None:
        """Wake the replicas if a request goes to one that sleeps because it was idle."""
        if core.wakes_on_request:
            self.load()

    def apply_status(self, sequences: Iterable[EngineSequence]) -> None:
        """Apply a status, which the connections have applied: wake replicas that fell asleep before a request came."""
        if any(core.wakes_on_request for core in self._cores):
            for sequence in sequences:
                self.wake_for_request(self._cores[sequence.core_index])

    async def sleep(self) -> None:
        """Put all replicas to sleep. Return when their processes have exited.

        Raises:
            EngineError: Some did not exit in time, or the engine failed.
        """

        def is_awake(core: CoreConnection) -> bool:
            return core.state is not ReplicaState.SLEEPING or not core.has_ended

        try:
            async with asyncio.timeout(SLEEP_S):
                await self._repeat(ReplicaAction.SLEEP, is_awake)
        except TimeoutError:
            raise EngineError(f"some processes did not exit within {SLEEP_S:.0f} s") from None

    async def wake(self) -> None:
        """Wake all replicas that sleep. Return when all that were asleep serve.

        Raises:
            EngineError: The engine failed.
        """
        await self._repeat(
            ReplicaAction.WAKE,
            lambda core: core.is_asleep or (core.state is ReplicaState.SERVING and not core.ready),
        )

    async def load_weights(self, files: WeightsFiles, weights: ReplacedWeights) -> None:
        """Load other weights on all replicas. Return when all that do not sleep have loaded them.

        Raises:
            EngineError: They could not be loaded, so that the replicas have the previous ones again; or the update did
                not begin; or the engine failed.
        """
        deadline, sent_at = time.monotonic() + BEGIN_S, -RESEND_S
        while not (has_begun := files.read_current().update_id == weights.update_id) or (
            files.is_updating and not self._is_each_asleep
        ):
            self._check_alive()
            if (failed := files.read_failed()).update_id == weights.update_id:
                await self._wait_for_weights()
                raise EngineError(failed.failure)
            now = time.monotonic()
            if not has_begun and now > deadline:
                raise EngineError(
                    f"the supervisor did not begin the update within {BEGIN_S:.0f} s, because other changes of the "
                    "replicas are under way or the run directory is full; retry later"
                )
            if not has_begun and now - sent_at >= RESEND_S:
                sent_at = now
                if (watch := self._find_watch()) is not None:
                    watch.request_weights(weights)
            await asyncio.sleep(POLL_S)
        await self._wait_for_weights()

    async def _wait_for_weights(self) -> None:
        if not self._is_each_asleep:
            await self.wake()

    @property
    def _is_each_asleep(self) -> bool:
        return all(core.state is ReplicaState.SLEEPING for core in self._cores)

    async def _repeat(
        self, action: ReplicaAction, is_pending: Callable[[CoreConnection], bool]
    ) -> None:
        """Send a command for the pending cores, and repeat it until none is pending.

        A supervisor that exits loses the commands that it received.
        """
        sent_at = -RESEND_S
        while pending := [core for core in self._cores if is_pending(core)]:
            if (now := time.monotonic()) - sent_at >= RESEND_S:
                sent_at = now
                self._command(action, pending)
            await asyncio.sleep(POLL_S)
            self._check_alive()

    def _command(self, action: ReplicaAction, cores: Iterable[CoreConnection]) -> None:
        self._check_alive()
        if (watch := self._find_watch()) is not None:
            for core in cores:
                watch.request(core.core_index, action)
