"""Choose a replica for each request: one with its LoRA adapter and its cached prefix, unless its load is too high."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from ....protocol.block_hash import adapter_key, block_keys
from ....protocol.errors import EngineError
from ....protocol.messages import EngineCoreRequest
from ....protocol.routing.choice import choose_replica
from ...observability.metrics.metrics import Metrics
from ..sequence_io import SEQUENCES_AT_ONCE, SequenceRequest
from .core_connection import CoreConnection
from .core_load import Overloaded

_NO_SEQUENCES: Final[Mapping[int, int]] = {}


class ReplicaUnavailable(EngineError):
    """The requested replica accepts no requests at the moment."""


class Router:
    """Chooses the core for each sequence of one frontend.

    `cores` is the caller's list, in the order of the replicas, and may change. Sequences go to prefill replicas only
    while no other replica serves.
    """

    def __init__(
        self,
        cores: list[CoreConnection],
        metrics: Metrics,
        max_num_seqs: int,
    ) -> None:
        self._cores = cores
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs

    def open_cores(self) -> list[CoreConnection]:
        """Return the cores that accept new requests."""
        return [core for core in self._cores if core.ready and core.is_serving]

    def find_overload(self) -> Overloaded | None:
        """Return the overload of a full replica if no serving replica has room for another request, else None."""
        overload = None
        for core in self.open_cores():
            try:
                core.load.check(1, 1)
            except Overloaded as error:
                overload = error
            else:
                return None
        return overload

    async def route(
        self, sequences: list[SequenceRequest], requests: list[EngineCoreRequest]
    ) -> list[CoreConnection]:
        """Return a core for each sequence. Adjacent sequences of one prompt (the same object) share a core.

        Raises:
            Overloaded: The queue of a chosen core is full.
            ReplicaUnavailable: The requested replica accepts no requests at the moment.
        """
        new_tokens: Counter[int] = Counter()
        new_sequences: Counter[int] = Counter()
        routed: list[CoreConnection] = []
        for position, (sequence, request) in enumerate(zip(sequences, requests, strict=True)):
            if position and position % SEQUENCES_AT_ONCE == 0:
                await asyncio.sleep(0)
            prompt = sequence.prompt_token_ids
            if position == 0 or prompt is not sequences[position - 1].prompt_token_ids:
                core = self.choose_core(request, sequence.data_parallel_rank, new_sequences)
            new_sequences[core.core_index] += 1
            new_tokens[core.core_index] += len(request.prompt_token_ids) // 4
            routed.append(core)
        params = requests[0].kv_transfer_params if requests else None
        if params and params.get("do_remote_prefill"):
            # If the core refuses the request, it also lets the server that holds the request's blocks release them.
            return routed
        for core_index, count in new_sequences.items():
            try:
                self._cores[core_index].load.check(count, new_tokens[core_index])
            except Overloaded:
                self._metrics.record_rejection(core_index, "queue_full")
                raise
        return routed

    def choose_core(
        self,
        request: EngineCoreRequest,
        rank: int | None = None,
        more: Mapping[int, int] = _NO_SEQUENCES,
    ) -> CoreConnection:
        """Return the core for a request.

        `more` is the number of sequences about to be sent to each core.

        Raises:
            ReplicaUnavailable: Replica `rank` accepts no requests at the moment.
        """
        candidates = self.open_cores()
        if rank is not None:
            if self._cores[rank] not in candidates:
                raise ReplicaUnavailable(
                    f"replica {rank} currently accepts no requests; use another X-data-parallel-rank or "
                    "retry later"
                )
            return self._cores[rank]
        if not candidates:
            # The requests wait until the core serves again. A drained core stays drained until an operator changes
            # that.
            candidates = [core for core in self._cores if core.is_in_rotation] or self._cores
        candidates = [core for core in candidates if not core.is_stuck] or candidates
        candidates = [core for core in candidates if not core.is_for_prefill] or candidates
        return self._choose_among(candidates, request, more)

    def choose_prefill_core(self, request: EngineCoreRequest) -> CoreConnection | None:
        """Return the prefill replica for a prompt, or None if none serves."""
        candidates = [core for core in self.open_cores() if core.is_for_prefill]
        return self._choose_among(candidates, request, _NO_SEQUENCES) if candidates else None

    def _choose_among(
        self,
        candidates: Sequence[CoreConnection],
        request: EngineCoreRequest,
        more: Mapping[int, int],
    ) -> CoreConnection:
        if len(candidates) == 1:
            return candidates[0]
        blocks = block_keys(request.block_hashes)
        # The same hash in all frontends chooses the same replica for an adapter or prompt that no replica has yet.
        home = blocks[0] if blocks else 0
        with_adapter: list[int] = []
        if request.lora is not None:
            home = adapter_key(request.lora.version)
            with_adapter = [
                index for index, core in enumerate(candidates) if core.load.prefixes.has(home)
            ]
        counts = (core.load.prefixes.count_blocks(blocks) for core in candidates)
        return candidates[
            choose_replica(
                [core.load.total + more.get(core.core_index, 0) for core in candidates],
                {index: count for index, count in enumerate(counts) if count},
                len(blocks),
                home,
                self._max_num_seqs,
                with_adapter,
            )
        ]

    def keys(self, request: EngineCoreRequest) -> list[int]:
        """Return the keys of the blocks and adapter that a request leaves at its replica; [] for one replica."""
        if len(self._cores) == 1:
            return []
        keys = block_keys(request.block_hashes)
        return keys if request.lora is None else [*keys, adapter_key(request.lora.version)]
