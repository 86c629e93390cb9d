"""A running hash over a scheduler's decisions, by which a replay detects the first difference."""

from __future__ import annotations

from copy import copy
from hashlib import blake2b

import msgspec

from ...protocol.messages import EngineCoreOutputs, SchedulerStats
from ...protocol.worker_messages import SchedulerOutput
from .events import ClientReport

_encode = msgspec.msgpack.Encoder().encode


class DecisionHash:
    """A running hash over decisions: each value covers one decision and the previous value.

    Equal values mean that all decisions since `start` were equal. Tokens, log-probabilities and error texts are not
    decisions and are left out.
    """

    def __init__(self, start: bytes = b"") -> None:
        self._hasher = blake2b(start, digest_size=8)
        self._rows: dict[int, bytes] = {}

    @property
    def value(self) -> bytes:
        """The hash so far, 8 bytes."""
        return self._hasher.digest()

    def add_step(self, step: SchedulerOutput | None) -> None:
        """Add a step message, or None for no step. Tokens, drafts and encoder inputs are hashed by their sizes only."""
        if step is not None:
            has_content = bool(
                step.new_requests or step.draft_token_ids or step.encoders or step.lora_loads
            )
            if has_content:
                self._hasher.update(_encode(_sizes_of_content(step)))
            if has_content or step.kv_connector_metadata:
                step = copy(step)
                step.new_requests = []
                step.draft_token_ids = step.kv_connector_metadata = b""
                step.encoders = None
                step.lora_loads = []
        self._hasher.update(_encode(step))

    def add_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> list[ClientReport]:
        """Add the outputs for clients. Return the parts of them that concern requests that ended or had an event."""
        covered = []
        rare = []
        for client_index, message in outputs.items():
            finished, events = message.finished, message.events
            rows: bytes | None = message.request_indices
            if rows == self._rows.get(client_index):
                rows = None
            else:
                self._rows[client_index] = message.request_indices
            ends = [(end.request_index, end.reason, end.stop_reason) for end in finished]
            stats = message.stats
            if stats is not None and (
                stats.num_dropped_frames
                or stats.kv_connector is not None
                or stats.running_loras
                or stats.waiting_loras
            ):
                stats = _without_counts(stats)
            covered.append(
                (
                    client_index,
                    rows,
                    len(message.token_ids),
                    message.num_tokens,
                    ends,
                    message.finished_set,
                    events,
                    stats,
                )
            )
            if events or message.finished_set:
                rare.append(ClientReport(client_index, finished, message.finished_set, events))
        self._hasher.update(_encode(covered))
        return rare

    def add_result(self, result: bool) -> None:
        """Add the result of a call such as `reset_prefix_cache`."""
        self._hasher.update(_encode(result))


def _sizes_of_content(step: SchedulerOutput) -> object:
    encoders = step.encoders
    return (
        [
            (
                data.slot,
                data.request_id,
                len(data.token_ids),
                data.num_prompt_tokens,
                data.num_computed_tokens,
                data.block_ids,
                data.lora_number,
            )
            for data in step.new_requests
        ],
        len(step.draft_token_ids),
        encoders and (len(encoders.freed_hashes), encoders.computed, encoders.loaded),
        [load.number for load in step.lora_loads],
    )


def _without_counts(stats: SchedulerStats) -> SchedulerStats:
    """Return the statistics without names, and without the counts of objects outside the scheduler."""
    stats = copy(stats)
    stats.num_dropped_frames = 0
    stats.running_loras = stats.waiting_loras = []
    if stats.kv_connector is not None:
        stats.kv_connector = msgspec.structs.replace(stats.kv_connector, counts={})
    return stats
