"""Expert parallelism over data-parallel replicas: the workers of all replicas divide the experts of every layer.

A worker sends the rows of its tokens to the ranks that have their experts, each row once per rank, and receives the
outputs (all-to-all). All ranks must take part in each exchange, but every core schedules independently. So the ranks
run in *rounds*: in a round, the rows of one step, or of a slice of a long one, pass through all layers. A replica with
a step begins a round and invites the others. A replica without a step joins as a guest, without rows. While no replica
has a step, there are no rounds.

The first tensor-parallel rank of each replica, its leader, decides in which rounds the replica has rows. It sends this
decision to the other ranks of its replica, because they may receive a step earlier or later.

Shapes: N ranks, M rows that this rank sends, B rows that it receives, D elements of a row.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

_FOREVER: Final = timedelta(days=36_500)

_STEP, _GUEST = -1, 0
"""The messages of a leader to its replica. To another leader, it sends the number of a round, counted from 1."""


class ExpertGroup:
    """The position of one rank among the ranks that divide the experts.

    Args:
        replica_size: The number of workers of a replica, which have consecutive ranks and the same rows.
        data: A process group of all ranks, for rows.
        control: A process group of all ranks, on the host, for invitations.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        replica_size: int,
        data: dist.ProcessGroup,
        control: dist.ProcessGroup,
    ) -> None:
        self.rank = rank
        self.size = size
        self._place = rank % replica_size
        self._replica_size = replica_size
        self._data = data
        self._num_rounds = 0
        leaders = range(0, size, replica_size)
        self._leaders = [leader for leader in leaders if leader != rank]
        self._followers = range(rank + 1, rank + replica_size) if not self._place else range(0)
        self._messages = _Messages(control)
        self.fd = self._messages.fd
        """File descriptor that is readable once there is an invitation, or something else to receive."""

    def part(self, count: int) -> range:
        """Return the experts of this rank, given their number."""
        return self.parts(count)[self.rank]

    def parts(self, count: int) -> list[range]:
        """Return the experts of each rank, given their number."""
        starts = [rank * count // self.size for rank in range(self.size + 1)]
        return [range(*bounds) for bounds in pairwise(starts)]

    def own_rows(self, num_rows: int) -> slice:
        """Return the rows that this rank sends.

        The ranks of a replica have the same rows, and divide them for sending.
        """
        start, stop = (
            num_rows * place // self._replica_size for place in (self._place, self._place + 1)
        )
        return slice(start, stop)

    def begin_round(self, join_round: Callable[[], None]) -> None:
        """Begin a round with rows. The first round of a step may have to wait for rounds of other replicas.

        `join_round` runs a round without rows.
        """
        if self._place:
            while self._messages.await_order() == _GUEST:
                join_round()
            return
        self.continue_step()
        self._messages.send(_STEP, self._followers)

    def continue_step(self) -> None:
        """Begin another round of the same step."""
        self._num_rounds += 1
        # A leader that has sent an invitation has sent it to all others.
        if not self._place and self._messages.last_invitation() < self._num_rounds:
            self._messages.send(self._num_rounds, self._leaders)

    def join_rounds(self, join_round: Callable[[], None]) -> None:
        """Join the rounds of other replicas as a guest, until there are no more invitations."""
        self._messages.clear()
        if self._place:
            while self._messages.take_guest_order():
                join_round()
            return
        while self._messages.last_invitation() > self._num_rounds:
            self._num_rounds += 1
            self._messages.send(_GUEST, self._followers)
            join_round()

    def dispatch(self, x_MD: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor]:
        """Send rows to other ranks.

        Args:
            x_MD: Rows, ordered by receiver.
            counts_N: The number of rows for each rank, int64.

        Returns:
            The received rows, ordered by sender, and the number of rows from each, int64 [N].
        """
        received_N = torch.empty_like(counts_N)
        dist.all_to_all_single(received_N, counts_N, group=self._data)
        return self.exchange(x_MD, counts_N, received_N), received_N

    def exchange(self, x_MD: Tensor, counts_N: Tensor, expected_N: Tensor) -> Tensor:
        """Send rows like `dispatch`. `expected_N` are the numbers of rows that this rank receives from each rank."""
        received, sent = expected_N.tolist(), counts_N.tolist()
        x_BD = x_MD.new_empty((sum(received), *x_MD.shape[1:]))
        dist.all_to_all_single(x_BD, x_MD.contiguous(), received, sent, group=self._data)
        return x_BD


class _Messages:
    """Sends integers to other ranks of a group, and receives theirs in a thread.

    `fd` becomes readable when an integer arrives. The thread exits if a rank is lost; the next exchange with that rank
    then fails.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._orders: deque[int] = deque()
        self._last_invitation = 0
        self._error: RuntimeError | None = None
        self._changed = threading.Condition()
        self._wake, self._waker = socket.socketpair()
        self._wake.setblocking(False)
        self._waker.setblocking(False)
        self.fd = self._wake.fileno()
        threading.Thread(target=self._receive, name="expert rounds", daemon=True).start()

    def send(self, number: int, ranks: range | list[int]) -> None:
        """Send a number to each of these ranks."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        for rank in ranks:
            message = torch.tensor([number])
            work = dist.isend(message, group=self._group, group_dst=rank)
            assert work is not None
            # The tensor must stay alive until it is sent.
            self._sending.append((work, message))

    def last_invitation(self) -> int:
        """Return the highest number of a round to which another leader has sent an invitation."""
        return self._last_invitation

    def await_order(self) -> int:
        """Wait for the next message of the leader, and return it. Raise RuntimeError if a rank is lost."""
        with self._changed:
            while not self._orders:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._orders.popleft()

    def take_guest_order(self) -> bool:
        """If the leader's next message is to join a round as a guest, remove it and return True."""
        with self._changed:
            if not self._orders or self._orders[0] != _GUEST:
                return False
            self._orders.popleft()
            return True

    def clear(self) -> None:
        """Make `fd` unreadable until something arrives."""
        with contextlib.suppress(BlockingIOError):
            while self._wake.recv(4096):
                pass

    def _receive(self) -> None:
        message = torch.zeros(1, dtype=torch.int64)
        while True:
            try:
                work = dist.irecv(message, group=self._group)
                assert work is not None
                work.wait(_FOREVER)
            except RuntimeError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify()
                return
            number = int(message)
            with self._changed:
                if number > 0:
                    self._last_invitation = max(self._last_invitation, number)
                else:
                    self._orders.append(number)
                self._changed.notify()
            # If the buffer is full, the other end is readable anyway.
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"\0")
