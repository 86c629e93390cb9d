"""Pipeline parallelism: contiguous layers a stage, and as many batches under way as there are stages.

Each rank of a stage speaks with the rank in its place in the others: hidden states go to the next stage, and sampled
tokens from the last one to the first, which needs them for the step after, without a way through the core.

T tokens of a step, D hidden size, R rows that sample.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...protocol.arrays import Int32Array, Int64Array
from ..batch import PersistentBatch
from ..device.transfers import to_device

SPARE_SENDS: Final = 4
"""Sends that may be pending beside one for each stage: the core keeps fewer steps in flight, so waiting for the oldest
send does not block."""


class Pipeline:
    """One rank's place among the stages; by default the only one."""

    def __init__(
        self, stage: int = 0, num_stages: int = 1, ranks_per_stage: int = 1, rank: int = 0
    ):
        self.stage = stage
        self.num_stages = num_stages
        self._first = rank - stage * ranks_per_stage
        self._last = self._first + (num_stages - 1) * ranks_per_stage
        self._previous = rank - ranks_per_stage
        self._next = rank + ranks_per_stage
        self._max_pending_sends = num_stages + SPARE_SENDS
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send_hidden(self, hidden_TD: Tensor) -> None:
        """Start sending to the next stage; `hidden_TD` must not change from now on."""
        self._send(hidden_TD, self._next)

    def receive_hidden(self, hidden_TD: Tensor) -> Tensor:
        """Fill `hidden_TD` with what the stage before sends, and return it."""
        dist.recv(hidden_TD, self._previous)
        return hidden_TD

    def send_tokens(self, token_ids_R: Tensor) -> None:
        """Start sending to the first stage."""
        self._send(token_ids_R.to(torch.int32, copy=True), self._first)

    def begin_receiving_tokens(self, token_ids_R: Tensor) -> dist.Work:
        """Receive from the last stage into `token_ids_R`, int32."""
        work = dist.irecv(token_ids_R, self._last)
        assert work is not None
        return work

    def close(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()

    def _send(self, x: Tensor, rank: int) -> None:
        if len(self._pending_sends) == self._max_pending_sends:
            self._pending_sends.popleft()[0].wait()
        work = dist.isend(x, rank)
        assert work is not None
        # The tensor must live until the other end has it.
        self._pending_sends.append((work, x))


class TokenFeed:
    """On the first stage: puts the last stage's tokens into the batch when a step needs them, not before."""

    def __init__(self, pipeline: Pipeline, batch: PersistentBatch, num_slots: int) -> None:
        self._pipeline = pipeline
        self._batch = batch
        self._arriving: deque[tuple[dist.Work, Tensor, Int32Array, Int32Array]] = deque()
        self._num_expected = 0
        self._num_received = 0
        self._last_expected: Int64Array = np.zeros(num_slots, np.int64)
        self._first_valid: Int64Array = np.zeros(num_slots, np.int64)

    def expect(self, slots_R: Int32Array) -> None:
        """The last stage samples a token for each of these slots in the step that this one has just run."""
        columns_R = self._batch.reserve(slots_R)
        tokens_R = torch.empty(len(slots_R), dtype=torch.int32, device=self._batch.device)
        work = self._pipeline.begin_receiving_tokens(tokens_R)
        self._num_expected += 1
        self._last_expected[slots_R] = self._num_expected
        self._arriving.append((work, tokens_R, slots_R, columns_R))

    def forget(self, slot: int) -> None:
        """The slot has another request now: tokens of the one before that are still on their way are dropped."""
        self._last_expected[slot] = 0
        self._first_valid[slot] = self._num_expected + 1

    def await_tokens(self, slots_S: Int32Array) -> None:
        """Wait until all tokens of these slots are in the batch."""
        needed = int(self._last_expected[slots_S].max())
        while self._num_received < needed:
            self._receive()

    def close(self) -> None:
        """Receive the tokens that are still on their way: their sender waits until they are received."""
        while self._arriving:
            self._receive()

    def _receive(self) -> None:
        work, tokens_R, slots_R, columns_R = self._arriving.popleft()
        work.wait()
        self._num_received += 1
        is_valid_R = self._first_valid[slots_R] <= self._num_received
        rows = to_device(is_valid_R.nonzero()[0], tokens_R.device)
        self._batch.store(slots_R[is_valid_R], columns_R[is_valid_R], tokens_R[rows])
