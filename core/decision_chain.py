"""A running hash over everything a scheduler decides."""

from __future__ import annotations

from copy import copy
from hashlib import blake2b
from typing import Final

import msgspec

from ..protocol.arrays import int32_bytes
from ..protocol.messages import EncoderWork, EngineCoreOutputs, NewRequestData, SchedulerOutput
from ..protocol.sampling_params import SamplingParams
from .events import Told

_NO_PARAMS: Final = SamplingParams()
_encode = msgspec.msgpack.Encoder().encode


class DecisionChain:
    """Each value covers the decision and the value before, so equal values mean equal decisions ever since `start`.

    Tokens, log-probabilities and messages to people are left out: they are not decided here.
    """

    def __init__(self, start: bytes = b"") -> None:
        self._hasher = blake2b(start, digest_size=8)
        self._rows: dict[int, bytes] = {}

    @property
    def value(self) -> bytes:
        return self._hasher.digest()

    def scheduled(self, step: SchedulerOutput | None) -> SchedulerOutput | None:
        """Take in a step. Returns it with nothing of its content but how much that is."""
        if step is not None:
            if step.new_requests:
                step = copy(step)
                step.new_requests = [_without_tokens(data) for data in step.new_requests]
            if step.draft_token_ids or step.kv_connector_metadata or step.encoders is not None:
                step = copy(step)
                step.draft_token_ids = int32_bytes(len(step.draft_token_ids) // 4)
                step.kv_connector_metadata = b""
                step.encoders = step.encoders and _without_hashes(step.encoders)
        self._hasher.update(_encode(step))
        return step

    def told(self, outputs: dict[int, EngineCoreOutputs]) -> list[Told]:
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
            covered.append(
                (
                    client_index,
                    rows,
                    len(message.token_ids),
                    message.num_tokens,
                    ends,
                    message.finished_set,
                    events,
                    message.stats,
                )
            )
            if events or message.finished_set:
                rare.append(Told(client_index, finished, message.finished_set, events))
        self._hasher.update(_encode(covered))
        return rare

    def answered(self, answer: bool) -> None:
        self._hasher.update(_encode(answer))


def _without_tokens(data: NewRequestData) -> NewRequestData:
    data = copy(data)
    data.token_ids = int32_bytes(len(data.token_ids) // 4)
    data.sampling_params = _NO_PARAMS
    data.lora_name = ""
    data.encoder_inputs = []
    return data


def _without_hashes(work: EncoderWork) -> EncoderWork:
    return EncoderWork([b""] * len(work.freed_hashes), work.computed, work.loaded)
