"""Move running sequences away from replicas that drain, together with their KV blocks."""

from __future__ import annotations

from ....protocol.config import EngineConfig, ReplicaRole
from ....protocol.kv_transfer.direct import DIRECT_CONNECTOR, request_name
from ....protocol.kv_transfer.multi import find_connector
from ....protocol.supervisor_messages import EngineStatus, ReplicaState
from ..request_group import Sequence
from .core_connection import CoreConnection


class DrainMoves:
    """Moves the sequences of a replica that drains or becomes a prefill replica.

    The core of the replica holds their blocks. The replica at which a sequence continues fetches the blocks through the
    direct connector, and computes those that it does not get. Without that connector, sequences finish at their
    replica.
    """

    def __init__(
        self, config: EngineConfig, client_index: int, cores: list[CoreConnection]
    ) -> None:
        connector = find_connector(config.kv_transfer, DIRECT_CONNECTOR)
        self._is_possible = (
            connector is not None
            and connector.kv_role == "kv_both"
            and not config.parallel.is_distributed
        )
        self._client_index = client_index
        self._cores = cores
        self._prefilling = {
            replica
            for replica, role in enumerate(config.parallel.replica_roles)
            if role is ReplicaRole.PREFILL
        }
        self._leaving: set[int] = set()

    def apply_status(self, status: EngineStatus) -> None:
        """Apply a status of the supervisor, after the connections to the cores have applied it."""
        if self._is_possible:
            before = self._prefilling
            self._prefilling = {core.core_index for core in self._cores if core.is_for_prefill}
            self._leaving = {
                info.replica for info in status.replicas if info.state is ReplicaState.DRAINING
            }
            self._leaving |= self._prefilling - before

    def _must_move(self, sequence: Sequence) -> bool:
        """Return whether a sequence should continue at another replica.

        Sequences that finish where they are: those with images or sounds, those without generated tokens, suspects, and
        prompts that are computed for other servers. A sequence that a core has not accepted yet may still wait for a
        prefill replica.
        """
        request = sequence.request
        params = request.kv_transfer_params
        return (
            sequence.core_index in self._leaving
            and sequence.was_accepted
            and not (sequence.finished or sequence.is_silent_suspect or request.is_suspect)
            and request.pooling_params is None
            and not request.encoder_inputs
            and request.sampling_params.prompt_logprobs is None
            and (params is None or not params.get("do_remote_decode"))
            and any(
                core.ready and core.is_serving and core.core_index != sequence.core_index
                for core in self._cores
            )
        )

    def release(self, sequence: Sequence) -> bool:
        """Return whether a sequence moves.

        If so, make its core stop it, and add the location of its blocks to its request.
        """
        if not self._must_move(sequence):
            return False
        core, request = self._cores[sequence.core_index], sequence.request
        core.release_request(request.request_index)
        if sequence.scheduled_time:
            request.kv_transfer_params = {
                "do_remote_prefill": True,
                "replica": core.core_index,
                "remote_request_id": request_name(
                    self._client_index, request.request_index, request.arrival_time
                ),
            }
        return True
