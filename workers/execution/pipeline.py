"""Pipeline parallelism: each stage has contiguous layers, and as many batches are in flight as there are stages.

Each rank of a stage communicates with the ranks at the same position in other stages. Hidden states go to the next
stage. Sampled tokens go directly from the last stage to the first, which needs them for the next step. With drafts,
they go to every other stage, because only the last one determines how many drafts are accepted.

Shapes: T tokens of a step, D hidden size, R rows that sample, K tokens per row in a step with drafts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...protocol.arrays import Int32Array, Int64Array
from ..batch import PersistentBatch
from ..device.transfers import to_device

SPARE_SENDS: Final = 4
"""Number of steps whose sends may be pending in addition to one per stage.

The core keeps fewer steps in flight, so waiting for the oldest send does not block.
"""


class Pipeline:
    """The position of one rank among the stages; by default there is only one stage.

    NCCL's operations in a process group run one after the other. So sending, receiving and the tokens have separate
    groups: the connections from stage 0, 1 and so on use the `links` alternately.
    """

    def __init__(
        self,
        stage: int = 0,
        num_stages: int = 1,
        ranks_per_stage: int = 1,
        rank: int = 0,
        links: Sequence[dist.ProcessGroup | None] = (None,),
        token_group: dist.ProcessGroup | None = None,
    ):
        self.stage = stage
        self.num_stages = num_stages
        first = rank - stage * ranks_per_stage
        self._last = first + (num_stages - 1) * ranks_per_stage
        self._others = range(first, self._last, ranks_per_stage)
        self._previous = rank - ranks_per_stage
        self._next = rank + ranks_per_stage
        self._link_from_previous = links[(stage - 1) % len(links)]
        self._link_to_next = links[stage % len(links)]
        self._token_group = token_group
        sends_per_step = max(num_stages - 1, 1) if rank == self._last else 1
        self._max_pending_sends = sends_per_step * (num_stages + SPARE_SENDS)
        self._pending_sends: deque[tuple[dist.Work, Tensor]] = deque()

    def send_hidden(self, hidden_TD: Tensor) -> None:
        """Start to send hidden states to the next stage. `hidden_TD` must not change afterwards."""
        self._send(hidden_TD, self._next, self._link_to_next)

    def receive_hidden(self, hidden_TD: Tensor) -> Tensor:
        """Receive the previous stage's hidden states into `hidden_TD`, and return it."""
        dist.recv(hidden_TD, self._previous, group=self._link_from_previous)
        return hidden_TD

    def send_tokens(self, token_ids: Tensor, *, has_drafts: bool = False) -> None:
        """Start to send sampled tokens to the first stage, or to all others if the model `has_drafts`."""
        sent = token_ids.to(torch.int32, copy=True)
        for rank in self._others if has_drafts else self._others[:1]:
            self._send(sent, rank, self._token_group)

    def begin_receiving_tokens(self, token_ids: Tensor) -> dist.Work:
        """Start to receive the last stage's tokens into `token_ids`, int32."""
        work = dist.irecv(token_ids, self._last, group=self._token_group)
        assert work is not None
        return work

    def close(self) -> None:
        """Wait until everything that was sent has been received."""
        while self._pending_sends:
            self._pending_sends.popleft()[0].wait()

    def _send(self, x: Tensor, rank: int, group: dist.ProcessGroup | None) -> None:
        if len(self._pending_sends) == self._max_pending_sends:
            self._pending_sends.popleft()[0].wait()
        work = dist.isend(x, rank, group=group)
        assert work is not None
        # The tensor must stay alive until it has been received.
        self._pending_sends.append((work, x))


class TokenFeed:
    """Writes the tokens that the last stage samples into the batch of another stage, once a step needs them."""

    def __init__(self, pipeline: Pipeline, batch: PersistentBatch, num_slots: int) -> None:
        self._pipeline = pipeline
        self._batch = batch
        self._arriving: deque[tuple[dist.Work, Tensor, Int32Array, Int32Array | None]] = deque()
        self._num_expected = 0
        self._num_received = 0
        self._last_expected: Int64Array = np.zeros(num_slots, np.int64)
        self._first_valid: Int64Array = np.zeros(num_slots, np.int64)

    def expect_tokens(self, slots_R: Int32Array) -> None:
        """Start to receive a token for each of these slots, which the last stage samples in the current step."""
        columns_R = self._batch.reserve_columns(slots_R)
        self._expect((len(slots_R),), slots_R, columns_R)

    def expect_verified(self, slots_R: Int32Array, most: int) -> None:
        """Start to receive up to `most` tokens for each of these slots, whose drafts the current step verifies."""
        self._expect((len(slots_R), most), slots_R, None)

    def _expect(
        self, shape: tuple[int, ...], slots_R: Int32Array, columns_R: Int32Array | None
    ) -> None:
        tokens = torch.empty(shape, dtype=torch.int32, device=self._batch.device)
        work = self._pipeline.begin_receiving_tokens(tokens)
        self._num_expected += 1
        self._last_expected[slots_R] = self._num_expected
        self._arriving.append((work, tokens, slots_R, columns_R))

    def drop_tokens(self, slot: int) -> None:
        """Discard tokens that arrive later for the previous request of the slot."""
        self._last_expected[slot] = 0
        self._first_valid[slot] = self._num_expected + 1

    def await_tokens(self, slots_S: Int32Array) -> None:
        """Wait until all tokens of these slots are in the batch."""
        needed = int(self._last_expected[slots_S].max(initial=0))
        while self._num_received < needed:
            self._receive()

    def close(self) -> None:
        """Receive all tokens that have not arrived, because the sender waits for that."""
        while self._arriving:
            self._receive()

    def _receive(self) -> None:
        work, tokens, slots_R, columns_R = self._arriving.popleft()
        work.wait()
        self._num_received += 1
        is_valid_R = self._first_valid[slots_R] <= self._num_received
        if columns_R is None:
            self._batch.store_verified(slots_R[is_valid_R], tokens.numpy()[is_valid_R])
            return
        rows = to_device(is_valid_R.nonzero()[0], tokens.device)
        self._batch.store_tokens(slots_R[is_valid_R], columns_R[is_valid_R], tokens[rows])
