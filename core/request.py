"""A request as the scheduler knows it while it is not in motion.

What changes every step while it runs lives in the arrays of `Slots`; here is what identifies it,
and what must survive while it has no slot.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import numpy as np

from ..protocol.arrays import Int32Array, int32_view
from ..protocol.block_hash import HASH_BYTES, hash_blocks
from ..protocol.messages import EngineCoreRequest, FinishReason, TokenLogprobs

RequestKey: TypeAlias = tuple[int, int]
"""(client_index, request_index): unique among live requests."""


_DIGEST = np.dtype((np.void, HASH_BYTES))


class RequestStatus(enum.IntEnum):
    """Statuses from FINISHED_STOPPED on are final, in the order of `FinishReason`."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    FINISHED_EXPIRED = 8
    FINISHED_ERROR = 9

    @property
    def is_finished(self) -> bool:
        return self >= RequestStatus.FINISHED_STOPPED

    @classmethod
    def finished(cls, reason: FinishReason) -> RequestStatus:
        return cls(cls.FINISHED_STOPPED + reason)


class Request:
    """`arrival` orders requests by their coming, whatever the clocks of the clients say.

    While the request has a slot (`slot` >= 0) its output tokens are in `Slots`, otherwise in
    `output_token_ids`. `num_cached_tokens` is -1 until the first admission.
    """

    __slots__ = (
        "_block_hashes",
        "arrival",
        "arrival_time",
        "client_index",
        "deadline",
        "eos_token_ids",
        "has_sampled",
        "is_corrupted",
        "key",
        "num_cached_tokens",
        "num_prompt_tokens",
        "output_token_ids",
        "params",
        "priority",
        "prompt_block_hashes",
        "prompt_logprobs",
        "prompt_token_ids",
        "request_index",
        "root_hash",
        "slot",
        "status",
        "stop_token_ids",
        "tenant",
    )

    def __init__(self, client_index: int, message: EngineCoreRequest, arrival: int) -> None:
        self.client_index = client_index
        self.request_index = message.request_index
        self.key: RequestKey = (client_index, message.request_index)
        self.arrival = arrival
        self.arrival_time = message.arrival_time
        self.priority = message.priority
        self.tenant = message.tenant
        self.deadline = message.deadline
        self.params = message.sampling_params
        self.prompt_token_ids = message.prompt_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids) // 4
        self.output_token_ids = b""
        self.prompt_block_hashes = message.block_hashes
        self.root_hash = message.root_hash
        self._block_hashes: list[bytes] | None = None
        ends = () if self.params.ignore_eos else message.eos_token_ids
        self.eos_token_ids = ends
        self.stop_token_ids = frozenset(ends).union(self.params.stop_token_ids)
        self.status = RequestStatus.WAITING
        self.slot = -1
        self.num_cached_tokens = -1
        self.has_sampled = False
        self.is_corrupted = False
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def num_tokens(self) -> int:
        """Prompt and output; meaningful while the request has no slot."""
        return self.num_prompt_tokens + len(self.output_token_ids) // 4

    @property
    def token_ids(self) -> bytes:
        """Prompt and output as int32 bytes; meaningful while the request has no slot."""
        return self.prompt_token_ids + self.output_token_ids

    @property
    def block_hashes(self) -> list[bytes]:
        """Digests of the full blocks hashed so far, the prompt's first."""
        if self._block_hashes is None:
            self._block_hashes = _split(self.prompt_block_hashes)
        return self._block_hashes

    def hash_output_blocks(self, output_token_ids: Int32Array, block_size: int) -> list[bytes]:
        """Extend `block_hashes` over all full blocks of the prompt followed by `output_token_ids`."""
        hashes = self.block_hashes
        start = len(hashes) * block_size
        end = self.num_prompt_tokens + len(output_token_ids)
        if end - start >= block_size:
            prompt = int32_view(self.prompt_token_ids)[start:]
            output = output_token_ids[max(0, start - self.num_prompt_tokens) :]
            parent = hashes[-1] if hashes else self.root_hash
            digests = hash_blocks(np.concatenate((prompt, output)), block_size, parent)
            hashes += _split(digests)
        return hashes


def _split(digests: bytes) -> list[bytes]:
    split: list[bytes] = np.frombuffer(digests, dtype=_DIGEST).tolist()
    return split
