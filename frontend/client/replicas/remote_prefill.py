"""Disaggregated prefill: prefill replicas compute the long prompts of requests that decode replicas continue."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from ....protocol.block_hash import block_keys
from ....protocol.config import EngineConfig, ReplicaRole
from ....protocol.kv_transfer.direct import request_name
from ....protocol.messages import EngineCoreOutputs, EngineCoreRequest, EventKind, FinishReason
from ....protocol.sampling_params import SamplingParams
from ..request_group import Sequence
from .core_connection import CoreConnection
from .routing import Router

_COMPUTED: Final = (FinishReason.STOP, FinishReason.LENGTH)


class _Prefill:
    """A prompt that a prefill replica computes, with the sequences that will continue it at decode replicas."""

    def __init__(
        self, request: EngineCoreRequest, name: str, core: CoreConnection, keys: list[int]
    ) -> None:
        self.request = request
        self.name = name
        self.core = core
        self.keys = keys
        self.num_tokens = len(request.prompt_token_ids) // 4
        self.was_queued = self.was_scheduled = False
        self.sequences: list[tuple[Sequence, int]] = []


class RemotePrefill:
    """Sends long prompts to prefill replicas, and their sequences to decode replicas once the prompts are scheduled.

    A decode replica fetches the blocks while they are computed, and computes the missing ones.

    Args:
        config: The engine's configuration.
        client_index: The number of this frontend.
        sequences: The unfinished sequences of this frontend, by request index.
        router: Chooses the replicas.
        next_index: Returns a free request index.
        send: Sends a sequence to its replica.
    """

    def __init__(
        self,
        config: EngineConfig,
        client_index: int,
        sequences: Mapping[int, Sequence],
        router: Router,
        next_index: Callable[[], int],
        send: Callable[[Sequence], None],
    ) -> None:
        self._parallel = config.parallel
        self._block_size = config.cache.block_size
        self._client_index = client_index
        self._sequences = sequences
        self._router = router
        self._next_index = next_index
        self._send = send
        self.prefills: dict[int, _Prefill] = {}
        """The prompts being computed, by their request index."""
        self._sources: dict[Sequence, tuple[CoreConnection, int]] = {}
        """For each sequence that may not have fetched its blocks yet, the core and request index that hold them."""
        self._latest: _Prefill | None = None

    def send(self, sequence: Sequence, core: CoreConnection) -> None:
        """Send a new sequence to its replica: immediately, or after a prefill replica has started its prompt."""
        if not self._begin(sequence, core):
            self._send(sequence)

    def _begin(self, sequence: Sequence, core: CoreConnection) -> bool:
        request = sequence.request
        if not self._is_worthwhile(request, core):
            return False
        latest = self._latest
        if (
            latest is not None
            and latest.request.prompt_token_ids is request.prompt_token_ids
            and latest.request.request_index in self.prefills
            and not latest.was_scheduled
        ):
            latest.sequences.append((sequence, request.request_index))
            return True
        source = self._router.choose_prefill_core(request)
        if source is None:
            return False
        index = self._next_index()
        name = request_name(self._client_index, index, request.arrival_time)
        params: dict[str, object] = {"do_remote_decode": True, "remote_request_id": name}
        prefill = _Prefill(
            msgspec.structs.replace(
                request,
                request_index=index,
                sampling_params=SamplingParams(temperature=0.0, max_tokens=1),
                predicted_token_ids=b"",
                kv_transfer_params=params,
            ),
            name,
            source,
            self._router.keys(request),
        )
        prefill.sequences.append((sequence, request.request_index))
        self.prefills[index] = self._latest = prefill
        source.load.record_submitted(prefill.num_tokens, prefill.keys)
        source.add_request(prefill.request)
        return True

    def _is_worthwhile(self, request: EngineCoreRequest, core: CoreConnection) -> bool:
        """Return whether a prefill replica should compute a prompt, because `core` has few of its blocks."""
        if core.role is not ReplicaRole.DECODE:
            return False
        if (
            request.pooling_params is not None
            or request.sampling_params.prompt_logprobs is not None
            or request.sampling_params.returned_states is not None
            or request.encoder_inputs
            or request.kv_transfer_params is not None
            or request.is_resubmitted
        ):
            return False
        keys = block_keys(request.block_hashes)
        # The sequence's own blocks already count as expected there.
        num_missing = len(keys) - core.load.prefixes.count_stored(keys)
        return num_missing * self._block_size >= self._parallel.remote_prefill_tokens

    def apply_outputs(self, outputs: EngineCoreOutputs) -> None:
        """Apply a core's outputs that concern prompts of prefill replicas, or sequences that fetch their blocks."""
        if not (self.prefills or self._sources):
            return
        for event in (event for group in outputs.events for event in group.split()):
            prefill = self.prefills.get(event.request_index)
            if prefill is None:
                sequence = self._sequences.get(event.request_index)
                if sequence is not None and event.kind is EventKind.SCHEDULED:
                    # A sequence is scheduled when its fetch has ended.
                    self.end_fetch(sequence)
            elif event.kind is EventKind.QUEUED and not prefill.was_queued:
                prefill.was_queued = True
                prefill.core.load.record_queued()
            elif event.kind is EventKind.SCHEDULED and not prefill.was_scheduled:
                self._leave_queue(prefill)
                self._release(prefill, is_computed=True)
        for done in outputs.finished:
            prefill = self.prefills.pop(done.request_index, None)
            if prefill is not None:
                self._leave_queue(prefill)
                prefill.core.load.record_finished(prefill.keys)
                self._release(prefill, is_computed=done.reason in _COMPUTED)

    def _leave_queue(self, prefill: _Prefill) -> None:
        if not prefill.was_scheduled:
            prefill.was_scheduled = True
            prefill.core.load.record_left_queue(prefill.num_tokens, was_queued=prefill.was_queued)

    def _release(self, prefill: _Prefill, *, is_computed: bool) -> None:
        """Send the sequences that wait for a prompt, unless they have ended or were sent already."""
        sequences, prefill.sequences = prefill.sequences, []
        for sequence, request_index in sequences:
            if sequence.finished or sequence.request_index != request_index:
                continue
            if is_computed:
                self.begin_fetch(sequence, prefill.core, prefill.request.request_index)
                if len(sequences) == 1 and sequence.request.kv_transfer_params is not None:
                    # The last block is incomplete, so it is offered only until the first fetch ends.
                    sequence.request.kv_transfer_params["fetches_last_block"] = True
            self._send(sequence)
        if (
            is_computed
            and (prefill.core, prefill.request.request_index) not in self._sources.values()
        ):
            # All sequences have ended, or moved to this replica, so nothing will fetch the blocks.
            self._abort(prefill)

    def begin_fetch(self, sequence: Sequence, core: CoreConnection, request_index: int) -> None:
        """Make a sequence fetch its blocks from a core that computes, or has computed, them for a request."""
        self.end_fetch(sequence)
        request = sequence.request
        request.kv_transfer_params = {
            "do_remote_prefill": True,
            "replica": core.core_index,
            "replica_epoch": core.epoch,
            "remote_request_id": request_name(
                self._client_index, request_index, request.arrival_time
            ),
        }
        self._sources[sequence] = core, request_index

    def end_fetch(self, sequence: Sequence) -> None:
        """Free the blocks that a core holds for a sequence, or stop computing them, unless others fetch them."""
        source = self._sources.pop(sequence, None)
        if source is None or source in self._sources.values():
            return
        core, request_index = source
        if request_index in self.prefills:
            self._abort(self.prefills[request_index])
        else:
            core.abort_request(request_index)

    def resend(self, sequence: Sequence, old_index: int, core: CoreConnection) -> None:
        """Send a sequence with a new request index: to the next core of its replica, or to another replica.

        If its prompt still waits at a prefill replica, it is sent once that is scheduled. A sequence that moves to the
        replica which has its blocks fetches nothing.
        """
        waits = sequence, old_index
        prefill = next((each for each in self.prefills.values() if waits in each.sequences), None)
        if prefill is not None and prefill.core is not core:
            prefill.sequences[prefill.sequences.index(waits)] = sequence, sequence.request_index
            return
        params = sequence.request.kv_transfer_params
        if prefill is not None or (params and params.get("replica") == core.core_index):
            self.cancel(sequence)
            sequence.request.kv_transfer_params = None
        self._send(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Stop computing the prompt of a sequence that has ended, unless others need it, and free its blocks."""
        for prefill in list(self.prefills.values()):
            waits = [each for each in prefill.sequences if each[0] is not sequence]
            is_own = len(waits) < len(prefill.sequences)
            prefill.sequences = waits
            if is_own and not waits:
                self._abort(prefill)
        self.end_fetch(sequence)

    def _abort(self, prefill: _Prefill) -> None:
        """Stop computing a prompt, or free its blocks if it is computed."""
        if prefill.request.request_index in self.prefills:
            self._remove(prefill)
        prefill.core.abort_request(prefill.request.request_index)

    def _remove(self, prefill: _Prefill) -> None:
        del self.prefills[prefill.request.request_index]
        self._leave_queue(prefill)
        prefill.core.load.record_moved(prefill.keys)

    def drop_core(self, core_index: int) -> None:
        """Send the sequences of a lost prefill replica's prompts to their decode replicas."""
        for sequence, (core, _) in list(self._sources.items()):
            if core.core_index == core_index:
                del self._sources[sequence]
        for prefill in list(self.prefills.values()):
            if prefill.core.core_index == core_index:
                self._remove(prefill)
                self._release(prefill, is_computed=False)

    def suspect(self, request_index: int, *, is_suspect: bool) -> None:
        """Record that a replica was lost while it computed the prompt with this request index."""
        prefill = self.prefills.get(request_index)
        if prefill is not None:
            for sequence, _ in prefill.sequences:
                sequence.mark_suspected(is_suspect=is_suspect)
