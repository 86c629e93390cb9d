"""A running hash over everything a scheduler decides."""

from __future__ import annotations

from copy import copy
from hashlib import blake2b

import msgspec

from ...protocol.messages import (
    EngineCoreOutputs,
    SchedulerOutput,
    SchedulerStats,
)
from .events import ClientReport

_encode = msgspec.msgpack.Encoder().encode


class DecisionHash:
    """Each value covers the decision and the value before, so equal values mean equal decisions ever since `start`.

    Tokens, log-probabilities and messages to people are left out: they are not decided here.
    """

    def __init__(self, start: bytes = b"") -> None:
        self._hasher = blake2b(start, digest_size=8)
        self._rows: dict[int, bytes] = {}

    @property
    def value(self) -> bytes:
        return self._hasher.digest()

    def scheduled(self, step: SchedulerOutput | None) -> None:
        """Take in a step: of its content, how much that is."""
        if step is not None:
            has_content = bool(step.new_requests or step.draft_token_ids or step.encoders)
            if has_content:
                self._hasher.update(_encode(_sizes_of_content(step)))
            if has_content or step.kv_connector_metadata:
                step = copy(step)
                step.new_requests = []
                step.draft_token_ids = step.kv_connector_metadata = b""
                step.encoders = None
        self._hasher.update(_encode(step))

    def told(self, outputs: dict[int, EngineCoreOutputs]) -> list[ClientReport]:
        """Take in what clients are told. Returns the part of it that is not about tokens."""
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
            if stats is not None and (stats.num_dropped_frames or stats.kv_connector is not None):
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

    def answered(self, answer: bool) -> None:
        self._hasher.update(_encode(answer))


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
            )
            for data in step.new_requests
        ],
        len(step.draft_token_ids),
        encoders and (len(encoders.freed_hashes), encoders.computed, encoders.loaded),
    )


def _without_counts(stats: SchedulerStats) -> SchedulerStats:
    """The KV connector counts for itself, and the core its frames."""
    stats = copy(stats)
    stats.num_dropped_frames = 0
    if stats.kv_connector is not None:
        stats.kv_connector = msgspec.structs.replace(stats.kv_connector, counts={})
    return stats
