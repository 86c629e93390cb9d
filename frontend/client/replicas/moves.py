"""Move sequences to other replicas: those that wait, and running ones together with their KV blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from ....protocol.config import EngineConfig, ReplicaRole
from ....protocol.kv_transfer.direct import DIRECT_CONNECTOR
from ....protocol.kv_transfer.multi import find_connector
from ....protocol.routing.choice import highest_load
from ....protocol.supervisor_messages import EngineStatus, ReplicaState
from ..request_group import Sequence
from .core_connection import CoreConnection

LOOK_S: Final = 1.0
"""Seconds between two looks at the loads of the replicas."""

PATIENCE_S: Final = 5.0
"""Seconds for which a replica must have had too high a load before sequences leave it."""

MOVES_AT_ONCE: Final = 4
"""Running sequences of one frontend that leave a replica at one look."""


class ReplicaMoves:
    """Moves sequences away from a replica that is down, drains, becomes a prefill replica, or has too high a load.

    Unless it is down, the core of the replica holds their blocks. The replica at which a sequence continues fetches the
    blocks through the direct connector, and computes the missing ones. Without that connector, running sequences finish
    at their replica. Sequences that wait there have no blocks, so they move in any case, also if the replica makes no
    progress.

    Args:
        sequences: The unfinished sequences of this frontend.
        move: Submits a sequence to another replica.
        begin_fetch: Makes a sequence fetch its blocks from a core that held them for a request index.
        find_stuck: Returns the replicas that make no progress.
    """

    def __init__(
        self,
        config: EngineConfig,
        cores: list[CoreConnection],
        sequences: Mapping[int, Sequence],
        move: Callable[[Sequence], None],
        begin_fetch: Callable[[Sequence, CoreConnection, int], None],
        find_stuck: Callable[[], Collection[int]],
    ) -> None:
        connector = find_connector(config.kv_transfer, DIRECT_CONNECTOR)
        self._is_possible = (
            connector is not None
            and connector.kv_role == "kv_both"
            and not config.parallel.is_distributed
        )
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._begin_fetch = begin_fetch
        self._cores = cores
        self._sequences = sequences
        self._move = move
        self._find_stuck = find_stuck
        self._prefilling = {
            replica
            for replica, role in enumerate(config.parallel.replica_roles)
            if role is ReplicaRole.PREFILL
        }
        self._leaving: set[int] = set()
        self._overloaded_since: dict[int, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to look at the replicas, if there are several."""
        if len(self._cores) > 1:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def apply_status(self, status: EngineStatus) -> None:
        """Apply a status, which the connections have applied: move sequences away from cores that are down or drain.

        Those of a core that is about to resume stay.
        """
        before = self._prefilling
        self._prefilling = {core.core_index for core in self._cores if core.is_for_prefill}
        self._leaving = {
            info.replica for info in status.replicas if info.state is ReplicaState.DRAINING
        }
        self._leaving |= self._prefilling - before
        resuming = {replica.replica for replica in status.replicas if replica.is_resuming}
        for sequence in list(self._sequences.values()):
            core_index = sequence.core_index
            if not self._cores[core_index].ready and core_index not in resuming:
                self._move(sequence)
            elif core_index in self._leaving and self._may_move(sequence):
                self._release(sequence)

    def _look(self) -> None:
        """Let waiting sequences leave replicas without progress, and balance the others if an imbalance has lasted."""
        stuck = self._find_stuck()
        for core in self._cores:
            core.is_stuck = core.core_index in stuck
        for sequence in list(self._sequences.values()):
            if (
                sequence.core_index in stuck
                and not sequence.is_pinned
                and self._is_waiting(sequence)
            ):
                self._release(sequence)
        now = time.monotonic()
        overloaded = self._overloaded()
        self._overloaded_since = {
            core_index: self._overloaded_since.get(core_index, now) for core_index in overloaded
        }
        for core_index, since in self._overloaded_since.items():
            if now - since >= PATIENCE_S:
                self._relieve(core_index)
        self.start()

    def _overloaded(self) -> list[int]:
        """Return the replicas that would get no request now, whatever they have cached."""
        loads = {
            core.core_index: core.load.total
            for core in self._cores
            if core.ready and core.is_serving and not core.is_for_prefill and not core.is_stuck
        }
        if len(loads) < 2:
            return []
        limit = highest_load(min(loads.values()), self._max_num_seqs)
        return [core_index for core_index, load in loads.items() if load > limit]

    def _relieve(self, core_index: int) -> None:
        """Move sequences away from a replica until its load is acceptable. Those that cost least move first."""
        movable = [
            sequence
            for sequence in self._sequences.values()
            if sequence.core_index == core_index
            and not sequence.is_pinned
            and self._may_move(sequence)
        ]
        running = [each for each in movable if each.scheduled_time]
        running.sort(key=lambda each: each.num_prompt_tokens + len(each.token_ids))
        # Those that came last would wait longest.
        waiting = [each for each in reversed(movable) if not each.scheduled_time]
        for sequence in (*waiting, *running[:MOVES_AT_ONCE]):
            if core_index not in self._overloaded():
                return
            self._release(sequence)

    def _may_move(self, sequence: Sequence) -> bool:
        """Return whether a sequence can continue at another replica, with its blocks if it has some.

        These sequences finish where they are, once they run: sequences with images or audio, embeddings, suspects, and
        prompts that are computed for other servers. A sequence that a core has not accepted yet may still wait for a
        prefill replica.
        """
        request = sequence.request
        if not sequence.was_accepted:
            return False
        if not sequence.scheduled_time:
            return self._is_waiting(sequence)
        return (
            self._is_possible
            and request.pooling_params is None
            and not request.encoder_inputs
            and request.sampling_params.prompt_logprobs is None
            and self._may_leave(sequence)
        )

    def _is_waiting(self, sequence: Sequence) -> bool:
        """Return whether nothing is computed of a sequence, and it may leave its replica."""
        return not sequence.scheduled_time and self._may_leave(sequence)

    def _may_leave(self, sequence: Sequence) -> bool:
        request, params = sequence.request, sequence.request.kv_transfer_params
        return (
            not (sequence.finished or sequence.is_silent_suspect or request.is_suspect)
            and (params is None or not params.get("do_remote_decode"))
            and any(
                core.ready
                and core.is_serving
                and not core.is_stuck
                and core.core_index != sequence.core_index
                for core in self._cores
            )
        )

    def _release(self, sequence: Sequence) -> None:
        """Make the core stop a sequence, and move it; if it runs, its request says where its blocks are."""
        core, request_index = self._cores[sequence.core_index], sequence.request_index
        if sequence.scheduled_time:
            core.release_request(request_index)
            self._begin_fetch(sequence, core, request_index)
        else:
            # The core may have scheduled it meanwhile, but nothing will fetch its blocks.
            core.abort_request(request_index)
        self._move(sequence)
